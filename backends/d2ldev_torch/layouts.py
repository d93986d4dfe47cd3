"""The layers of a ``torch.nn.Sequential``: torch's layouts are the canonical ones."""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.files.layers import Layer

_WITH_KERNELS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def layers_of(model: Any) -> list[Layer] | None:
    """The dense and convolution layers of a model in one sequence; None for another model."""
    if type(model) is not torch.nn.Sequential:
        return None
    layers = []
    for layer in model:
        # By the exact type: a parametrized layer computes its kernel from others.
        if type(layer) in _WITH_KERNELS:
            layers.append(Layer(layer.weight, layer.bias))
        elif not _keeps_order(layer):
            return None  # it may put what it is given into another order
    return layers


def _keeps_order(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith("torch.nn.modules.") and not layer._modules
