"""Tensors: tinygrad's, which it computes later; those that d2ldev makes are computed at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import pi, prod
from typing import TYPE_CHECKING, Any

import numpy as np
from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import Tensors, check_room, describe, memory_of_the_machine
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from d2ldev_tinygrad.devices import DEVICES, compute, list_live

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {
    "bool": dtypes.bool,
    **{f"int{bits}": getattr(dtypes, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": getattr(dtypes, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": getattr(dtypes, f"float{bits}") for bits in (16, 32, 64)},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TinygradTensors(Tensors):
    """The tensors of tinygrad."""

    types = (Tensor,)
    plain_types = (DType,)
    dtype_names = tuple(DTYPES)

    def device_of(self, x: Any) -> Device:
        if not isinstance(x, Tensor):
            problem, fix = f"{describe(x)} is not a tensor of tinygrad", "x = backend.asarray(x)"
        elif isinstance(x.device, str) and x.device in DEVICES:
            return DEVICES[x.device]
        elif x.device is None:
            problem, fix = "it is a constant without a device", "x = x.clone('CPU')"
        else:
            problem, fix = f"tinygrad keeps it on {x.device!r}", "x = x.to('CPU')"
        raise UnsupportedValueError(f"tell the device of {describe(x)}", problem, fix)

    def dtype_of(self, x: Tensor) -> str:
        return NAMES.get(x.dtype, x.dtype.name)

    def dtype(self, name: str) -> DType:
        return DTYPES[name]

    def address(self, x: Tensor) -> int:
        self.device_of(x)  # refuses constants, and tensors on several devices
        compute(x)
        return x.uop.buffer.get_buf(x.device).va_addr if prod(x.shape) else 0

    def nbytes(self, x: Tensor) -> int:
        return x.nbytes()

    def live(self) -> Iterable[Tensor]:
        return list_live()

    # -- making -----------------------------------------------------------------------------------

    def from_data(self, obj: Any, dtype: DType | None, native: str) -> Tensor:
        array = np.array(obj, dtype and dtype.fmt)
        return Tensor(array.reshape(-1), device=native).reshape(array.shape).contiguous().realize()

    def full(self, shape: tuple[int, ...], value: Any, dtype: DType | None, native: str) -> Tensor:
        _check_room(shape, dtype)
        if isinstance(value, Tensor):
            compute(value)
            x = value.cast(dtype or value.dtype).expand(shape).clone(native)
        else:
            x = Tensor.full(shape, value, dtype=dtype or dtypes.float32, device=native)
        return x.realize()

    def arange(self, start: Any, stop: Any, step: Any, dtype: DType, native: str) -> Tensor:
        _check_room((int(abs((stop - start) / step)),), dtype)
        return Tensor.arange(start, stop, step, dtype=dtype).clone(native).realize()

    def random(
        self,
        distribution: str,
        shape: tuple[int, ...],
        seed: int | None,
        dtype: DType | None,
        native: str,
    ) -> Tensor:
        dtype = dtype or dtypes.float32
        if dtype not in (dtypes.float16, dtypes.float32, dtypes.float64):
            raise TypeError(f"random numbers are real, and not {dtype}")
        _check_room(shape, dtype)
        shape = (2, *shape) if distribution == "normal" else shape
        if seed is None:
            x = Tensor.rand(*shape, dtype=dtype, device=native)
        else:  # Tensor.rand without its state
            key = Tensor([seed >> 32, seed & 0xFFFFFFFF], dtype=dtypes.uint32, device=native)
            x = Tensor._rand(key, Tensor.zeros_like(key).contiguous(), shape, dtype)
        if distribution == "normal":  # the Box-Muller transform, as Tensor.randn
            first, second = x[0].float(), x[1].float()
            x = ((first * 2 * pi).cos() * ((1 - second).log() * -2).sqrt()).cast(dtype)
        return x.contiguous().realize()

    def seed(self, seed: int) -> None:
        Tensor.manual_seed(seed)

    def astype(self, x: Tensor, dtype: DType) -> Tensor:
        compute(x)
        return x.cast(dtype).clone().realize()

    # -- copying ----------------------------------------------------------------------------------

    def transfer(self, xs: list[Tensor], native: str, *, copy: bool) -> list[Tensor]:
        compute(*xs)
        return [Tensor(x.uop.clone(device=native)).is_param_(x.is_param).realize() for x in xs]

    def to_numpy(self, x: Tensor) -> NDArray[Any]:
        compute(x)
        return x.numpy()

    def from_dlpack(self, x: Any) -> Tensor:
        raise NotImplementedError("tinygrad has no DLPack")

    # -- for logs ---------------------------------------------------------------------------------

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        # A program for the CPU takes 63 tensors, the result among them.
        compute(*xs)
        parts = [Tensor.stack(*xs[i : i + 32]).realize() for i in range(0, len(xs), 32)]
        while len(parts) > 1:
            parts = [
                parts[i].cat(*parts[i + 1 : i + 32]).realize() for i in range(0, len(parts), 32)
            ]
        return parts[0]

    def detach(self, x: Tensor) -> Tensor:
        compute(x)
        return x.detach()


def _check_room(shape: tuple[int, ...], dtype: DType | None) -> None:
    """Refuse sizes that tinygrad would find too large only later: all its devices are the CPU."""
    check_room(prod(shape) * (dtype.itemsize if dtype else 4), memory_of_the_machine())
