"""Between torch and NumPy: copies in both directions, also of the dtypes NumPy lacks.

bfloat16 and float8 are ``ml_dtypes``' in NumPy. torch takes and gives none of them, so that
their bytes pass as unsigned integers of the same size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_BYTES = {1: torch.uint8, 2: torch.uint16}


def from_data(obj: Any, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A new tensor with the values of a number, nested lists, or a NumPy array."""
    if isinstance(obj, (list, tuple)) and _holds_arrays(obj):
        obj = np.array(obj)  # torch goes through them number by number, and warns that it does
    if isinstance(obj, np.ndarray) and _is_foreign(obj):
        named = getattr(torch, obj.dtype.name)
        data = obj.view(f"u{obj.dtype.itemsize}")
        x = torch.tensor(data, device=device).view(named)
        return x if dtype is None else x.to(dtype)
    # ``torch.tensor`` copies, also memory that is aligned, and goes straight to the device.
    return torch.tensor(obj, dtype=dtype, device=device)


def to_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor, wherever it is, in an array of its own."""
    # One copy: across from a device, or within the CPU's memory, conjugated if ``x`` is lazily so.
    return _array_of(_strided(x).to("cpu", copy=True))


def lent(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor, in its own memory if that is the CPU's."""
    return _array_of(_strided(x).to("cpu").resolve_conj().resolve_neg())


def adopted(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of the CPU in the memory of an array."""
    if not _is_foreign(array):
        return torch.from_numpy(array)
    data = array.view(f"u{array.dtype.itemsize}")
    return torch.from_numpy(data).view(getattr(torch, array.dtype.name))


def _strided(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x if x.layout is torch.strided else x.to_dense()


def _array_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
    name = str(x.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return x.view(_BYTES[x.element_size()]).numpy().view(getattr(ml_dtypes, name))
    return x.numpy()


def _is_foreign(array: np.ndarray[Any, Any]) -> bool:
    return str(array.dtype.name).startswith(("bfloat16", "float8"))


def _holds_arrays(obj: Any) -> bool:
    if isinstance(obj, (list, tuple)):
        return any(_holds_arrays(item) for item in obj)
    return isinstance(obj, np.ndarray)
