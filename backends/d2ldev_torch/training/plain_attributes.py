"""What a module has beside its parameters, buffers and modules, while a copy of it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from d2ldev.errors import UnsupportedValueError


class PlainAttributes:
    """The attributes of a module that torch knows nothing of, in a copy of it and back.

    The copy has the very same objects, so that what its ``forward`` appends to a list is in the
    user's list. Only what holds something of the model, such as a list of its layers or one of its
    methods, or a tensor, is copied with it: else the copy would compute with the user's parameters.

    Args:
        model: the user's own.

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
            # Both have the model, and no forward computes with them.
            if name == "trainer" or isinstance(value, torch.optim.Optimizer):
                self._shared[id(value)] = value
        for module, name, value in values:
            if id(value) not in self._shared:
                self._sort(f"{type(module).__name__}.{name}", value, own)

    def _sort(self, where: str, value: Any, own: dict[int, Any]) -> None:
        """Find out whether a value is shared or copied."""
        memo = _Memo(own)
        try:
            deepcopy(value, memo)
        except Exception:  # a lock or a file, for example: there is but one
            self._shared[id(value)] = value
            return
        if any(isinstance(own[key], torch.nn.Parameter) for key in memo.met):
            raise UnsupportedValueError(
                f"train the {type(self._model).__name__} with shard='parameters'",
                f"{where} holds a parameter, in the place of which FSDP puts a part",
                "use it by its name in forward: self.layer.weight, or a torch.nn.ParameterList",
            )
        tensors = memo.tensors()
        self._tensors |= tensors
        if not (memo.met or tensors):
            self._shared[id(value)] = value

    def copy_to(self, device: torch.device) -> torch.nn.Module:
        """Return the copy of the model; its plain tensors are on a device already."""
        placed = {key: x.to(device, copy=True) for key, x in self._tensors.items()}
        self._copy = deepcopy(self._model, {**self._shared, **placed})
        return self._copy

    def begin(self) -> None:
        """Remember what the copy has before it is trained."""
        self._before = [dict(_plain(module)) for module in self._copy.modules()]

    def bring_back(self) -> None:
        """Give the user's model what the copy's ``forward`` has bound anew, or a copy of it."""
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
        """Return a value of the copy as the user's model has it."""
        if isinstance(value, torch.Tensor):
            return value.detach().cpu()
        seen = _Memo(memo)
        try:
            found = deepcopy(value, seen)
        except Exception:  # there is but one
            return value
        return found if seen.met else value


class _Memo(dict[int, Any]):
    """The memory of ``deepcopy``, which notices what it met of what it knew before."""

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__(known)
        self._known = known.keys()
        self.met: set[int] = set()

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._known:
            self.met.add(key)
        return super().get(key, default)

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the tensors that were copied, by their identity."""
        kept = self.setdefault(id(self), [])  # where ``deepcopy`` keeps what it has copied alive
        return {id(x): x for x in kept if isinstance(x, torch.Tensor)}


def _list_known(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what torch knows of in a model, in the same order for a copy of it."""
    yield from model.modules()
    yield from model.parameters()
    yield from model.buffers()


def _plain(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that torch does not use itself."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            yield name, value
