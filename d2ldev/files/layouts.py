"""Find the layouts of a model's tensors: of a model in memory, and of one in a file."""

from __future__ import annotations

import math
from typing import Any

from d2ldev.files.format.header import HeaderError, is_sizes
from d2ldev.framework import Framework, Layout
from d2ldev.framework.files import same
from d2ldev.operations.placing import listed_tensors


def layouts_of_model(framework: Framework, model: Any) -> dict[str, Layout] | None:
    """Return the layouts of a model's tensors, by name.

    None if the layers are not in one sequence, or if the model has tensors outside of them.
    """
    layers = framework.files.layers(model)
    if not layers:
        return None
    tensors = dict(listed_tensors(framework, model, "save a model", is_saved=True))
    names = {id(x): name for name, x in tensors.items()}
    found: dict[str, Layout] = {}
    for index, layer in enumerate(layers):
        if layer.weight is None:
            return None
        for part, x, layout in (("weight", layer.weight, layer.layout), ("bias", layer.bias, same)):
            name = names.get(id(x))
            if name in found:
                return None  # a layer that is there twice
            if name is not None:
                found[name] = layout(f"{index}.{part}", tuple(int(size) for size in x.shape))
    # A tied tensor would be found by one of its names only: a model with ties has no layouts.
    return found if found and found.keys() == tensors.keys() else None


def layouts_of(told: Any) -> dict[str, Layout]:
    """Read the layouts in a file.

    Raises:
        HeaderError: if they are no layouts.
    """
    if not isinstance(told, dict):
        raise HeaderError("its layouts are none")
    return {name: _layout_of(what) for name, what in told.items()}


def _layout_of(what: Any) -> Layout:
    is_four = isinstance(what, list) and len(what) == 4 and isinstance(what[0], str)
    if is_four and all(map(is_sizes, what[1:])):
        role, split, axes, shape = what
        if sorted(axes) == list(range(len(split))) and math.prod(split) == math.prod(shape):
            return Layout(role, tuple(split), tuple(axes), tuple(shape))
    raise HeaderError("one of its layouts is none")
