"""A module's attributes other than parameters, buffers and modules, while a copy is trained."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from d2ldev.framework import UnsupportedValueError


class PlainAttributes:
    """The attributes of a module that torch does not know, on the way to a copy and back.

    The copy shares the user's objects: if its ``forward`` appends to a list, it is the user's list.
    An object with a tensor or a part of the model is copied with the model. Examples are a list of
    its layers and one of its methods. Otherwise the copy would compute with the user's parameters.

    Args:
        model: the user's model.

    Raises:
        UnsupportedValueError: if an attribute holds a parameter, which FSDP replaces by its parts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._shared: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        own = {id(x): x for x in _list_known(model)}
        values = [(each, *found) for each in model.modules() for found in _plain(each)]
        for _, name, value in values:
            # Both hold the model, and no forward pass computes with them.
            if name == "trainer" or isinstance(value, torch.optim.Optimizer):
                self._shared[id(value)] = value
        for module, name, value in values:
            if id(value) not in self._shared:
                self._sort(f"{type(module).__name__}.{name}", value, own)

    def _sort(self, where: str, value: Any, own: dict[int, Any]) -> None:
        """Decide whether a value is shared or copied."""
        memo = _Memo(own)
        try:
            deepcopy(value, memo)
        except Exception:  # it exists only once, as a lock or a file
            self._shared[id(value)] = value
            return
        if any(isinstance(own[key], torch.nn.Parameter) for key in memo.met):
            raise UnsupportedValueError(
                f"train the {type(self._model).__name__} with shard='parameters'",
                f"{where} holds a parameter, and FSDP replaces the parameter by a part",
                "use it by its name in forward: self.layer.weight, or a torch.nn.ParameterList",
            )
        tensors = memo.tensors()
        self._tensors |= tensors
        if not (memo.met or tensors):
            self._shared[id(value)] = value

    def copy_to(self, device: torch.device) -> torch.nn.Module:
        """Return a copy of the model; its plain tensors are on the device already."""
        placed = {key: x.to(device, copy=True) for key, x in self._tensors.items()}
        self._copy = deepcopy(self._model, {**self._shared, **placed})
        return self._copy

    def begin(self) -> None:
        """Remember the attributes of the copy before training."""
        self._before = [dict(_plain(module)) for module in self._copy.modules()]

    def bring_back(self) -> None:
        """Set the attributes that the copy's ``forward`` has set on the user's model."""
        known = zip(_list_known(self._copy), _list_known(self._model), strict=True)
        memo = {id(x): whole for x, whole in known}
        modules = zip(self._copy.modules(), self._model.modules(), self._before, strict=True)
        for part, whole, before in modules:
            now = dict(_plain(part))
            for name, value in now.items():
                if name not in before or value is not before[name]:
                    setattr(whole, name, self._bring_back(value, memo))
            for name in before.keys() - now.keys():
                delattr(whole, name)

    @staticmethod
    def _bring_back(value: Any, memo: dict[int, Any]) -> Any:
        """Return a value of the copy in the user's model's form."""
        if isinstance(value, torch.Tensor):
            return value.detach().cpu()
        seen = _Memo(memo)
        try:
            found = deepcopy(value, seen)
        except Exception:  # it exists only once
            return value
        return found if seen.met else value


class _Memo(dict[int, Any]):
    """The memory of ``deepcopy``, which records the known objects that it meets."""

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__(known)
        self._known = known.keys()
        self.met: set[int] = set()

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._known:
            self.met.add(key)
        return super().get(key, default)

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the copied tensors by the ids of their originals."""
        kept = self.setdefault(id(self), [])  # ``deepcopy`` keeps the originals alive here
        return {id(x): x for x in kept if isinstance(x, torch.Tensor)}


def _list_known(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the parts of a model that torch knows, in the same order for a copy of it."""
    yield from model.modules()
    yield from model.parameters()
    yield from model.buffers()


def _plain(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that torch does not use itself."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            yield name, value
