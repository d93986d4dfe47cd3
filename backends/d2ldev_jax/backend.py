"""``JaxBackend``: the contract on JAX, with Flax's ``nnx`` for models.

What JAX does differently and is put right here: an array is only bound to its device if it is
*committed*, which every array that d2ldev makes or moves is; ``device_put`` makes another object of
an array that is there, and shares the memory of NumPy's (``numpy_exchange.py``); looking for GPUs
makes a context on each (``accelerator.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from d2ldev.device import CPU, Device
from d2ldev.errors import BackendNotInstalledError, DeviceMismatchError, UnsupportedValueError
from d2ldev.files.layers import layouts_in
from d2ldev.files.layouts import Layout
from d2ldev.interface import Backend, DeviceLike, DType, Memory, Tensor
from d2ldev.nesting.kinds import Kinds
from d2ldev.operations.placing import Part
from d2ldev.training.learner import Learner, Settings
from d2ldev_jax import numpy_exchange, pytrees, queue, strict
from d2ldev_jax.accelerator import Accelerator, is_initialized
from d2ldev_jax.capacity import check_capacity, computed
from d2ldev_jax.dlpack import from_dlpack
from d2ldev_jax.draws import Draws
from d2ldev_jax.layouts import layers_of
from d2ldev_jax.live_arrays import bytes_held
from d2ldev_jax.memory import let_it_grow
from d2ldev_jax.parts import OBJECT_TYPES, parts_of
from d2ldev_jax.stacking import stack
from d2ldev_jax.virtual import VirtualAccelerator
from d2ldev_jax.whereabouts import find

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The dtypes that JAX has only with ``jax_enable_x64``, and what it gives instead of each.
_WIDE = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
_NARROW = tuple(
    name
    for name in (
        *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
        *("float16", "bfloat16", "float32", "complex64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4"),
    )
    if hasattr(jnp, name)
)

# The class of ``jnp.float32`` and its like.
_SCALAR = type(jnp.float32)
# The generators of random keys, by the names of the dtypes.
_GENERATORS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
_FLOAT32, _FLOAT64 = np.dtype("float32"), np.dtype("float64")


class JaxBackend(Backend):
    """JAX on the CPU and on CUDA or ROCm."""

    name: ClassVar[str] = "jax"
    distributions: ClassVar[tuple[str, ...]] = ("jax", "jaxlib", "flax", "numpy")
    max_virtual_gpus: ClassVar[int] = 8
    # In newer releases a tracer is an instance of ``jax.Array``, but its class no subclass.
    tensor_types: ClassVar[tuple[type, ...]] = (jax.Array, jax.core.Tracer)
    object_types: ClassVar[tuple[type, ...]] = OBJECT_TYPES
    plain_types = (np.dtype, _SCALAR, jax.Device, jax.sharding.Sharding)

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        self.kinds = Kinds(
            self.tensor_types, self.object_types, self.plain_types, pytrees.container_of
        )
        self._accelerator = VirtualAccelerator(virtual_gpus) if virtual_gpus else Accelerator()
        # JAX's devices: what they stand for, and the kind of memory that is their own.
        self._places: dict[jax.Device, tuple[Device, str]] = {}
        self._draws = Draws()
        let_it_grow(self._accelerator)

    # -- devices --------------------------------------------------------------------------

    def num_gpus(self) -> int:
        return 0 if self.virtual_gpus == 0 else self._accelerator.count()

    def _native(self, device: Device) -> jax.Device:
        if device is CPU:
            return self._accelerator.cpus()[0]
        return self._accelerator.gpu(device.index)

    def _from_native(self, native: Any) -> Device | None:
        if not isinstance(native, jax.Device):
            return None
        if not self._places:
            self._places = {
                known: (device, known.default_memory().kind)
                for known, device in self._accelerator.places().items()
            }
        # Another process's device, and a TPU, stand for nothing.
        return self._places.get(native, (None, ""))[0]

    def _platform(self, device: Device) -> str:
        return "cpu" if device is CPU else self._accelerator.platform(device.index)

    def default_device(self) -> Device:
        self._accelerator.start()  # where a GPU that fails is no exception
        default = jax.config.jax_default_device
        if default is None or isinstance(default, str):  # a platform's name
            default = jax.local_devices(backend=default)[0]
        return self.device(default)

    def _native_scope(self, device: Device) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = jax.default_device(self._native(device))
        return scope

    # -- tensors --------------------------------------------------------------------------

    def device_of(self, x: Tensor) -> Device:
        # Cheaper than ``x.device`` and no guess: what differs in anything is looked at closely.
        try:
            if not x.is_deleted():
                sharding = x.sharding
                (native,) = sharding.device_set
                device, memory = self._places[native]
                if sharding.memory_kind == memory:
                    return device
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        return find(x, self._from_native)

    @property
    def dtype_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The dtypes that JAX has now: those of 64 bits come and go with ``jax_enable_x64``."""
        return (*_NARROW, *_WIDE) if jax.config.jax_enable_x64 else _NARROW

    def dtype(self, spec: DType) -> Any:
        if isinstance(spec, _SCALAR):
            spec = spec.dtype  # ``jnp.bool_`` has another name than its dtype
        try:
            return super().dtype(spec)
        except UnsupportedValueError as error:
            if not any(name in str(spec) for name in _WIDE):
                raise
            problem = f"{error.problem} without jax_enable_x64"
            fix = f"jax.config.update('jax_enable_x64', True), or {error.fix}"
            raise UnsupportedValueError(error.attempted, problem, fix) from None

    def _native_dtype(self, name: str) -> np.dtype[Any]:
        scalar = getattr(jnp, name, None)
        if scalar is None:  # a dtype that is not in ``dtype_names``: that of random keys
            raise UnsupportedValueError(
                f"convert an array of {name}",
                "it holds random keys, and no numbers",
                "jax.random.key_data(x) are their numbers",
            )
        native: np.dtype[Any] = np.dtype(scalar)
        return native

    def dtype_of(self, x: Tensor) -> str:
        self._require_tensor(x, "tell the dtype of a tensor")
        return str(x.dtype.name)

    def _float(self) -> np.dtype[Any]:
        """The dtype that JAX gives to numbers without one."""
        return _FLOAT64 if jax.config.jax_enable_x64 else _FLOAT32

    def _data_dtype(self, name: str) -> str:
        return name if jax.config.jax_enable_x64 else _WIDE.get(name, name)

    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        return numpy_exchange.from_data(obj, dtype, native, self._data_dtype)

    def _full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        if dtype is None:
            # JAX would give a traced array a type that yields to every other's.
            dtype = self._float() if type(value) is float else jax.dtypes.result_type(value)
        # ``device`` alone does not suffice, nor does a sharding: JAX makes the array on its default
        # device, and copies it.
        with jax.default_device(native):
            return jax.lax.full(
                shape, value, dtype, sharding=jax.sharding.SingleDeviceSharding(native)
            )

    def _arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        count = max(0, math.ceil((stop - start) / step))
        check_capacity(count, (dtype or self._float()).itemsize, native)
        # Of one number JAX 0.6 makes the range on the device, of three in NumPy.
        if (start, step) == (0, 1):
            start, stop, step = stop, None, None
        with jax.default_device(native):
            return computed(jnp.arange(start, stop, step, dtype, device=native))

    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        dtype = dtype or self._float()
        check_capacity(math.prod(shape), dtype.itemsize, native)
        draw = jax.random.uniform if distribution == "uniform" else jax.random.normal
        # A computation on a committed key is committed to its device.
        key = self._draws.key(seed, native)
        return computed(draw(key, shape, dtype))

    def _astype(self, x: Tensor, dtype: Any) -> Tensor:
        if isinstance(x, jax.core.Tracer):
            return x.astype(dtype)
        if x.is_deleted():
            self.device_of(x)  # refused, with the reason
        return jax.device_put(x.astype(dtype), x.sharding)

    def _copy(self, x: Tensor, native: Any) -> Tensor:
        return self._copy_all([x], native)[0]

    def _copy_all(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        copies: list[Tensor] = jax.device_put(xs, native, may_alias=False)
        return copies

    def _to_numpy(self, x: Tensor) -> NDArray[Any]:
        if isinstance(x, jax.core.Tracer) or x.is_deleted():
            self.device_of(x)  # a tensor without bytes is refused, by name
        return numpy_exchange.to_numpy(x)

    def address(self, x: Tensor) -> int:
        self.device_of(x)
        return int(x.unsafe_buffer_pointer())

    def _from_dlpack(self, x: Any) -> Tensor:
        if isinstance(x, self.tensor_types):
            # The protocol would lose which of several CPU devices it is.
            self.device_of(x)
            return x
        return from_dlpack(x)

    # -- strictness -----------------------------------------------------------------------

    def _refuse_mixing(self) -> Callable[[], None]:
        return strict.refuse_mixing(self)

    def _mismatch(self, error: BaseException) -> DeviceMismatchError | None:
        return strict.mismatch_in(self, error)

    # -- the machine ----------------------------------------------------------------------

    def _synchronize(self, device: Device) -> None:
        if is_initialized():
            queue.synchronize(self._native(device))

    def is_idle(self, device: DeviceLike = None) -> bool:
        attempted = "ask whether there is work"
        asked = self.devices() if device is None else [self._existing(device, attempted)[0]]
        return not is_initialized() or all(queue.is_idle(self._native(d)) for d in asked)

    def _memory(self, device: Device) -> Memory:
        native = self._native(device)
        said = native.memory_stats()
        if not said:
            return Memory(bytes_held(native), None, None)
        used, peak = said.get("bytes_in_use"), said.get("peak_bytes_in_use")
        return Memory(used, peak, said.get("bytes_limit"))

    def _is_out_of_memory(self, error: Exception) -> bool:
        # JAX has one exception for all that XLA says, which keeps to no code of its own; the last
        # is of sizes that no address reaches.
        words = ("RESOURCE_EXHAUSTED", "Out of memory", "overflow in static extent")
        if isinstance(error, RuntimeError) and any(text in str(error) for text in words):
            return True
        return super()._is_out_of_memory(error)

    # -- models ---------------------------------------------------------------------------

    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        device: DeviceLike = None,
        seed: int = 0,
    ) -> Any:
        try:
            from d2ldev_jax.mlp import make_mlp  # flax takes longer to import than JAX
        except ModuleNotFoundError as error:
            raise BackendNotInstalledError(
                "make an MLP", f"{error.name} is not installed", "pip install 'd2ldev[jax]'"
            ) from error
        return make_mlp(self, sizes, activation, device, seed)

    def _parts(self, obj: Any) -> Iterator[Part]:
        return parts_of(obj)

    def samples(self) -> Mapping[str, Callable[[Device], Any]]:
        from d2ldev_jax.samples import make_samples

        return {**super().samples(), **make_samples(self)}

    # -- files ----------------------------------------------------------------------------

    def _layouts(self, obj: Any) -> Mapping[str, Layout] | None:
        layers = layers_of(obj)
        return layouts_in(self, obj, layers) if layers else None

    def _borrow(self, x: Tensor) -> NDArray[Any]:
        self.device_of(x)  # a tensor without bytes is refused, by name
        return np.asarray(jax.random.key_data(x) if x.dtype.name in _GENERATORS else x)

    def _adopt(self, array: NDArray[Any], dtype: Any, native: Any) -> Tensor:
        return jax.device_put(array, native)

    def _numbers_dtype(self, dtype: str) -> str | None:
        return "uint32" if dtype in _GENERATORS else None

    def _from_numbers(self, x: Tensor, dtype: str) -> Tensor:
        return jax.random.wrap_key_data(x, impl=_GENERATORS[dtype])

    # -- training -------------------------------------------------------------------------

    def _learner(self, model: Any, settings: Settings) -> Learner:
        from d2ldev_jax.learner import JaxLearner

        return JaxLearner(self, model, settings)

    def _accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        return jnp.mean(jnp.argmax(prediction, -1) == y, dtype=jnp.float32)

    def _stack(self, xs: Sequence[Tensor]) -> Tensor:
        return stack(xs)
