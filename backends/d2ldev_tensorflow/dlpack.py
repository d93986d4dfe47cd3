"""Taking over memory by DLPack, with what TensorFlow leaves unchecked checked before.

On the CPU, TensorFlow's operations end the process when memory does not begin at a multiple of 64
bytes, and its ``from_dlpack`` does not look: https://github.com/dmlc/dgl/issues/995. Most of
NumPy's arrays do not begin so.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d2ldev.operations.dlpack import ON_CPU, description_of

_ALIGNMENT = 64


class Exported:
    """A tensor with the methods of DLPack, which TensorFlow's tensors lack.

    Args:
        x: a tensor or a variable.
    """

    def __init__(self, x: Any) -> None:
        self._x = tf.convert_to_tensor(x)

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._x)

    def __dlpack_device__(self) -> tuple[int, int]:
        described = description_of(self.__dlpack__())
        return described.device_type, described.device_id


def from_dlpack(x: Any) -> tf.Tensor:
    """A tensor on the memory of ``x``.

    Raises:
        BufferError: if the memory begins where TensorFlow cannot use it, or ``x`` refuses.
    """
    # Of no version, which has no flag for read-only memory, so that its owner refuses to give it.
    capsule = x.__dlpack__()
    described = description_of(capsule)
    if described.device_type == ON_CPU and described.address % _ALIGNMENT:
        raise BufferError(f"TensorFlow needs memory that begins at a multiple of {_ALIGNMENT}")
    return tf.experimental.dlpack.from_dlpack(capsule)
