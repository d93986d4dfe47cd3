"""New memory for a tensor's values, and where a tensor's memory is.

``tf.identity`` copies between the CPU and a GPU. On one device it shares the memory, and so it
does between the logical CPUs that virtual GPUs are. Three of TensorFlow's operations always take
new memory, and no one of them does so for every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from d2ldev.operations.dlpack import description_of

WITH_SNAPSHOT = frozenset(
    {
        *(tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32),
        *(tf.uint64, tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    }
)


def copied(x: Any) -> tf.Tensor:
    """A tensor in new memory, on the device of the scope; gradients flow back through it."""
    return _recorded(_copied, x)


def snapshot(x: Any) -> tf.Tensor:
    """As ``copied``, of a dtype in ``WITH_SNAPSHOT``."""
    return _recorded(_snapshot, x)


def copied_across(x: Any) -> tf.Tensor:
    """As ``copied``, between the CPU and a GPU."""
    return _recorded(tf.identity, x)


def _recorded(copy: Callable[[tf.Tensor], tf.Tensor], x: Any) -> tf.Tensor:
    if isinstance(x, tf.Variable):
        x = x.value()
    # Half of the time of a copy, and only a tape wants it. Private, but what
    # ``tf.custom_gradient`` asks itself.
    if not record.could_possibly_record():
        return copy(x)
    here = getattr(x, "backing_device", None)  # a tensor that is only traced has none

    def back(gradient: Any) -> Any:
        """The gradient where the tensor is that was copied, as an operation gives it."""
        parts = tf.nest.flatten(gradient, expand_composites=True)  # that of ``tf.gather`` has three
        if here is None or all(getattr(part, "backing_device", here) == here for part in parts):
            return gradient
        with tf.device(here):
            # Itself recorded, for second gradients.
            return tf.nest.map_structure(
                lambda part: _recorded(copy, part), gradient, expand_composites=True
            )

    return tf.custom_gradient(lambda x: (copy(x), back))(x)


def _snapshot(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Snapshot(input=x)


def _copied(x: tf.Tensor) -> tf.Tensor:
    if x.dtype in WITH_SNAPSHOT:
        return _snapshot(x)
    if x.dtype == tf.string:
        return tf.raw_ops.DeepCopy(x=x)
    flat = tf.reshape(x, [-1])  # float8
    return tf.reshape(tf.concat([flat, flat[:0]], 0), x.shape)


def address_of(x: Any) -> int:
    """The address of the first byte of a tensor or a variable in its device's memory."""
    x = tf.convert_to_tensor(x)  # of a variable: its memory, and no copy
    if x.dtype.name.startswith("float8"):
        # DLPack has no such dtype in TensorFlow; private, but NumPy's own view of the CPU's memory.
        return int(x._numpy_internal().ctypes.data)
    # It is kept, so that the memory outlives the look at it.
    capsule = tf.experimental.dlpack.to_dlpack(x)
    return description_of(capsule).address
