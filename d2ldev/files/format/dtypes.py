"""How each dtype is stored: the format has fewer than the frameworks.

What it lacks is stored as the bytes of a dtype that it has, and the true one is in the metadata.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_TAGS = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# The real and the imaginary parts: of complex numbers the format has had C64 alone, since
# safetensors 0.7, and an older one reads nothing of a file in which there is a tag that it lacks.
_PARTS = {"complex64": "F32", "complex128": "F64"}
_FLOAT8 = re.compile(r"float8_e\dm\d[a-z0-9]*")

NAMES = {tag: name for name, tag in _TAGS.items()} | {"C64": "complex64"}
"""The dtype's name for each of the format's tags."""


class Storage(NamedTuple):
    """How the tensors of a dtype are stored.

    Args:
        tag: the format's name of the dtype of the bytes.
        suffix: what the shape in the file has at its end.
    """

    tag: str
    suffix: tuple[int, ...] = ()


def storage_of(name: str) -> Storage | None:
    """How a dtype is stored; None for what are no numbers.

    >>> storage_of("bfloat16"), storage_of("complex128")
    (Storage(tag='BF16', suffix=()), Storage(tag='F64', suffix=(2,)))
    """
    if name in _TAGS:
        return Storage(_TAGS[name])
    if name in _PARTS:
        return Storage(_PARTS[name], (2,))
    return Storage("U8") if _FLOAT8.fullmatch(name) and _exists(name) else None


def _exists(name: str) -> bool:
    import ml_dtypes

    return hasattr(ml_dtypes, name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name; those that NumPy lacks are ``ml_dtypes``'."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of an array as bytes, in the order of its indices; a copy if it is not so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
