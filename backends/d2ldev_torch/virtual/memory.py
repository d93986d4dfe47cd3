"""The memory of virtual GPUs: host memory under another device, and how much of it is in use.

torch exports a tensor's memory as a DLPack capsule and makes a tensor of one. In between, the
device in the capsule is rewritten: the result is a real tensor of the ``PrivateUse1`` backend on
the same memory, which it keeps alive. The way back gives the CPU's kernels their operands.
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual.devices import NAME

CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""With these dispatch keys an operator runs its CPU kernel, on whatever device its operands are."""

_aten = torch.ops.aten

# https://dmlc.github.io/dlpack/latest/c_api.html
_DL_CPU = 1
_DL_EXTENSION = 12  # kDLExtDev, which torch reads as PrivateUse1


class _DLTensor(ctypes.Structure):
    """The beginning of ``DLManagedTensor``, up to the device."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    ]


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]

_export = torch._C._to_dlpack
_import = torch._C._from_dlpack
_at = _DLTensor.from_address


def as_cpu(x: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the memory of one on a virtual GPU, without its history.

    Raises:
        UnsupportedValueError: if it has no memory, as a fake tensor.
    """
    if x.is_nested:
        return _nested_view(as_cpu(_buffer_of(x)), x)
    return _imported(_export(x), _DL_CPU, 0, x)


def as_virtual(x: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor on a virtual GPU on the memory of a CPU tensor that was made for it.

    Raises:
        UnsupportedValueError: for a layout or a dtype without plain memory.
    """
    if x.is_nested:
        return _nested_view(as_virtual(_buffer_of(x), index), x)
    if x._is_zerotensor():
        x = x.clone()  # zeros that have no memory until they are needed
    try:
        capsule = _export(x)
    except (BufferError, RuntimeError) as error:
        raise not_dense(f"make a tensor on {NAME}:{index}") from error
    new = _imported(capsule, _DL_EXTENSION, index, x)
    if new.dtype is not x.dtype:  # integers of fewer than eight bits
        raise not_dense(f"make a tensor on {NAME}:{index}")
    _count(new.untyped_storage(), index)
    return new


def _imported(capsule: object, device_type: int, index: int, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the capsule of ``x``, on another device."""
    description = _at(_pointer_in(capsule, b"dltensor"))
    if description.data is None and x.numel():
        raise UnsupportedValueError(
            "compute with a tensor on a virtual GPU",
            f"its {x.numel()} elements have no memory: torch only pretends that it is there",
            "leave the context of the fake or transformed tensors first",
        )
    description.device_type = device_type
    description.device_id = index
    new = _import(capsule)
    # Lazy conjugation and negation are flags of a tensor, which a capsule does not carry.
    if x.is_conj():
        torch._C._set_conj(new, True)
    if x.is_neg():
        torch._C._set_neg(new, True)
    return new


def not_dense(attempted: str) -> UnsupportedValueError:
    """Return the error of a layout or a dtype that virtual GPUs do not hold."""
    return UnsupportedValueError(
        attempted,
        "virtual GPUs hold dense numbers, no sparse or quantized tensors",
        "keep the tensor on the CPU, or make it dense first: x.to_dense(), x.dequantize(); "
        "Embedding(..., sparse=False)",
    )


# A nested tensor is one dense tensor, and the sizes of its parts, which are on the host. The
# kernels that return them read no element, so that the CPU's serve every device.
_NESTED_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)
_SIZES = (
    _aten._nested_tensor_size.default,
    _aten._nested_tensor_strides.default,
    _aten._nested_tensor_storage_offsets.default,
)


def _buffer_of(x: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor = _aten.values.default.redispatch(_NESTED_KEYS, x)
    return buffer


def _nested_view(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sizes = (op.redispatch(_NESTED_KEYS, x) for op in _SIZES)
    view = _aten._nested_view_from_buffer.default
    nested: torch.Tensor = view.redispatch(CPU_KEYS, buffer, *sizes)
    return nested


def set_memory(
    x: torch.Tensor, storage: torch.UntypedStorage, offset: int, like: torch.Tensor
) -> None:
    """Give a tensor a storage of its device, with the shape and strides of another tensor."""
    _aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS, x, storage, offset, list(like.shape), list(like.stride())
    )


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the memory of a storage on a virtual GPU as bytes on the CPU."""
    view = as_virtual(torch.empty(0, dtype=torch.uint8), storage.device.index)
    set_memory(view, storage, 0, torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta"))
    return as_cpu(view)


# A storage is counted once, when it comes to a virtual GPU, and released when it dies: views share
# it, and the CPU tensors on its memory are not counted.
_lock = threading.RLock()  # a storage may die while another one is being counted
_used: dict[int, int] = {}
_peak: dict[int, int] = {}


class _Counted(weakref.ref):  # type: ignore[type-arg]
    """A reference to a storage, in a third of the time of ``weakref.finalize``."""

    __slots__ = ("index", "size")
    index: int
    size: int


# A reference is kept, else it is never called; by identity, as equal are those of equal storages.
_counted: dict[int, _Counted] = {}


def _count(storage: torch.UntypedStorage, index: int) -> None:
    counted = _Counted(storage, _release)
    counted.index, counted.size = index, storage.nbytes()
    with _lock:
        _counted[id(counted)] = counted
        _used[index] = used = _used.get(index, 0) + counted.size
        if used > _peak.get(index, 0):
            _peak[index] = used


def _release(counted: _Counted) -> None:
    with _lock:
        del _counted[id(counted)]
        _used[counted.index] -= counted.size


def used_and_peak(index: int) -> tuple[int, int]:
    """Return the bytes that tensors hold on a virtual GPU now, and the most they held."""
    with _lock:
        return _used.get(index, 0), _peak.get(index, 0)


def reset_peak(index: int) -> None:
    """Begin the count of the most bytes again."""
    with _lock:
        _peak[index] = _used.get(index, 0)
