"""One memory under two names: a CPU tensor, and a tensor on a virtual GPU.

torch gives a tensor's memory away in a DLPack capsule and takes it back from one. In between,
the device that is written in the capsule is ours to change: what comes back is a real tensor of
the renamed ``PrivateUse1`` backend on the same memory, which keeps that memory alive. The same
in the other direction gives the kernels of the CPU something to work on.
"""

from __future__ import annotations

import ctypes

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual import ledger

NAME = "vgpu"
"""The ``type`` of a virtual GPU's ``torch.device``."""

# https://dmlc.github.io/dlpack/latest/c_api.html
_ON_CPU = 1
_ON_EXTENSION = 12  # kDLExtDev, which torch reads as PrivateUse1


class _Description(ctypes.Structure):
    """``DLTensor``, the beginning of ``DLManagedTensor``, up to its device."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    ]


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = [ctypes.py_object, ctypes.c_char_p]

_export = torch._C._to_dlpack
_take = torch._C._from_dlpack
_at = _Description.from_address
# Bits and quantized numbers have no DLPack dtype; integers of fewer than eight bits lose theirs.
_WITHOUT_LABEL = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bit", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        *("qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
    )
    if hasattr(torch, name)
)


def as_cpu(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the memory of one on a virtual GPU, without its history."""
    if x.is_nested:
        return _view_of(as_cpu(_buffer_of(x)), x)
    capsule = _export(x)
    description = _at(_pointer_in(capsule, b"dltensor"))
    if description.data is None and x.numel():
        raise UnsupportedValueError(
            "compute with a tensor on a virtual GPU",
            f"its {x.numel()} elements have no memory: torch only pretends that it is there",
            "leave the context of the fake or transformed tensors first",
        )
    description.device_type = _ON_CPU
    description.device_id = 0
    alias = _take(capsule)
    # Lazily conjugated and negated values are flags on a tensor, not bytes in its memory.
    if x.is_conj():
        torch._C._set_conj(alias, True)
    if x.is_neg():
        torch._C._set_neg(alias, True)
    return alias


def as_virtual(x: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor on a virtual GPU that takes over the memory of a CPU tensor made for it.

    Raises:
        UnsupportedValueError: for a layout or a dtype that has no plain memory.
    """
    if x.is_nested:
        return _view_of(as_virtual(_buffer_of(x), index), x)
    if x.layout is not torch.strided or x.dtype in _WITHOUT_LABEL:
        raise UnsupportedValueError(
            f"make a tensor on {NAME}:{index}",
            f"virtual GPUs hold dense numbers, not {x.dtype} in layout {x.layout}",
            "keep it on the CPU, or make it dense first: x.to_dense(), x.dequantize()",
            (f"{NAME}:{index}",),
        )
    if x._is_zerotensor():
        x = x.clone()  # zeros that have no memory until they are needed
    capsule = _export(x)
    description = _at(_pointer_in(capsule, b"dltensor"))
    description.device_type = _ON_EXTENSION
    description.device_id = index
    new = _take(capsule)
    if x.is_conj():
        torch._C._set_conj(new, True)
    if x.is_neg():
        torch._C._set_neg(new, True)
    ledger.count(new.untyped_storage(), index)
    return new


# A nested tensor is one dense tensor, and the sizes of its parts, which are on the host. The
# kernels that tell the parts look at no number, so that the CPU's are right for every device.
_PARTS = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)
_aten = torch.ops.aten


def _buffer_of(x: torch.Tensor) -> torch.Tensor:
    buffer: torch.Tensor = _aten.values.default.redispatch(_PARTS, x)
    return buffer


def _view_of(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parts = (
        op.default.redispatch(_PARTS, x)
        for op in (
            _aten._nested_tensor_size,
            _aten._nested_tensor_strides,
            _aten._nested_tensor_storage_offsets,
        )
    )
    dense = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    nested: torch.Tensor = _aten._nested_view_from_buffer.default.redispatch(dense, buffer, *parts)
    return nested
