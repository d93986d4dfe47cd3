"""Taking over memory by DLPack, with what TensorFlow leaves unchecked checked before.

On the CPU, TensorFlow's operations end the process when memory does not begin at a multiple of 64
bytes, and its ``from_dlpack`` does not look: https://github.com/dmlc/dgl/issues/995. Most of
NumPy's arrays do not begin so.
"""

from __future__ import annotations

import ctypes
from typing import Any

import tensorflow as tf

_ON_CPU = 1
_ALIGNMENT = 64


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


class Exported:
    """A tensor with the methods of DLPack, which TensorFlow's tensors lack.

    Args:
        x: a tensor or a variable.
    """

    def __init__(self, x: Any) -> None:
        self._x = tf.convert_to_tensor(x)

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._x)

    def __dlpack_device__(self) -> tuple[int, int]:
        tensor = _tensor_of(self.__dlpack__())
        return tensor.device_type, tensor.device_id


def from_dlpack(x: Any) -> tf.Tensor:
    """A tensor on the memory of ``x``.

    Raises:
        BufferError: if the memory begins where TensorFlow cannot use it, or ``x`` refuses.
    """
    # Of no version, which has no flag for read-only memory, so that its owner refuses to give it.
    capsule = x.__dlpack__()
    on_cpu = _tensor_of(capsule).device_type == _ON_CPU
    if on_cpu and data_pointer(capsule) % _ALIGNMENT:
        raise BufferError(f"TensorFlow needs memory that begins at a multiple of {_ALIGNMENT}")
    return tf.experimental.dlpack.from_dlpack(capsule)


def data_pointer(capsule: Any) -> int:
    """The address of the first byte that a capsule is about."""
    tensor = _tensor_of(capsule)
    return int(tensor.data or 0) + int(tensor.byte_offset)


def _tensor_of(capsule: Any) -> _Tensor:
    return _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
