"""``ReferenceBackend``: the contract on array-api-strict.

Two things are not left to array-api-strict. Its default float differs from device to device
(float64 on ``CPU_DEVICE`` and ``device1``, float32 on ``device2``); here it is float32
everywhere, as in the frameworks. And moving goes through NumPy memory, because ``to_device``
calls ``np.asarray(..., copy=True)``, which NumPy 1.26 does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import array_api_strict as xp
import numpy as np

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.files.layers import layouts_in
from d2ldev.files.layouts import Layout
from d2ldev.interface import Backend, DeviceLike, Memory, Tensor
from d2ldev.training.learner import Learner, Settings
from d2ldev_reference.layouts import layers_of
from d2ldev_reference.mlp import make_mlp
from d2ldev_reference.strict import refuse_mixing

_NATIVE = {CPU: xp.Device("CPU_DEVICE"), gpu(0): xp.Device("device1"), gpu(1): xp.Device("device2")}
_DEVICES = {native: device for device, native in _NATIVE.items()}


class ReferenceBackend(Backend):
    """array-api-strict, on the CPU and on up to two virtual GPUs (two unless told otherwise)."""

    name: ClassVar[str] = "reference"
    distributions: ClassVar[tuple[str, ...]] = ("array-api-strict", "numpy")
    max_virtual_gpus: ClassVar[int] = 2
    tensor_types: ClassVar[tuple[type, ...]] = (type(xp.zeros(0)),)
    dtype_names: ClassVar[tuple[str, ...]] = (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float32", "float64", "complex64", "complex128"),
    )

    # -- devices --------------------------------------------------------------------------

    def num_gpus(self) -> int:
        return self.max_virtual_gpus if self.virtual_gpus is None else self.virtual_gpus

    def _native(self, device: Device) -> Any:
        return _NATIVE[device]

    def _from_native(self, native: Any) -> Device | None:
        return _DEVICES.get(native) if isinstance(native, type(_NATIVE[CPU])) else None

    def _platform(self, device: Device) -> str:
        return "cpu" if device is CPU else "virtual"

    def default_device(self) -> Device:
        return self.device_of(xp.zeros(0))

    # -- tensors --------------------------------------------------------------------------

    def device_of(self, x: Tensor) -> Device:
        try:
            return _DEVICES[x.device]
        except (AttributeError, KeyError, TypeError):
            raise UnsupportedValueError(
                "tell the device of a tensor",
                f"{describe(x)} is no tensor on a device of the reference backend",
                "x = backend.asarray(x)",
            ) from None

    def _native_dtype(self, name: str) -> Any:
        return getattr(xp, name)

    def dtype_of(self, x: Tensor) -> str:
        self._require_tensor(x, "tell the dtype of a tensor")
        return str(x.dtype).removeprefix("array_api_strict.")

    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        array = np.array(obj)
        if dtype is None:
            python_float = array.dtype == np.float64 and not hasattr(obj, "dtype")
            dtype = xp.float32 if python_float else getattr(xp, array.dtype.name)
        return xp.asarray(array, dtype=dtype, device=native, copy=True)

    def _full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        if dtype is None and isinstance(value, float):
            dtype = xp.float32
        return xp.full(shape, _scalar(value, dtype), dtype=dtype, device=native)

    def _arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        if dtype is None and any(isinstance(number, float) for number in (start, stop, step)):
            dtype = xp.float32
        return xp.arange(start, stop, step, dtype=dtype, device=native)

    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        if str(dtype).removeprefix("array_api_strict.") not in ("None", "float32", "float64"):
            raise TypeError(f"random numbers are real, and no {dtype}")
        # Without a seed it is NumPy's own state, which ``np.random.seed`` sets.
        source: Any = np.random if seed is None else np.random.RandomState(seed)
        draw = source.random_sample if distribution == "uniform" else source.standard_normal
        numbers = np.asarray(draw(shape))
        return xp.asarray(numbers, dtype=dtype or xp.float32, device=native, copy=True)

    def _astype(self, x: Tensor, dtype: Any) -> Tensor:
        return xp.astype(x, dtype)

    def _copy(self, x: Tensor, native: Any) -> Tensor:
        # The dtype is said because array-api-strict 2.6.0 forgets it:
        # https://github.com/data-apis/array-api-strict/issues/222
        return xp.asarray(self._to_numpy(x), dtype=x.dtype, device=native)

    def _to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        return np.array(_numpy_of(x))

    def address(self, x: Tensor) -> int:
        self._require_tensor(x, "tell the address of a tensor")
        return int(_numpy_of(x).ctypes.data)

    def _from_dlpack(self, x: Any) -> Tensor:
        if isinstance(x, (*self.tensor_types, np.ndarray)):
            # DLPack makes everything the CPU's, because it knows nothing of devices that are not
            # there; and NumPy 1.26 makes everything read-only.
            return xp.asarray(x, copy=False)
        return xp.from_dlpack(x)

    # -- strictness -----------------------------------------------------------------------

    def _refuse_mixing(self) -> Callable[[], None]:
        return refuse_mixing(self)

    # -- the machine ----------------------------------------------------------------------

    def _synchronize(self, device: Device) -> None:
        """Nothing to wait for: NumPy computes before it returns."""

    def _memory(self, device: Device) -> Memory:
        return Memory(None, None, None)

    # -- models ---------------------------------------------------------------------------

    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        device: DeviceLike = None,
        seed: int = 0,
    ) -> Any:
        return make_mlp(self, sizes, activation, device, seed)

    def samples(self) -> Mapping[str, Callable[[Device], Any]]:
        def tied(device: Device) -> dict[str, Any]:
            weight = self.rand((3, 3), seed=0, device=device)
            return {"encoder": {"weight": weight}, "decoder": [weight, None, 2.5, "tied"]}

        return {**super().samples(), "pytree with a tie": tied}

    # -- files ----------------------------------------------------------------------------

    def _layouts(self, obj: Any) -> Mapping[str, Layout] | None:
        layers = layers_of(obj)
        return layouts_in(self, obj, layers) if layers else None

    def _borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        return _numpy_of(x)

    # -- training -------------------------------------------------------------------------

    def _learner(self, model: Any, settings: Settings) -> Learner:
        from d2ldev_reference.learner import ReferenceLearner

        return ReferenceLearner(self, model, settings)

    def _accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        found = xp.argmax(prediction, axis=-1) == xp.astype(y, xp.int64)
        return xp.mean(xp.astype(found, xp.float32))

    def _stack(self, xs: Sequence[Tensor]) -> Tensor:
        return xp.stack(list(xs))


def _numpy_of(x: Tensor) -> np.ndarray[Any, Any]:
    """The NumPy array in a tensor.

    array-api-strict's own, because neither public way works everywhere: off the CPU ``np.asarray``
    is refused, and NumPy 1.26 passes no read-only memory on through DLPack.
    """
    array: np.ndarray[Any, Any] = x._array
    return array


def _scalar(value: Any, dtype: Any) -> Any:
    """The number as the kind of scalar that array-api-strict wants for a dtype."""
    if dtype is None:
        return value
    kind = np.dtype(str(dtype).removeprefix("array_api_strict.")).kind
    return {"b": bool, "i": int, "u": int, "f": float, "c": complex}[kind](value)
