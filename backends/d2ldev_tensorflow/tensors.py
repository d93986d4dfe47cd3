"""Tensors: TensorFlow's tensors and variables.

TensorFlow's operations support fewer dtypes than its tensors. ``tf.fill`` refuses float8, and only
floats are cast to it. ``tf.range`` counts in six dtypes, and adds up the rounding errors of the
shorter ones. On a GPU, only casts and ``tf.concat`` support float8, and most operations keep int32
in the host's memory. In NumPy, bfloat16 and float8 are the dtypes of ``ml_dtypes``, as in
TensorFlow itself.

An operation copies an operand from another device. The operand keeps the copy for the next one
(``EagerCopyToDevice`` with ``mirror=true`` in TensorFlow's ``execute.cc``). ``tf.identity`` returns
the memory of that copy. So a second ``tf.identity`` of the tensor returns the same memory, and
copies nothing. ``_copy_to_device`` keeps no copy. It waits until the bytes have arrived. Between
logical CPUs, and so between virtual GPUs, it shares memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

# Private: nothing else tells whether a ``tf.GradientTape`` records.
from tensorflow.python.eager import record

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    CPU,
    DICT,
    LIST,
    ON_CPU,
    Container,
    Tensor,
    Tensors,
    describe,
    description_of,
)
from d2ldev_tensorflow.devices import OF_THE_HOST, DefaultDevice, TensorFlowDevices, place_of

# TensorFlow's operations end the process if memory of the CPU does not begin at a multiple of this.
# Its ``from_dlpack`` does not check: https://github.com/dmlc/dgl/issues/995. Most NumPy arrays do
# not begin at a multiple of it.
_ALIGNMENT = 64
# From this many elements on, checking for memory takes far less time than writing the elements.
_MANY = 2**28
_EagerTensor = tf.__internal__.EagerTensor
_CPU_NAME = "/CPU:0"
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
# ``Snapshot`` supports these, and no dtype of 8 bits.
_WITH_SNAPSHOT = frozenset(map(tf.as_dtype, _DTYPES))
# A tape records only these. Recording a copy runs ``Identity`` on it, and would bring other dtypes
# (int32, float8) from a GPU to the host.
_WITH_GRADIENT = frozenset(
    map(tf.as_dtype, ("float16", "bfloat16", "float32", "float64", "complex64", "complex128"))
)


class TensorFlowTensors(Tensors):
    """TensorFlow's tensors and variables."""

    types = (tf.Tensor, tf.Variable)
    plain_types = (tf.DType, tf.TensorShape, tf.config.LogicalDevice)
    dtype_names = (*_DTYPES, "float8_e4m3fn", "float8_e5m2")
    default_dtypes = ("int32", "float32")

    def __init__(self, devices: TensorFlowDevices) -> None:
        self._devices = devices
        self._places = devices.places
        # A ``tf.Module`` keeps the containers that are assigned to it in these.
        module = tf.Module()
        module.mapping, module.items, module.pair = {}, [], ({},)
        self._containers = {
            **dict.fromkeys((tf.SparseTensor, tf.IndexedSlices), _COMPOSITE),
            tf.RaggedTensor: _COMPOSITE._replace(slice_items=_slice_rows),
            type(module.mapping): Container(
                Mapping.values, DICT.labels, lambda old, new: type(old)(DICT.rebuild(old, new))
            ),
            type(module.items): LIST._replace(rebuild=lambda old, new: type(old)(new)),
            type(module.pair): LIST._replace(rebuild=lambda old, new: type(old)(tuple(new))),
        }

    # -- reading ----------------------------------------------------------------------------------

    def device_of(self, x: Any) -> Device:
        try:
            return self._places[x.backing_device]
        except (AttributeError, KeyError, TypeError):
            return self._device_of_array(x)

    def _device_of_array(self, x: Any) -> Device:
        """Return the device of a variable, or of a tensor on a device that is not in ``places``."""
        spread = isinstance(x, tf.Variable) and hasattr(x, "values")  # on several devices
        # The ``device`` of a variable is the device of its memory, unlike a tensor's.
        whole = isinstance(x, tf.Variable) and not spread
        name = x.device if whole else getattr(x, "backing_device", None)
        device = self._devices.from_native(name)
        if device is not None:
            self._places[name] = device
            return device
        problem = f"{describe(x)} is not a TensorFlow tensor"
        if spread:
            problem = "the variable is spread over several devices"
        elif isinstance(x, self.types) or type(x).__name__ == "KerasTensor":
            problem = f"the tensor is on {name}, which has no bytes for d2ldev"
            if not name:
                problem = f"{describe(x)} is only traced, and has no bytes until it is computed"
        raise UnsupportedValueError(
            "tell the device of a tensor",
            problem,
            "x = backend.asarray(x) makes a tensor; in a tf.function, ask for its result's device",
        )

    def is_on(self, x: Tensor, device: Device) -> bool:
        try:
            place = self._places[x.backing_device]
        except (AttributeError, KeyError, TypeError):
            place = self._device_of_array(x)
        # Only the host can hold a string.
        return place is device or (device is not CPU and x.dtype in OF_THE_HOST)

    def dtype_of(self, x: Tensor) -> str:
        return str(x.dtype.name)

    def dtype(self, name: str) -> tf.DType:
        return tf.as_dtype(name)

    def address(self, x: Tensor) -> int:
        self.device_of(x)  # refuses a tensor that is only traced, by name
        x = tf.convert_to_tensor(x)  # a variable gives its memory, without a copy
        if x.dtype.name.startswith("float8") and not self._is_on_hardware(x):
            # TensorFlow's DLPack lacks float8. NumPy takes the CPU's memory without a copy.
            return int(share_with_numpy(x).ctypes.data)
        has_none = x.dtype in OF_THE_HOST or x.dtype.is_quantized  # some releases end the process
        if has_none or x.dtype.name.startswith("float8"):
            raise UnsupportedValueError(
                "tell the address of a tensor",
                f"TensorFlow gives none for a tensor of {x.dtype.name}",
                "one of a number dtype has one: tf.cast(x, 'float32')",
            )
        capsule = tf.experimental.dlpack.to_dlpack(x)  # the capsule keeps the memory alive
        return description_of(capsule).address

    def live(self) -> Iterable[Tensor]:
        # A variable may accept any shape; its present value has one.
        return [
            x.value() if isinstance(x, tf.Variable) and not x.shape.is_fully_defined() else x
            for x in super().live()
        ]

    def has_values(self, x: Tensor) -> bool:
        return isinstance(x, (_EagerTensor, tf.Variable))

    def nbytes(self, x: Tensor) -> int:
        # A string and a handle have no fixed size: TensorFlow says 0.
        return int(x.dtype.size) * math.prod(x.shape)

    def container_of(self, cls: type) -> Container | None:
        return self._containers.get(cls)

    # -- making -----------------------------------------------------------------------------------

    def from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        if self._devices.virtual_gpus or not tf.executing_eagerly():
            with tf.device(native):
                return self._settle(_constant(obj, dtype), native)
        # On the way to a GPU, ``tf.constant`` leaves int32 and float8 on the host. Where the memory
        # is too small, it raises an internal error.
        with tf.device(_CPU_NAME):
            x = _constant(obj, dtype)
        return x if self._places[native] is CPU else _across(x, native)

    def _check_room(self, count: int, dtype: Any, native: Any) -> None:
        if count >= _MANY:
            self._devices.check_room(
                count * (1 if dtype is None else dtype.size), self._places[native]
            )

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        self._check_room(math.prod(shape), dtype, native)
        is_float8 = dtype is not None and dtype.name.startswith("float8")
        with tf.device(native):
            filled = tf.fill(shape, _constant(value, tf.float32 if is_float8 else dtype))
            return self._settle(tf.cast(filled, dtype) if is_float8 else filled, native)

    # Without a dtype and on its own device, in two thirds of the time of ``tf.fill``.

    def zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if dtype is not None:
            return super().zeros(shape, dtype, native)
        self._check_room(math.prod(shape), tf.float32, native)
        with tf.device(native):
            return tf.zeros(shape)

    def ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if dtype is not None:
            return super().ones(shape, dtype, native)
        self._check_room(math.prod(shape), tf.float32, native)
        with tf.device(native):
            return tf.ones(shape)

    def arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        numbers = (start, stop, step)
        self._check_room(math.ceil((stop - start) / step), dtype, native)
        is_real = any(isinstance(number, float) for number in numbers)
        with tf.device(native):
            counted = tf.range(*numbers, dtype=tf.float64 if is_real else tf.int64)
            return self._settle(_cast(counted, dtype), native)

    def random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        dtype = dtype or tf.float32  # TensorFlow itself refuses dtypes that are not real
        is_uniform = distribution == "uniform"
        self._check_room(math.prod(shape), dtype, native)
        with tf.device(native):
            if seed is None:
                return (tf.random.uniform if is_uniform else tf.random.normal)(shape, dtype=dtype)
            # Stateless: TensorFlow's seed and generators are neither read nor changed.
            draw = tf.random.stateless_uniform if is_uniform else tf.random.stateless_normal
            return draw(shape, seed=(seed, 0), dtype=dtype)

    def seed(self, seed: int) -> None:
        tf.random.set_seed(seed)
        tf.random.get_global_generator().reset_from_seed(seed)
        # Keras draws the seeds of its layers from Python's random numbers.
        random.seed(seed)

    def astype(self, x: Tensor, dtype: Any) -> Tensor:
        native = self._devices.native(self.device_of(x))
        with tf.device(native):
            return self._settle(_cast(x, dtype), native)

    # -- copying ----------------------------------------------------------------------------------

    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        there = self._places[native]
        # Between logical CPUs and without a tape, one operation copies a tensor of most dtypes.
        # Checking this once for all tensors saves a fifth of the time of each copy.
        is_simple = bool(self._devices.virtual_gpus) and not record.could_possibly_record()
        # One block for all tensors: entering it takes a third of the time of a copy.
        with tf.device(native):
            return [
                _snapshot(x)
                if is_simple and type(x) is _EagerTensor and x.dtype in _WITH_SNAPSHOT
                else self._copy(x, there, native)
                for x in xs
            ]

    def _copy(self, x: Tensor, there: Device, native: Any) -> Tensor:
        if x.dtype == tf.string:
            with tf.device(_CPU_NAME):
                return self._in_new_memory(
                    x.value() if isinstance(x, tf.Variable) else x, _CPU_NAME
                )
        if x.dtype in OF_THE_HOST:
            raise UnsupportedValueError(
                f"copy a tensor of {x.dtype.name} to {there}",
                "TensorFlow has no copies of handles, which lead to tables and the like",
                "take it out of the batch",
                [self.device_of(x), there],
            )
        return self._settle(self._record_copy(x, native), native)

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        self.device_of(x)  # refuses a tensor without bytes, by name
        # TensorFlow copies arrays, and returns a scalar for a tensor without dimensions.
        return np.asarray(x.numpy())

    def from_dlpack(self, x: Any) -> Tensor:
        if isinstance(x, self.types):
            with tf.device(self._devices.native(self.device_of(x))):
                return tf.identity(x)  # the same memory
        # An unversioned capsule has no flag for read-only memory. The array's owner refuses to make
        # one for read-only memory.
        capsule = x.__dlpack__()
        described = description_of(capsule)
        if described.device_type == ON_CPU and described.address % _ALIGNMENT:
            raise BufferError(f"TensorFlow needs memory that begins at a multiple of {_ALIGNMENT}")
        return tf.experimental.dlpack.from_dlpack(capsule)

    def dlpack_of(self, x: Tensor) -> Any:
        return _Exported(x)

    # -- for logs ---------------------------------------------------------------------------------

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        device = self.device_of(xs[0])
        with DefaultDevice(self._devices.native(device)):
            if device is CPU:
                # TensorFlow makes and keeps a new operation for each number of tensors.
                return tf.constant(np.array([x.numpy() for x in xs], xs[0].dtype.as_numpy_dtype))
            return tf.stack(xs)

    def norm(self, x: Tensor) -> Tensor:
        with tf.device(x.device):
            return tf.norm(x)

    def detach(self, x: Tensor) -> Tensor:
        if not isinstance(x, tf.Variable):
            return x
        with tf.device(x.device):
            return x.read_value()

    def _settle(self, x: Tensor, native: Any) -> Tensor:
        """Return a new tensor on the device asked for; TensorFlow puts some dtypes on another."""
        there = self._places[native]
        if not hasattr(x, "backing_device") or self.device_of(x) is there:
            return x  # or it is only traced, and settled when it is computed
        x = self._record_copy(x, native)
        if self.device_of(x) is not there:
            raise UnsupportedValueError(
                f"make a tensor of {x.dtype.name} on {there}",
                "TensorFlow has no operation for this dtype there, and used the CPU",
                "use float32, or leave it on the CPU",
                [there],
            )
        return x

    def _record_copy(self, x: Any, native: str) -> tf.Tensor:
        """Return a copy through which gradients flow back to the tensor's device.

        Args:
            x: a tensor or a variable.
            native: the device of the scope, where the copy is made.
        """
        if isinstance(x, tf.Variable):
            x = x.value()
        # Only a tape needs a recorded copy, which takes twice the time. The check is private, and
        # ``tf.custom_gradient`` uses it.
        if not record.could_possibly_record() or x.dtype not in _WITH_GRADIENT:
            return self._in_new_memory(x, native)
        here = place_of(x)  # empty for a tensor that is only traced

        def back(gradient: Any) -> Any:
            """Return the gradient on the tensor's device, as an operation returns it."""
            parts = _parts_of_composite(gradient)  # the gradient of ``tf.gather`` has three
            if not here or all(place_of(part) in (here, "") for part in parts):
                return gradient
            with tf.device(here):
                # Recorded, too, for second gradients.
                return tf.nest.map_structure(
                    lambda part: self._record_copy(part, here), gradient, expand_composites=True
                )

        return tf.custom_gradient(lambda x: (self._in_new_memory(x, native), back))(x)

    def _in_new_memory(self, x: tf.Tensor, native: str) -> tf.Tensor:
        """Return a copy on the device of the scope; no single operation copies every dtype."""
        is_real = not self._devices.virtual_gpus and hasattr(x, "backing_device")
        if is_real and place_of(x) != _place(native):
            return _across(x, native)
        if x.dtype in _WITH_SNAPSHOT:
            return _snapshot(x)
        if x.dtype == tf.string:
            return tf.raw_ops.DeepCopy(x=x)
        if is_real and self._is_on_hardware(x):  # float8, which no operation on a GPU copies
            return _across(_across(x, _CPU_NAME), native)
        flat = tf.reshape(x, [-1])  # float8
        return tf.reshape(tf.concat([flat, flat[:0]], 0), x.shape)

    def _is_on_hardware(self, x: tf.Tensor) -> bool:
        return not self._devices.virtual_gpus and self.device_of(x) is not CPU


def share_with_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor in the CPU's memory as an array of NumPy's, without a copy."""
    if x.shape.rank:
        return np.asarray(x)
    # Of a tensor without axes NumPy gets a scalar, and for bfloat16 it would raise an error.
    with tf.device(x.device):
        return np.asarray(tf.reshape(x, [1])).reshape(())


# -- making ---------------------------------------------------------------------------------------


def _constant(obj: Any, dtype: tf.DType | None) -> tf.Tensor:
    """Return a new tensor with the values of a number or a NumPy array."""
    if dtype is not None:
        # NumPy converts where TensorFlow refuses, for example [1, 2] to float8.
        obj = np.asarray(obj).astype(dtype.as_numpy_dtype)
    return tf.constant(obj)  # copies, also from aligned memory


def _cast(x: Any, dtype: tf.DType) -> tf.Tensor:
    if dtype.name.startswith("float8") and not x.dtype.is_floating:
        x = tf.cast(x, tf.float32)
    return tf.cast(x, dtype)


# -- copying --------------------------------------------------------------------------------------


def _snapshot(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Snapshot(input=x)


def _across(x: tf.Tensor, native: str) -> tf.Tensor:
    """Return a copy on another device of the hardware.

    ``_copy_to_device`` is private. It moves the bytes of every dtype, and the tensor does not keep
    the copy.

    Raises:
        tf.errors.ResourceExhaustedError: if the memory on that device is too small.
        RuntimeError: for any other reason.
    """
    try:
        return x._copy_to_device(_place(native))
    except RuntimeError:
        # It raises one exception for all reasons. An operation that needs as much memory tells
        # whether there is too little.
        with tf.device(native):
            tf.fill((x.dtype.size * math.prod(x.shape),), tf.constant(0, tf.uint8))
        raise


def _place(native: str) -> str:
    """Return a device's name as ``place_of`` returns it, and as ``_copy_to_device`` takes it."""
    return f"/device:{native.rpartition('/')[2].removeprefix('device:')}"


class _Exported:
    """A tensor or a variable with the methods of DLPack, which TensorFlow 2.18 lacks."""

    def __init__(self, x: Any) -> None:
        self._x = tf.convert_to_tensor(x)

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._x)

    def __dlpack_device__(self) -> tuple[int, int]:
        described = description_of(self.__dlpack__())
        return described.device_type, described.device_id


# -- containers -----------------------------------------------------------------------------------


# The tensors of a composite tensor.
_parts_of_composite = partial(tf.nest.flatten, expand_composites=True)
_COMPOSITE = Container(
    _parts_of_composite,
    lambda x: LIST.labels(_parts_of_composite(x)),
    partial(tf.nest.pack_sequence_as, expand_composites=True),
    holds="pieces",
)


def _slice_rows(x: Any, start: int, stop: int) -> Any:
    """Return rows of a ragged tensor, on its device."""
    with tf.device(place_of(x.flat_values)):
        return x[start:stop]
