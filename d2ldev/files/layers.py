"""From the layers of a model in one sequence to the layouts of its tensors, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.files.layouts import Layout, same
from d2ldev.files.objects import tensors_of

if TYPE_CHECKING:
    from d2ldev.interface import Backend


class Layer(NamedTuple):
    """A dense or a convolution layer.

    Args:
        weight: its kernel; None if it has none yet.
        bias: None if it has none.
        layout: ``(role, shape) -> Layout`` of the kernel.
    """

    weight: Any
    bias: Any
    layout: Callable[[str, tuple[int, ...]], Layout] = same


def layouts_in(backend: Backend, model: Any, layers: Iterable[Layer]) -> dict[str, Layout] | None:
    """The layouts of a model's tensors, by name; None if it has others than those of the layers.

    Args:
        backend: whose model it is.
        model: a model.
        layers: those of its layers that have parameters, in order.
    """
    tensors = tensors_of(backend, model, "save a model")
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
    # Of what has two names, only one would be found: a model with ties has no layouts either.
    return found if found and found.keys() == tensors.keys() else None
