"""Models: a parameter pytree that can be called. It is a container, and needs no parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_strict as xp

from d2ldev.framework import Models, Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: xp.where(x > 0, x, xp.zeros_like(x)),
    "tanh": xp.tanh,
    "sigmoid": lambda x: 1 / (1 + xp.exp(-x)),
}


class ReferenceModels(Models):
    """MLPs."""

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Any:
        return MLP([{"weight": weight, "bias": bias} for weight, bias in layers], activation)


@dataclass(frozen=True)
class MLP:
    """Dense layers with an activation between them.

    Args:
        layers: ``{'weight': (n_out, n_in), 'bias': (n_out,)}`` for each layer, in order.
        activation: ``'relu'``, ``'tanh'`` or ``'sigmoid'``.
    """

    layers: list[dict[str, Tensor]]
    activation: str = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``(n, sizes[0])`` to ``(n, sizes[-1])``."""
        *hidden, last = self.layers
        for layer in hidden:
            x = activate(self.activation, _dense(layer, x))
        return _dense(last, x)


def activate(activation: str, x: Tensor) -> Tensor:
    """Apply an activation by name to each number."""
    return _ACTIVATIONS[activation](x)


def _dense(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ layer["weight"].T + layer["bias"]
