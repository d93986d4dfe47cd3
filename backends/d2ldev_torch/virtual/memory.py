"""The memory of virtual GPUs: host memory on another device, and the number of bytes in use.

torch exports a tensor's memory as a DLPack capsule, and makes a tensor from a capsule. In between,
d2ldev rewrites the device in the capsule. The result is a real tensor of the ``PrivateUse1``
backend on the same memory, and keeps it alive. The reverse way gives the CPU's kernels their
operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch

from d2ldev import UnsupportedValueError
from d2ldev.framework import ON_CPU, description_of
from d2ldev_torch.devices import NATIVE_CPU
from d2ldev_torch.virtual.devices import NAME, begin_at

CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""With these dispatch keys an operator runs its CPU kernel, whatever its operands' device."""

_aten = torch.ops.aten

_DL_EXTENSION = 12  # kDLExtDev, which torch reads as PrivateUse1
_export = torch._C._to_dlpack
_import = torch._C._from_dlpack
_view = _aten.as_strided.default._handle.redispatch_boxed


def as_cpu(x: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the memory of one on a virtual GPU, without its history.

    Raises:
        UnsupportedValueError: if it has no memory, for example as a fake tensor.
    """
    if x.is_nested:
        return _view_nested(as_cpu(_buffer_of(x)), x)
    if x.layout is not torch.strided:
        return make_sparse(x, map(as_cpu, parts_of(x)), NATIVE_CPU)
    return _import_capsule(_export(x), ON_CPU, 0, x)


def as_virtual(x: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor on a virtual GPU, with the memory of a new CPU tensor.

    Raises:
        UnsupportedValueError: for a layout or a dtype without plain memory.
    """
    if x.is_nested:
        return _view_nested(as_virtual(_buffer_of(x), index), x)
    if x.layout in SPARSE_KEYS:
        parts = (as_virtual(part, index) for part in parts_of(x))
        return make_sparse(x, parts, torch.device(NAME, index))
    try:
        capsule = _export(x)
    except (BufferError, RuntimeError) as error:
        raise layout_refusal(f"make a tensor on gpu:{index}") from error
    address, dtype = x.data_ptr(), x.dtype
    if not address and x._is_zerotensor():
        return as_virtual(x.clone(), index)  # zeros that take memory only when they are needed
    new = _import_capsule(capsule, _DL_EXTENSION, index, x)
    if new.dtype is not dtype:  # integers with fewer than eight bits
        raise layout_refusal(f"make a tensor on gpu:{index}")
    # Count a storage once, from here until it is freed: views share it.
    storage: Any = new.untyped_storage()
    if not (x.requires_grad or dtype.is_complex):
        storage.origin = x, index, address, x.shape, x.stride(), dtype
    _held.add(ref(storage, _forget))
    if _peaks:
        _count(storage)
    return new


def origin_of(x: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return the CPU tensor behind a tensor on a virtual GPU, and the GPU's index.

    The CPU tensor is a free alias, which other calls share. So a caller must not give it a history
    or another shape. A view gets the same view of the CPU tensor. Return None for a tensor of
    another dtype than its memory's.
    """
    try:
        origin, index, address, shape, stride, dtype = x.untyped_storage().origin  # type: ignore[attr-defined]
        if x.dtype is not dtype or x.is_neg():
            return None
        start = x.data_ptr() - address
        if start or x.shape != shape or x.stride() != stride:
            first = origin.storage_offset() + start // x.element_size()
            origin = _view(CPU_KEYS, origin, x.shape, x.stride(), first)
    except (AttributeError, RuntimeError):  # on the CPU; nested, or without memory
        return None
    return origin, index


def forget_origin(storage: Any) -> None:
    """Forget the CPU tensor behind a storage, because its memory changes."""
    vars(storage).pop("origin", None)


def _import_capsule(capsule: object, device_type: int, index: int, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor from the capsule of ``x``, on another device."""
    description = description_of(capsule)
    if description.data is None and x.numel():
        raise UnsupportedValueError(
            "compute with a tensor on a virtual GPU",
            f"its {x.numel()} elements have no memory: it is a fake or transformed tensor",
            "leave the context of the fake or transformed tensors first",
        )
    description.device_type = device_type
    description.device_id = index
    new = _import(capsule)
    # Lazy conjugation and negation are flags of a tensor, which a capsule lacks.
    if x.dtype.is_complex and x.is_conj():
        torch._C._set_conj(new, True)
    if x.is_neg():
        torch._C._set_neg(new, True)
    return new


def layout_refusal(attempted: str) -> UnsupportedValueError:
    """Return the error of a layout or a dtype that virtual GPUs do not hold."""
    return UnsupportedValueError(
        attempted,
        "virtual GPUs hold numbers of a dense or sparse layout, no quantized tensors",
        "keep the tensor on the CPU, or make it dense first: x.to_dense(), x.dequantize()",
    )


# A nested tensor is one dense tensor, with the sizes of its parts on the host. The kernels that
# return them read no element, so the CPU's kernels serve every device.
_NESTED_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)
_SIZES = (
    _aten._nested_tensor_size.default,
    _aten._nested_tensor_strides.default,
    _aten._nested_tensor_storage_offsets.default,
)


def _buffer_of(x: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor = _aten.values.default.redispatch(_NESTED_KEYS, x)
    return buffer


def _view_nested(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sizes = (op.redispatch(_NESTED_KEYS, x) for op in _SIZES)
    view = _aten._nested_view_from_buffer.default
    nested: torch.Tensor = view.redispatch(CPU_KEYS, buffer, *sizes)
    return nested


# A sparse tensor is dense tensors of indices and values. The CPU's kernels that return these parts,
# or make it of them, read no element, so they serve every device.
_COO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
_COMPRESSED_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsrCPU)
SPARSE_KEYS = {
    torch.sparse_coo: _COO_KEYS,
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), _COMPRESSED_KEYS
    ),
}
"""The dispatch keys of the CPU's kernels for each sparse layout."""
_BY_ROWS = (_aten.crow_indices, _aten.col_indices, _aten.values)
_BY_COLUMNS = (_aten.ccol_indices, _aten.row_indices, _aten.values)
_PARTS = {
    torch.sparse_coo: (_aten._indices, _aten._values),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMNS),
}


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a sparse tensor is made of: its indices, and its values."""
    return [op.default.redispatch(SPARSE_KEYS[x.layout], x) for op in _PARTS[x.layout]]


def make_sparse(
    x: torch.Tensor, parts: Iterable[torch.Tensor], native: torch.device
) -> torch.Tensor:
    """Return a sparse tensor that is made of other parts, on their device.

    Args:
        x: a tensor with the same layout, shape and order of elements.
        parts: the indices and the values.
        native: their device.
    """
    options: Any = {"dtype": x.dtype, "layout": x.layout, "device": native}
    if x.layout is not torch.sparse_coo:
        make = _aten._sparse_compressed_tensor_unsafe.default
        made: torch.Tensor = make.redispatch(CPU_KEYS, *parts, x.shape, **options)
        return made
    return make_coo(
        *(x.sparse_dim(), x.dense_dim(), x.shape, *parts), is_coalesced=x.is_coalesced(), **options
    )


def make_coo(*args: Any, device: torch.device, **options: Any) -> torch.Tensor:
    """Return a COO tensor that is made of parts on a device.

    At first it has empty parts, which torch makes on a device without an index.
    """
    make = _aten._sparse_coo_tensor_with_dims_and_tensors.default
    with begin_at(device.index or 0):
        made: torch.Tensor = make.redispatch(_COO_KEYS, *args, device=device, **options)
    return made


def replace_parts(x: torch.Tensor, new: torch.Tensor) -> None:
    """Give a sparse tensor on a virtual GPU what a kernel has written to its CPU tensor."""
    mine, its = parts_of(x), parts_of(new)
    is_same = x.shape == new.shape and all(
        (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
        for one, other in zip(mine, its, strict=True)
    )
    if x.layout is not torch.sparse_coo:
        if not is_same:
            on_device = as_virtual(new, x.device.index)
            _aten.resize_as_sparse_.default.redispatch(_COMPRESSED_KEYS, x, on_device)
            for one, other in zip(parts_of(x), parts_of(on_device), strict=True):
                one.copy_(other)
    elif is_same:
        _aten._coalesced_.default.redispatch(_COO_KEYS, x, new.is_coalesced())
    else:
        x.data = as_virtual(new, x.device.index)


def set_memory(
    x: torch.Tensor, storage: torch.UntypedStorage, offset: int, like: torch.Tensor
) -> None:
    """Give a tensor a storage of its device, with the shape and strides of another tensor."""
    _aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS, x, storage, offset, list(like.shape), list(like.stride())
    )


def resize(x: torch.Tensor, like: torch.Tensor) -> None:
    """Give a tensor the shape and strides of another.

    Memory that has to grow is allocated anew, and views keep the old memory.
    """
    storage, offset = x.untyped_storage(), int(x.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    needed = (offset + last + 1 if like.numel() else 0) * x.element_size()
    if needed > storage.nbytes():
        grown = torch.empty(needed, dtype=torch.uint8)
        grown[: storage.nbytes()] = bytes_of(storage)
        storage = as_virtual(grown, x.device.index).untyped_storage()
    set_memory(x, storage, offset, like)


def join_memory(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give aliases one storage if their operands share one.

    The CPU's kernels refuse to read memory that they write to, and detect it by the storage.

    Args:
        pairs: aliases made by ``as_cpu``, each with its operand.
    """
    by_address: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for alias, operand in pairs:
        address = operand.untyped_storage().data_ptr()
        by_address.setdefault(address, []).append((alias, operand))
    for address, sharing in by_address.items():
        if address and len(sharing) > 1:
            storage = bytes_of(sharing[0][1].untyped_storage()).untyped_storage()
            for alias, operand in sharing:
                set_memory(alias, storage, int(operand.storage_offset()), operand)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the memory of a storage on a virtual GPU as bytes on the CPU."""
    view = as_virtual(torch.empty(0, dtype=torch.uint8), storage.device.index)
    set_memory(view, storage, 0, torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta"))
    return as_cpu(view)


_held: set[ref[torch.UntypedStorage]] = set()
_forget = _held.discard

# Of ``follow_peaks``: the size of each storage, by the id of a reference to it. Then the bytes of
# each virtual GPU now, and at most.
_sizes: dict[int, tuple[ref[torch.UntypedStorage], int, int]] = {}
_used: Counter[int] = Counter()
_peaks: dict[int, int] = {}


def follow_peaks(number: int) -> None:
    """Follow how many bytes each virtual GPU holds at most, from now on; with 0, no longer."""
    for followed in (_sizes, _used, _peaks):
        followed.clear()
    _peaks.update(dict.fromkeys(range(number), 0))
    for storage in _storages() if number else ():
        _count(storage)


def _count(storage: torch.UntypedStorage) -> None:
    index, size = storage.device.index, storage.nbytes()
    held = ref(storage, _take_off)
    _sizes[id(held)] = held, index, size
    _used[index] += size
    _peaks[index] = max(_peaks[index], _used[index])


def _take_off(held: ref[torch.UntypedStorage]) -> None:
    _, index, size = _sizes.pop(id(held))
    _used[index] -= size


def peak_of(index: int) -> int:
    """Return the most bytes that tensors have held on a virtual GPU since ``reset_peak``."""
    return _peaks[index]


def reset_peak(index: int) -> None:
    """Forget how many bytes a virtual GPU has held, except for those that it holds now."""
    _peaks[index] = _used[index]


def count_used_bytes(index: int) -> int:
    """Return the bytes that tensors hold on a virtual GPU now."""
    return sum(s.nbytes() for s in _storages() if s.device.index == index)


def without_lenders(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the CPU tensors without those whose memory virtual GPUs share."""
    lent = {storage.data_ptr() for storage in _storages()}
    return [x for x in xs if type(x) is not torch.Tensor or _address(x) not in lent]


def _address(x: torch.Tensor) -> int | None:
    try:
        return x.untyped_storage().data_ptr() if x.is_cpu else None
    except RuntimeError:  # it has no storage
        return None


def _storages() -> list[torch.UntypedStorage]:
    storages = (held() for held in _held.copy())
    return [storage for storage in storages if storage is not None]
