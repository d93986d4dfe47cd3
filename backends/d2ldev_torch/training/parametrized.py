"""Parametrized modules on their way to another process: torch itself cannot pickle them.

torch makes a class for each such module, with a property for each computed tensor.
https://github.com/pytorch/pytorch/blob/main/torch/nn/utils/parametrize.py
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

# This hook reads the files of the older ``weight_norm``. It is a function within a function.
_HOOK = "weight_norm.<locals>._weight_norm_compat_hook"


def reduce(obj: Any) -> Any:
    """Return how ``pickle`` rebuilds an object; see ``Parallel.reduce``."""
    if isinstance(obj, torch.nn.Module):
        if not parametrize.is_parametrized(obj):
            return NotImplemented
        cls: Any = parametrize.type_before_parametrizations(obj)
        names = tuple(obj.parametrizations)  # type: ignore[arg-type]
        return _make, (cls, names), cls.__getstate__(obj)
    is_hook = isinstance(obj, FunctionType) and obj.__qualname__ == _HOOK
    if is_hook and obj.__module__ == parametrizations.__name__:
        return _leave_out_hook, ()
    return NotImplemented


def _make(cls: Any, names: tuple[str, ...]) -> torch.nn.Module:
    """Return a module that computes its tensors of these names. Its state replaces all of these."""
    module: torch.nn.Module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(0, device="cpu")))
        parametrize.register_parametrization(module, name, torch.nn.Identity())
    return module


def _leave_out_hook() -> Any:
    """Return a hook that does nothing: the other process trains, and reads no older files."""
    return _do_nothing


def _do_nothing(*_: object) -> None:
    pass
