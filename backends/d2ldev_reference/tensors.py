"""Tensors: array-api-strict's arrays, with two workarounds for the contract.

Its default float is float64 on ``CPU_DEVICE`` and ``device1``, and float32 on ``device2``. Here it
is float32 on all devices, as in the frameworks. A move goes through NumPy's memory: ``to_device``
calls ``np.asarray(..., copy=True)``, which NumPy 1.26 does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_strict as xp
import numpy as np

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import Tensor, Tensors, describe
from d2ldev_reference.devices import DEVICES

_PREFIX = "array_api_strict."


class ReferenceTensors(Tensors):
    """array-api-strict's arrays."""

    types = (type(xp.zeros(0)),)
    dtype_names = (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float32", "float64", "complex64", "complex128"),
    )

    def device_of(self, x: Any) -> Device:
        try:
            return DEVICES[x.device]
        except (AttributeError, KeyError, TypeError):
            raise UnsupportedValueError(
                "tell the device of a tensor",
                f"{describe(x)} is not a tensor on a device of the reference backend",
                "x = backend.asarray(x)",
            ) from None

    def dtype_of(self, x: Tensor) -> str:
        return str(x.dtype).removeprefix(_PREFIX)

    def dtype(self, name: str) -> Any:
        return getattr(xp, name)

    def address(self, x: Tensor) -> int:
        return int(numpy_of(x).ctypes.data)

    def nbytes(self, x: Tensor) -> int:
        return int(numpy_of(x).nbytes)

    def from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        array = np.array(obj)
        dtype = dtype or getattr(xp, array.dtype.name)
        return xp.asarray(array, dtype=dtype, device=native, copy=True)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        dtype = dtype or xp.float32
        return xp.full(shape, _scalar(value, dtype), dtype=dtype, device=native)

    def empty(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        return xp.empty(shape, dtype=dtype or xp.float32, device=native)

    def arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        return xp.arange(start, stop, step, dtype=dtype, device=native)

    def random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        if str(dtype).removeprefix(_PREFIX) not in ("None", "float32", "float64"):
            raise TypeError(f"random numbers are real, and not {dtype}")
        # Without a seed the numbers come from NumPy's global state, which ``np.random.seed`` sets.
        source: Any = np.random if seed is None else np.random.RandomState(seed)
        draw = source.random_sample if distribution == "uniform" else source.standard_normal
        numbers = np.asarray(draw(shape), str(dtype or "float32").removeprefix(_PREFIX))
        if distribution == "uniform":  # without 1, to which float32 rounds some
            numbers = np.minimum(numbers, np.nextafter(numbers.dtype.type(1), 0))
        return xp.asarray(numbers, device=native, copy=True)

    def seed(self, seed: int) -> None:
        np.random.seed(seed)

    def astype(self, x: Tensor, dtype: Any) -> Tensor:
        return xp.astype(x, dtype)

    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        # The call names the dtype because array-api-strict 2.6.0 ignores the array's own:
        # https://github.com/data-apis/array-api-strict/issues/222
        return [xp.asarray(self.to_numpy(x), dtype=x.dtype, device=native) for x in xs]

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        return np.array(numpy_of(x))

    def from_dlpack(self, x: Any) -> Tensor:
        if isinstance(x, (*self.types, np.ndarray)):
            # DLPack has no virtual devices, and gives all arrays to the CPU. With NumPy 1.26 they
            # are also read-only.
            return xp.asarray(x, copy=False)
        return xp.from_dlpack(x)

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return xp.stack(list(xs))

    def norm(self, x: Tensor) -> Tensor:
        return xp.sqrt(xp.sum(x * x))


def numpy_of(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the NumPy array in a tensor.

    No public way works everywhere: ``np.asarray`` fails on array-api-strict's virtual GPUs. NumPy
    1.26 exports no read-only memory through DLPack.
    """
    array: np.ndarray[Any, Any] = x._array
    return array


def _scalar(value: Any, dtype: Any) -> Any:
    """Return a number as Python's type that array-api-strict requires for a dtype."""
    kind = np.dtype(str(dtype).removeprefix(_PREFIX)).kind
    return {"b": bool, "i": int, "u": int, "f": float, "c": complex}[kind](value)


def with_axes(x: Tensor, number: int) -> Tensor:
    """Return a tensor with ``number`` axes; the new ones come last, with length 1."""
    return xp.reshape(x, (*x.shape, *(1 for _ in range(number - x.ndim))))
