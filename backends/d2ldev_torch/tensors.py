"""Tensors: ``torch.Tensor``, to and from NumPy, DLPack and other devices.

In NumPy, bfloat16 and float8 are the dtypes of ``ml_dtypes``. torch does not support these arrays.
So their bytes are exchanged as unsigned integers of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    CPU,
    ON_CPU,
    Container,
    Tensor,
    Tensors,
    describe,
    description_of,
    import_optional,
)
from d2ldev_torch.devices import NATIVE_CPU, TorchDevices
from d2ldev_torch.streams import SideStream, copy_in_turn, is_large

_Library: Any = torch.library.Library
_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
# The tensors that make up a sparse tensor. It has no other bytes. Two are private: the public ones
# refuse a tensor with several values for one place.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (*_ROWS, "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (*_COLUMNS, "values")),
}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16}
_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
# ``torch.arange`` does not support these: https://github.com/pytorch/pytorch/issues/58734
_NEVER_COUNTED = frozenset({torch.uint16, torch.uint32, torch.uint64})


class TorchTensors(Tensors):
    """Tensors of torch on the CPU and one accelerator.

    Args:
        devices: the area of devices.
    """

    types = (torch.Tensor,)
    plain_types = (torch.dtype, torch.device)
    # Graphs of PyTorch Geometric and dicts of tensordict have both.
    own_methods = ("to", "clone")
    dtype_names = tuple(
        name
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
            *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
            "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    )

    def __init__(self, devices: TorchDevices) -> None:
        self._devices = devices
        # The device of each native device. Moving a batch looks it up for every tensor.
        self._places: dict[torch.device, Device] = {}
        # For batches that are copied ahead to a GPU, one for each.
        self.side_streams: dict[torch.device, SideStream] = {}

    @property
    def default_dtypes(self) -> tuple[str, str]:  # type: ignore[override]
        """That of floats is the one that ``torch.set_default_dtype`` has set."""
        return "int64", str(torch.get_default_dtype()).removeprefix("torch.")

    # -- reading ----------------------------------------------------------------------------------

    def device_of(self, x: Any) -> Device:
        try:
            if x.is_cpu:
                return CPU
            native = x.device
            place = self._places.get(native)  # a single lookup: torch hashes its devices slowly
            if place is not None:
                return place
        except AttributeError:
            native = None
        device = self._devices.from_native(native)
        if device is None:
            raise UnsupportedValueError(
                "tell the device of a tensor",
                *(
                    (
                        f"{describe(x)} is not a torch tensor",
                        "x = backend.asarray(x) makes a tensor",
                    )
                    if native is None
                    else (
                        f"the tensor is on {native}, which has no bytes for d2ldev",
                        "module.to_empty(device=backend.native('gpu:0')) ends 'meta' for a module",
                    )
                ),
            )
        self._places[x.device] = device
        return device

    def is_on(self, x: Tensor, device: Device) -> bool:
        # As ``device_of`` in the usual cases, without its call.
        if x.is_cpu:
            return device is CPU
        return (self._places.get(x.device) or self.device_of(x)) is device

    def dtype_of(self, x: Tensor) -> str:
        return _DTYPE_NAMES[x.dtype]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)  # type: ignore[no-any-return]

    def address(self, x: Tensor) -> int:
        try:
            return int(x.data_ptr())
        # A sparse tensor has several addresses; nested and uninitialized ones have none.
        except (RuntimeError, ValueError) as error:
            raise UnsupportedValueError(
                "tell the address of a tensor",
                f"a tensor of layout {x.layout} does not have a single address",
                "backend.address(x.to_dense()), or of one of the tensors that it consists of",
            ) from error

    def container_of(self, cls: type) -> Container | None:
        if cls is not PackedSequence:
            return None
        names = ("data", "sorted_indices", "unsorted_indices")
        return Container(
            lambda packed: [getattr(packed, name) for name in names],
            lambda _: names,
            # torch requires the batch sizes on the host.
            lambda old, new: PackedSequence(new[0], old.batch_sizes.clone(), new[1], new[2]),
            holds="pieces",
            saved=Container(
                iter, lambda packed: packed._fields, lambda _, new: PackedSequence(*new)
            ),
        )

    def nbytes(self, x: Tensor) -> int:
        parts = (getattr(x, name)() for name in _PARTS.get(x.layout, ()))
        return int(sum(part.nbytes for part in parts) if x.layout in _PARTS else x.nbytes)

    # -- making -----------------------------------------------------------------------------------

    def from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        if isinstance(obj, np.ndarray) and (foreign := foreign_dtype(obj.dtype.name)) is not None:
            x = torch.tensor(view_unsigned(obj), device=native).view(foreign)
            return x if dtype is None else x.to(dtype)
        # ``torch.tensor`` always copies, also aligned memory, and directly to the device.
        return torch.tensor(obj, dtype=dtype, device=native)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=native)

    # Separate sizes, except for a scalar: torch takes a third longer to read them from a tuple.

    def zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        return torch.zeros(*(shape or ((),)), dtype=dtype, device=native)

    def ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        return torch.ones(*(shape or ((),)), dtype=dtype, device=native)

    def empty(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=native)

    def arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        if dtype in _NEVER_COUNTED:
            return torch.arange(start, stop, step, dtype=torch.int64, device=native).to(dtype)
        return torch.arange(start, stop, step, dtype=dtype, device=native)

    def random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        if seed is None:
            draw = torch.rand if distribution == "uniform" else torch.randn
            return draw(shape, dtype=dtype, device=native)
        seeded = torch.ops.d2ldev.seeded if torch.compiler.is_compiling() else _draw_seeded
        return seeded(distribution, shape, seed, dtype, native)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def astype(self, x: Tensor, dtype: Any) -> Tensor:
        return x.to(dtype)

    # -- copying ----------------------------------------------------------------------------------

    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        # On the CPU ``clone`` takes two thirds of the time of ``to``. Before Python 3.12 a
        # comprehension is a call, which takes a tenth of the time of a copy.
        if copy and native is NATIVE_CPU:
            made = []
            for x in xs:
                made.append(x.clone() if x.is_cpu else x.to(native, copy=True))  # noqa: PERF401
            return made
        return [x.to(native, copy=copy) for x in xs]

    def transfer_ahead(self, xs: list[Tensor], native: Any) -> Callable[[], list[Tensor]]:
        module = self._devices.streams
        if module is None:
            return super().transfer_ahead(xs, native)
        if not is_large(xs):
            return partial(copy_in_turn, xs, native)
        if native not in self.side_streams:
            self.side_streams[native] = SideStream(self, module, native)
        return self.side_streams[native].begin(xs)

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        self.device_of(x)  # refuses a tensor without bytes, by name
        # One copy, from a device or within the CPU's memory. It resolves a lazy conjugate.
        return array_of(make_strided(x).to("cpu", copy=True))

    def from_dlpack(self, x: Any) -> Tensor:
        """Return a tensor on the memory of ``x``, after checks that torch omits.

        torch ends the process at a negative stride, and writes to memory that was exported as
        read-only. Only arrays on the CPU have either, above all NumPy's.

        Raises:
            BufferError: if the memory is read-only or is walked backwards, or ``x`` refuses.
        """
        if isinstance(x, torch.Tensor):  # also on a virtual GPU, for which DLPack has no name
            self.device_of(x)  # refuses a tensor without bytes, by name
            if x.requires_grad:
                raise BufferError("it requires a gradient: x.detach()")
            return x.detach()
        if x.__dlpack_device__()[0] != ON_CPU:
            return torch.utils.dlpack.from_dlpack(x)
        # Without a version the capsule has no flag for read-only memory, and the owner refuses it.
        capsule = x.__dlpack__()
        if description_of(capsule).is_walked_backwards:
            raise BufferError("torch has no negative strides")
        return torch.utils.dlpack.from_dlpack(capsule)

    # -- for logs ---------------------------------------------------------------------------------

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(xs))

    def norm(self, x: Tensor) -> Tensor:
        return torch.linalg.norm(x)

    def detach(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.detach()
        is_part = not x.ndim and x.untyped_storage().nbytes() > x.element_size()
        return x.clone() if is_part else x


def _draw_seeded(
    distribution: str, shape: Sequence[int], seed: int, dtype: Any, device: torch.device
) -> Tensor:
    draw = torch.rand if distribution == "uniform" else torch.randn
    generator = torch.Generator(device).manual_seed(seed)
    return draw(shape, generator=generator, dtype=dtype, device=device)


# torch's compiler makes no generators in its graphs: there the whole function is one operator.
_library: Any = _Library("d2ldev", "DEF")
_library.define(
    "seeded(str name, SymInt[] shape, int seed, ScalarType? dtype, Device device) -> Tensor"
)
_library.impl("seeded", _draw_seeded, "BackendSelect")


def _shape_of_seeded(
    _: str, shape: Sequence[int], _seed: int, dtype: Any, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


torch.library.register_fake("d2ldev::seeded", _shape_of_seeded, lib=_library)


def make_strided(x: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor without its gradient."""
    x = x.detach()
    return x if x.layout is torch.strided else x.to_dense()


def array_of(
    x: torch.Tensor, convert: Callable[[torch.Tensor], Any] = torch.Tensor.numpy
) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor of the CPU as an array.

    Args:
        x: the tensor.
        convert: makes an array of a tensor whose dtype NumPy has.
    """
    name = str(x.dtype).removeprefix("torch.")
    if name.startswith(("bfloat16", "float8")):
        ml_dtypes = import_optional("ml_dtypes", f"hold {name} in NumPy", extra="files")
        numbers: Any = convert(x.view(_UNSIGNED[x.element_size()]))
        return numbers.view(getattr(ml_dtypes, name))  # type: ignore[no-any-return]
    return convert(x)  # type: ignore[no-any-return]


def foreign_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype of a name whose arrays torch refuses; None for any other name."""
    return getattr(torch, name) if name.startswith(("bfloat16", "float8")) else None


def view_unsigned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes of an array as unsigned integers of the same size."""
    return array.view(f"u{array.dtype.itemsize}")
