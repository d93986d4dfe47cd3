"""Map the frameworks' dtypes to those of the format, which has fewer.

A dtype that the format lacks is stored as the bytes of another; the metadata names the true one.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from d2ldev.dependencies import import_optional

_TAGS = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
PACKED = {"float4_e2m1fn": "F4", "float6_e2m3fn": "F6_E2M3", "float6_e3m2fn": "F6_E3M2"}
"""Dtypes whose numbers are packed in a file, and are one to a byte in memory: they are not read."""
_FLOAT8 = re.compile(r"float8_e\dm\d[a-z0-9]*")

NAMES = {tag: name for name, tag in {**_TAGS, **PACKED}.items()}
"""The name of the dtype for each tag of the format."""
BITS = {tag: int("".join(re.findall(r"\d+", tag)[:1]) or 8) for tag in NAMES}
"""How many bits a number of each tag takes in a file."""


class Storage(NamedTuple):
    """How the tensors of a dtype are stored.

    Args:
        tag: the format's name of the stored dtype.
        suffix: the sizes that the stored shape has after the tensor's.
    """

    tag: str
    suffix: tuple[int, ...] = ()


# How dtypes were stored before the format had tags for them.
_OLDER = {
    "complex64": Storage("F32", (2,)),
    "float8_e8m0fnu": Storage("U8"),
    "float8_e4m3fnuz": Storage("U8"),
    "float8_e5m2fnuz": Storage("U8"),
}


def storage_of(name: str) -> Storage | None:
    """Return how a dtype is stored; None if it is not a dtype of numbers.

    >>> storage_of("bfloat16"), storage_of("complex128")
    (Storage(tag='BF16', suffix=()), Storage(tag='F64', suffix=(2,)))
    """
    if name in _TAGS:
        return Storage(_TAGS[name])
    if name == "complex128":  # the format has none: as real and imaginary parts
        return Storage("F64", (2,))
    if not _FLOAT8.fullmatch(name):
        return None
    return Storage("U8") if hasattr(_ml_dtypes(name), name) else None


def storages_of(name: str) -> list[Storage]:
    """Return every way in which a dtype is stored in files, also in older ones."""
    ways = [storage_of(name), _OLDER.get(name), Storage(PACKED[name]) if name in PACKED else None]
    return [way for way in ways if way is not None]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name, from ``ml_dtypes`` if NumPy has none.

    Raises:
        PackageNotInstalledError: if NumPy has none, and ``ml_dtypes`` is missing.
    """
    if name.startswith(("bfloat", "float8")):
        dtype: np.dtype[Any] = np.dtype(getattr(_ml_dtypes(name), name))
        return dtype
    return np.dtype(name)


def _ml_dtypes(name: str) -> ModuleType:
    return import_optional("ml_dtypes", f"hold {name} in NumPy", extra="files")


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """View an array as bytes in C order; copy it if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
