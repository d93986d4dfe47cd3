"""``TensorFlowBackend``: the contract on TensorFlow 2 and Keras 3.

What TensorFlow does differently and is put right here: a device that does not exist means the CPU
to it (devices are checked before any scope); ``tensor.device`` is where the operation ran, not
where the bytes are; int32 tensors stay in the host's memory, whatever the scope
(https://github.com/tensorflow/tensorflow/issues/46833); variables cannot move (``parts.py``), and
models compute elsewhere than where they are (``scopes.py``).

Strings have no place but the CPU, and int32 variables none in TensorFlow's GPU kernels
(https://github.com/tensorflow/tensorflow/issues/59803): ``placement`` says where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from d2ldev.device import CPU, Device
from d2ldev.errors import DeviceInitializationWarning, UnsupportedValueError, describe
from d2ldev.files.layers import layouts_in
from d2ldev.files.layouts import Layout
from d2ldev.interface import Backend, DeviceLike, Memory, Tensor
from d2ldev.operations.placing import Inventory, Part
from d2ldev.training.learner import Learner, Settings
from d2ldev_tensorflow import labels, numpy_exchange
from d2ldev_tensorflow.copying import (
    WITH_SNAPSHOT,
    address_of,
    copied,
    copied_across,
    snapshot,
)
from d2ldev_tensorflow.dlpack import Exported, from_dlpack
from d2ldev_tensorflow.filling import cast, counted, filled
from d2ldev_tensorflow.layouts import layers_of
from d2ldev_tensorflow.logical import LogicalDevices, has_started
from d2ldev_tensorflow.machine import (
    answers_at_once,
    distribution,
    is_out_of_memory,
    memory_of_gpu,
    wait_for,
)
from d2ldev_tensorflow.mlp import make_mlp
from d2ldev_tensorflow.optimizer_state import state_of, state_put
from d2ldev_tensorflow.parts import (
    OBJECT_TYPES,
    finish,
    is_variable,
    parts_of,
    refill,
    register_containers,
)
from d2ldev_tensorflow.prefetching import can_prefetch, prefetched
from d2ldev_tensorflow.samples import make_samples
from d2ldev_tensorflow.scopes import DefaultDevice, compute_at
from d2ldev_tensorflow.strict import refuse_mixing

if TYPE_CHECKING:
    import numpy as np

_OF_THE_HOST = frozenset({tf.resource, tf.variant, tf.string})


class TensorFlowBackend(Backend):
    """TensorFlow on the CPU, on CUDA, ROCm and Metal, and on virtual GPUs."""

    name: ClassVar[str] = "tensorflow"
    distributions: ClassVar[tuple[str, ...]] = (distribution(), "keras", "numpy")
    max_virtual_gpus: ClassVar[int] = 8
    tensor_types: ClassVar[tuple[type, ...]] = (tf.Tensor, tf.Variable)
    object_types: ClassVar[tuple[type, ...]] = OBJECT_TYPES
    plain_types: ClassVar[tuple[type, ...]] = (tf.DType, tf.TensorShape, tf.config.LogicalDevice)
    dtype_names: ClassVar[tuple[str, ...]] = (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        self._logical = LogicalDevices(virtual_gpus)
        self._places = self._logical.places
        register_containers()

    # -- devices --------------------------------------------------------------------------

    def num_gpus(self) -> int:
        try:
            return self._logical.count()
        except Exception as error:
            warnings.warn(
                f"tensorflow found GPUs and cannot use them: {error}",
                DeviceInitializationWarning,
                stacklevel=3,
            )
            return 0

    def _native(self, device: Device) -> str:
        return self._logical.name(device)

    def _from_native(self, native: Any) -> Device | None:
        return self._logical.place(native)

    def _platform(self, device: Device) -> str:
        if device is CPU:
            return "cpu"
        if self.virtual_gpus:
            return "virtual"
        if tf.test.is_built_with_cuda():
            return "cuda"
        return "rocm" if tf.test.is_built_with_rocm() else "metal"

    def default_device(self) -> Device:
        with tf.init_scope():  # also in a function that is being traced
            return self.device_of(tf.zeros(()))

    def _native_scope(self, device: Device) -> AbstractContextManager[Any]:
        return DefaultDevice(self._native(device))

    # -- tensors --------------------------------------------------------------------------

    def device_of(self, x: Tensor) -> Device:
        try:
            return self._places[x.backing_device]
        except (AttributeError, KeyError, TypeError):
            return self._find(x)

    def _find(self, x: Tensor) -> Device:
        """The device of a variable, or of a tensor on a device that was not seen before."""
        spread = isinstance(x, tf.Variable) and hasattr(x, "values")  # it has several then
        # A variable's ``device`` is that of its memory, unlike a tensor's.
        whole = isinstance(x, tf.Variable) and not spread
        name = x.device if whole else getattr(x, "backing_device", None)
        device = self._logical.place(name)
        if device is not None:
            self._places[name] = device
            return device
        problem = f"{describe(x)} is no TensorFlow tensor"
        if spread:
            problem = "the variable is spread over several devices"
        elif isinstance(x, self.tensor_types) or type(x).__name__ == "KerasTensor":
            problem = f"the tensor is on {name}, which is no place with bytes for d2ldev"
            if not name:
                problem = f"{describe(x)} is only traced, and has no bytes until it is computed"
        raise UnsupportedValueError(
            "tell the device of a tensor",
            problem,
            "x = backend.asarray(x) makes a tensor; in a tf.function, ask for its result's device",
        )

    def _native_dtype(self, name: str) -> tf.DType:
        return tf.as_dtype(name)

    def dtype_of(self, x: Tensor) -> str:
        self._require_tensor(x, "tell the dtype of a tensor")
        return str(x.dtype.name)

    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        with tf.device(native):
            return self._settled(numpy_exchange.from_data(obj, dtype), native)

    def _full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        with tf.device(native):
            return self._settled(filled(shape, value, dtype), native)

    def _zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if dtype is not None:
            return self._full(shape, 0, dtype, native)
        with tf.device(native):
            return tf.zeros(shape)

    def _ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if dtype is not None:
            return self._full(shape, 1, dtype, native)
        with tf.device(native):
            return tf.ones(shape)

    def _arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        with tf.device(native):
            return self._settled(counted(start, stop, step, dtype), native)

    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        dtype = dtype or tf.float32
        if not dtype.is_floating:
            raise TypeError(f"random numbers are real, and no {dtype.name}")
        uniform = distribution == "uniform"
        with tf.device(native):
            if seed is None:
                return (tf.random.uniform if uniform else tf.random.normal)(shape, dtype=dtype)
            # Stateless: TensorFlow's seed and generators are neither read nor changed.
            draw = tf.random.stateless_uniform if uniform else tf.random.stateless_normal
            return draw(shape, seed=(seed, 0), dtype=dtype)

    def _astype(self, x: Tensor, dtype: Any) -> Tensor:
        native = self._native(self.device_of(x))
        with tf.device(native):
            return self._settled(cast(x, dtype), native)

    def _copy(self, x: Tensor, native: Any) -> Tensor:
        return self._copy_all([x], native)[0]

    def _copy_all(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        there = self._places[native]
        # One block for all of them: to enter it takes a third of the time of a copy.
        with tf.device(native):
            return [self._copied_to(there, x, native) for x in xs]

    def _copied_to(self, there: Device, x: Tensor, native: Any) -> Tensor:
        has_snapshot = x.dtype in WITH_SNAPSHOT
        if not has_snapshot and x.dtype in _OF_THE_HOST:
            self._check_host(x, there)
        # On its way to a GPU and back ``tf.identity`` copies, but not int32.
        if not self.virtual_gpus and self.device_of(x) is not there and x.dtype != tf.int32:
            return self._settled(copied_across(x), native)
        return self._settled(snapshot(x) if has_snapshot else copied(x), native)

    def _check_host(self, x: Tensor, there: Device) -> None:
        if x.dtype != tf.string or there is not CPU:
            raise UnsupportedValueError(
                f"copy a tensor of {x.dtype.name} to {there}",
                "TensorFlow keeps strings, and handles of its own objects, in the CPU's memory",
                "take it out of the batch, and leave it on the CPU",
                [self.device_of(x), there],
            )

    def _settled(self, x: Tensor, native: Any) -> Tensor:
        """A new tensor where it was wanted, also of the dtypes that TensorFlow likes elsewhere."""
        there = self._places[native]
        if not hasattr(x, "backing_device") or self.device_of(x) is there:
            return x  # or it is only traced, and settled when it is computed
        x = copied(x)
        if self.device_of(x) is not there:
            raise UnsupportedValueError(
                f"make a tensor of {x.dtype.name} on {there}",
                "TensorFlow has no operation for this dtype there, and used the CPU",
                "use float32, or leave it on the CPU",
                [there],
            )
        return x

    def _to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        self.device_of(x)  # a tensor without bytes is refused, by name
        return numpy_exchange.to_numpy(x)

    def address(self, x: Tensor) -> int:
        self._require_tensor(x, "tell the address of a tensor")
        return address_of(x)

    def _from_dlpack(self, x: Any) -> Tensor:
        if not isinstance(x, self.tensor_types):
            return from_dlpack(x)
        with tf.device(self._native(self.device_of(x))):
            return tf.identity(x)  # the same memory

    def _dlpack_of(self, x: Tensor) -> Any:
        return Exported(x)

    # -- strictness -----------------------------------------------------------------------

    def _refuse_mixing(self) -> Callable[[], None]:
        return refuse_mixing(self)

    # -- the machine ----------------------------------------------------------------------

    def _synchronize(self, device: Device) -> None:
        if has_started():
            wait_for(self._native(device))

    def is_idle(self, device: DeviceLike = None) -> bool:
        attempted = "ask whether there is work"
        asked = self.devices() if device is None else [self._existing(device, attempted)[0]]
        return not has_started() or all(answers_at_once(self._native(each)) for each in asked)

    def _memory(self, device: Device) -> Memory:
        if device is CPU or self.virtual_gpus:
            return Memory(None, None, None)
        return memory_of_gpu(device.index, has_started())

    def _is_out_of_memory(self, error: Exception) -> bool:
        return is_out_of_memory(error)

    # -- models ---------------------------------------------------------------------------

    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        device: DeviceLike = None,
        seed: int = 0,
    ) -> Any:
        native = self._destination("make an MLP", None, device, None)[1]
        net = make_mlp(sizes, activation, seed, native)
        self._compute_at(net, native)
        return net

    def place(self, obj: Any, device: DeviceLike) -> Any:
        with tf.init_scope():  # variables are moved now, also while a function is being traced
            placed = super().place(obj, device)
            self._compute_at(placed, self.native(device))
        return placed

    def _compute_at(self, obj: Any, native: str) -> None:
        """Let the layers and optimizers in a nesting compute on the device where they are."""
        if self.num_gpus():
            for each in Inventory(self, obj, "place a model").objects:
                compute_at(each, native)

    def _parts(self, obj: Any) -> Iterator[Part]:
        return parts_of(obj)

    def _is_refilled(self, x: Tensor) -> bool:
        return is_variable(x)

    def _refill(self, x: Tensor, new: Tensor) -> None:
        refill(x, new)

    def _finish(self, obj: Any) -> None:
        finish(obj)

    def samples(self) -> Mapping[str, Callable[[Device], Any]]:
        return {**super().samples(), **make_samples(self)}

    # -- files ----------------------------------------------------------------------------

    def _layouts(self, obj: Any) -> Mapping[str, Layout] | None:
        layers = layers_of(obj)
        return layouts_in(self, obj, layers) if layers else None

    def _adopt(self, array: np.ndarray[Any, Any], dtype: Any, native: Any) -> Tensor:
        return self._from_data(array, None, native)  # of the array's own dtype: one copy less

    def _state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        return state_of(optimizer)

    def _state_put(self, optimizer: Any, state: Any) -> Callable[[], None]:
        return state_put(self, optimizer, state)

    def _write(self, x: Tensor, new: Tensor) -> None:
        # Into the memory that is there: a function that was traced computes with it.
        with tf.device(x.device):
            x.assign(new)

    # -- training -------------------------------------------------------------------------

    def _learner(self, model: Any, settings: Settings) -> Learner:
        from d2ldev_tensorflow.learner import TensorFlowLearner

        return TensorFlowLearner(self, model, settings)

    def _check_labels(self, prediction: Tensor, y: Tensor) -> None:
        labels.check(prediction, y)

    def _accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        # What is only traced has no device yet: the tf.function's caller decides.
        is_traced = not tf.executing_eagerly()
        with nullcontext() if is_traced else self.on(self.device_of(prediction)):
            y = tf.cast(labels.in_rows(prediction, y), tf.int64)
            found = tf.argmax(prediction, -1) == y
            return tf.reduce_mean(tf.cast(found, tf.float32))

    def _prefetch(
        self, batches: Iterable[Any], device: Device, depth: int
    ) -> Generator[Any, None, None]:
        if depth and can_prefetch(batches):
            return prefetched(self, batches, device, depth)
        return super()._prefetch(batches, device, depth)

    def _detached(self, x: Tensor) -> Tensor:
        if not is_variable(x):
            return x
        with tf.device(x.device):
            return x.read_value()

    def _stack(self, xs: Sequence[Tensor]) -> Tensor:
        with self.on(self.device_of(xs[0])):
            return tf.stack(xs)
