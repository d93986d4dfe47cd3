"""Tensors by name that are in memory: what ``load_into`` takes instead of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d2ldev.contract import Framework
from d2ldev.errors import UnsupportedValueError, describe, text_of
from d2ldev.files.contents import form_of
from d2ldev.files.load import Wanted
from d2ldev.files.structure import Outline, Stored
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations import creation, moving
from d2ldev.operations.inventory import NamedTensors


class TensorsByName:
    """A mapping from names to tensors and NumPy arrays, read as a ``Checkpoint`` is.

    Raises:
        UnsupportedValueError: if it holds anything else; the message names it.
    """

    writer = None
    called = "the mapping"
    look = "backend.named_tensors(obj) shows the names, shapes and dtypes that fit"

    def __init__(self, framework: Framework, tensors: Mapping[Any, Any], attempted: str) -> None:
        self._framework = framework
        self.attempted = attempted
        self._values: dict[str, Any] = {}
        unlisted = tensors.unlisted if isinstance(tensors, NamedTensors) else frozenset()
        tensors = dict(tensors.items())  # it may read its values anew each time, as ``.npz`` does
        stored: dict[int, Stored] = {}  # a tensor under two names is one, as in a file
        for name, x in tensors.items():
            if id(x) not in stored:
                stored[id(x)] = self._describe(text_of(name), x)
        items = [stored[id(x)] for x in tensors.values()]
        self.outline = Outline("dict", list(tensors), items, optional=unlisted)

    def _describe(self, name: str, x: Any) -> Stored:
        framework = self._framework
        if framework.state.kinds[type(x)] is not TENSOR and not isinstance(x, np.ndarray):
            raise UnsupportedValueError(
                self.attempted,
                f"{describe(x)} at {name} is neither a tensor of the {framework.name} backend nor "
                "a NumPy array",
                "backend.save(other, path), then backend.load_into(net, path): a mapping has "
                "tensors alone, as backend.named_tensors(net) has",
            )
        self._values[name] = x
        dtype, shape = form_of(framework, x)
        return Stored("tensor", name, dtype, dtype, shape)

    def read(self, wanted: Sequence[Wanted]) -> list[Any]:
        """Return tensors and arrays in new memory, on the devices where they are wanted."""
        return [self._copy(each) for each in wanted]

    def _copy(self, wanted: Wanted) -> Any:
        framework, x = self._framework, self._values[wanted.stored.name]
        is_array = isinstance(x, np.ndarray)
        if wanted.stored.kind == "array":
            return x.copy() if is_array else framework.tensors.to_numpy(x)
        if is_array:
            device = wanted.device
            return creation.asarray(framework, x, wanted.stored.dtype, device, None, None)
        x = framework.tensors.detach(x)
        return moving.transfer(framework, [x], wanted.device, self.attempted, copy=True)[0]
