"""List what files have of a model: once for each model in a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from d2ldev.contract import Framework, Layout
from d2ldev.contract.files import same
from d2ldev.nesting.kinds import OBJECT, TENSOR, Kind
from d2ldev.nesting.walk import join_path, label_children
from d2ldev.operations.placing import Inventory


def is_model(framework: Framework, x: Any) -> bool:
    """Return whether files have a value by the names of its tensors: a model or an optimizer."""
    return framework.state.kinds[type(x)] is OBJECT or framework.files.layers(x) is not None


class ModelInventory(Inventory):
    """What files have of a model: its tensors by name, and their layouts.

    Attributes:
        model: the model.
        layouts: by the names of the tensors. None if the layers are not in one sequence, or if the
            model has tensors outside of them.
        settings: values beside tensors in containers of the model, such as batch sizes. For the
            name of each value, the name of its container, and the value as text.
        optimizers: the parameters of each optimizer in the model, by its name; see
            ``Files.list_parameters``.
    """

    def __init__(self, framework: Framework, model: Any, attempted: str) -> None:
        super().__init__(framework, model, attempted, is_saved=True)
        self.model = model
        self.settings = dict(self._find_settings())
        self.layouts = self._find_layouts(framework.files.layers(model))
        lists = ((self._seen[id(x)], framework.files.list_parameters(x)) for x in self.objects)
        self.optimizers = {name: found for name, found in lists if found}

    def _find_layouts(self, layers: Any) -> dict[str, Layout] | None:
        tensors = {name: x for name, x in self.entries if name not in self.unlisted}
        names = {id(x): name for name, x in tensors.items()}
        found: dict[str, Layout] = {}
        for index, layer in enumerate(layers or ()):
            if layer.weight is None:
                return None
            roles = ("weight", layer.weight, layer.layout), ("bias", layer.bias, same)
            for role, x, layout in roles:
                name = names.get(id(x))
                if name in found:
                    return None  # a layer that is there twice
                if name is not None:
                    found[name] = layout(f"{index}.{role}", tuple(int(size) for size in x.shape))
        # A tied tensor would be found by one of its names only: a model with ties has no layouts.
        return found if found and found.keys() == tensors.keys() else None

    def _find_settings(self) -> Iterator[tuple[str, tuple[str, str]]]:
        waiting = [(name, slot.value) for name, slot in reversed(self.slots)]
        seen: dict[int, Any] = {}
        while waiting:
            path, x = waiting.pop()
            kind = self.framework.state.kinds[type(x)]
            if isinstance(kind, Kind) or id(x) in seen:
                continue
            seen[id(x)] = x  # kept, so that its id stays its own
            children = label_children(x, kind, path, self.attempted)
            waiting += [(join_path(path, label), child) for label, child in reversed(children)]
            known = {label for label, _ in children}
            for label, value in label_children(x, kind.saved or kind, path, self.attempted):
                if kind.saved is not None and label not in known:
                    yield join_path(path, label), (path, self._in_words(value))

    def _in_words(self, x: Any) -> str:
        if self.framework.state.kinds[type(x)] is TENSOR:
            x = self.framework.files.borrow(x).tolist()
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(self._in_words, x))}]"
        return repr(x.item() if isinstance(x, np.generic) else x)
