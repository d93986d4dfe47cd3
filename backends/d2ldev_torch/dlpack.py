"""Taking over memory by DLPack, with what torch leaves unchecked checked before.

Given a negative stride torch ends the process, and given memory that was exported as read-only
it writes to it. Only arrays on the CPU, NumPy's above all, come with either.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_ON_CPU = 1


class _Tensor(ctypes.Structure):
    """``DLTensor`` of ``dlpack.h``, which is what a capsule points to at its start."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def from_dlpack(x: Any) -> torch.Tensor:
    """A tensor on the memory of ``x``.

    Raises:
        BufferError: if the memory is read-only or is walked backwards, or ``x`` refuses.
    """
    if x.__dlpack_device__()[0] != _ON_CPU:
        return torch.utils.dlpack.from_dlpack(x)
    # Of no version, which has no flag for read-only memory, so that its owner refuses to give it.
    capsule = x.__dlpack__()
    tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    # Without strides, it is in the order of C.
    if tensor.strides and any(tensor.strides[i] < 0 for i in range(tensor.ndim)):
        raise BufferError("torch has no negative strides")
    return torch.utils.dlpack.from_dlpack(capsule)
