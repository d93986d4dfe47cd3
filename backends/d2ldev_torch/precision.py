"""The precision of float32 products in torch: on CUDA in cuBLAS and cuDNN, on the CPU in oneDNN.

torch has an old interface: ``torch.set_float32_matmul_precision``, for products alone, and
``torch.backends.cudnn.allow_tf32``. Since 2.9 it has a new one: ``fp32_precision`` of each library
and kind of operation. If they differ, reading the old one raises an error. So d2ldev sets both to
the same value.
https://docs.pytorch.org/docs/main/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_HAS_NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")
# An operation without its own precision uses its library's, and a library the general one.
_GENERAL = ("generic", "all")
_LIBRARIES = (("cuda", "all"), ("mkldnn", "all"))
_PRODUCTS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_CONVOLUTIONS = (("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
_KEYS = (_GENERAL, *_LIBRARIES, *_PRODUCTS, *_CONVOLUTIONS)
# torch's names of formats, and d2ldev's names of precisions.
_PRECISIONS = {"bf16": "medium", "tf32": "high"}


def matmul_precision() -> str:
    """Return the lowest precision that products or convolutions have."""
    uses_cuda = torch.version.cuda is not None or torch.version.hip is not None
    if not _HAS_NEW:
        precision = torch.get_float32_matmul_precision()
        is_less = uses_cuda and precision == "highest" and torch.backends.cudnn.allow_tf32
        return "high" if is_less else precision
    keys = [key for key in (*_PRODUCTS, *_CONVOLUTIONS) if uses_cuda or key[0] != "cuda"]
    found = {_get(key) for key in keys}
    return next((ours for theirs, ours in _PRECISIONS.items() if theirs in found), "highest")


def set_matmul_precision(precision: str) -> Callable[[], None]:
    """Set all of torch's switches, and return a function that restores each."""
    put_back = _state()
    try:
        _set_old(precision, precision != "highest")
        if _HAS_NEW:
            for library in _LIBRARIES:
                chosen = _get((library[0], "matmul"))
                of_it = [key for key in (*_LIBRARIES, *_CONVOLUTIONS) if key[0] == library[0]]
                for key in of_it:
                    _set(key, "ieee" if precision == "highest" else chosen)
    except BaseException:
        put_back()
        raise
    return put_back


def _state() -> Callable[[], None]:
    """Return a function that restores the present switches."""
    new: dict[tuple[str, str], str] = {}

    def put_back_new() -> None:
        for key, value in new.items():
            _set(key, value)

    try:
        if _HAS_NEW:
            # From the general one on: then each switch shows its own value, not an inherited one.
            # Meanwhile no precision is lower than before.
            for key in _KEYS:
                new[key] = _get(key)
                _set(key, "ieee" if key in _PRODUCTS + _CONVOLUTIONS else "none")
        with _without_advice():
            products, convolutions = torch.get_float32_matmul_precision(), _convolutions()
    except BaseException:  # Ctrl-C
        put_back_new()
        raise

    def put_back() -> None:
        _set_old(products, convolutions)
        put_back_new()

    return put_back


def _convolutions() -> bool:
    """Return whether the old interface lets cuDNN compute in TensorFloat-32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the old interface says yes, and the new one no
        return True


def _set_old(products: str, convolutions: bool) -> None:
    with _without_advice():
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _without_advice() -> warnings.catch_warnings[None]:
    """Silence the advice of torch 2.9 and 2.10 to use the new interface: d2ldev sets both.

    https://github.com/Lightning-AI/pytorch-lightning/issues/21256
    """
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _get(key: tuple[str, str]) -> str:
    found: str = _find_binding("_get_fp32_precision_getter")(*key)
    return found


def _set(key: tuple[str, str], value: str) -> None:
    _find_binding("_set_fp32_precision_setter")(*key, value)


def _find_binding(name: str) -> Callable[..., Any]:
    # Private: ``torch.backends.cudnn.rnn.fp32_precision`` and the general precision have no public
    # setter that works in every version.
    function: Callable[..., Any] = getattr(torch._C, name)
    return function
