"""Parametrized modules on their way to another process: torch itself cannot pickle them.

torch makes a class for each such module, with a property for each computed tensor.
https://github.com/pytorch/pytorch/blob/main/torch/nn/utils/parametrize.py
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

# This hook reads the files of the older ``weight_norm``, and knows the name of the tensor.
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
        return _hook, (inspect.getclosurevars(obj).nonlocals["name"],)
    return NotImplemented


def _make(cls: Any, names: tuple[str, ...]) -> torch.nn.Module:
    """Return a module that computes its tensors of these names, still without state."""
    module: torch.nn.Module = cls.__new__(cls)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _hook(name: str) -> Any:
    """Return the hook that ``weight_norm`` adds for a tensor."""
    module = torch.nn.Module()
    module.register_parameter(name, torch.nn.Parameter(torch.ones(1, 1)))
    parametrizations.weight_norm(module, name)
    added: Any = next(iter(module._load_state_dict_pre_hooks.values()))
    return added.hook
