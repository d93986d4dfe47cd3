"""The layers of the reference backend's ``MLP``: its layouts are the canonical ones."""

from __future__ import annotations

from typing import Any

from d2ldev.files.layers import Layer
from d2ldev_reference.mlp import MLP


def layers_of(model: Any) -> list[Layer] | None:
    """The dense layers of an ``MLP``; None for anything else."""
    if type(model) is not MLP:
        return None
    return [Layer(layer["weight"], layer["bias"]) for layer in model.layers]
