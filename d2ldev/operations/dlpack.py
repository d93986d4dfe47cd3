"""Read the description of the memory in a DLPack capsule, before the capsule is handed over.

For backends whose framework takes over memory that it cannot use. Source: ``DLTensor`` in DLPack's
``dlpack.h``.
"""

from __future__ import annotations

import ctypes
from typing import Any

ON_CPU = 1
"""DLPack's number of the CPU, as ``__dlpack_device__`` returns it."""
ON_CUDA = 2
"""DLPack's number of CUDA's GPUs."""


class Description(ctypes.Structure):
    """``DLTensor``, to which an unversioned capsule points at its start."""

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

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(self.data or 0) + int(self.byte_offset)

    @property
    def is_walked_backwards(self) -> bool:
        """Whether a stride is negative; without strides the order is that of C."""
        return bool(self.strides) and any(self.strides[i] < 0 for i in range(self.ndim))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def description_of(capsule: Any) -> Description:
    """Return the description in an unversioned capsule, as ``x.__dlpack__()`` gives it.

    It is valid as long as the capsule was not handed over.
    """
    return Description.from_address(_pointer_of(capsule, b"dltensor"))
