"""Models: a callable pytree of parameters. It is a container, and needs no ``members``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_strict as xp

from d2ldev.framework import Models, Tensor

Layers = list[dict[str, Tensor]]
"""The kernel ``'weight'`` and the ``'bias'`` of each layer, or their gradients or moments."""

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

    layers: Layers
    activation: str = "relu"

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``(n, sizes[0])`` to ``(n, sizes[-1])``."""
        *_, prediction = self.outputs(x)
        return prediction

    def outputs(self, x: Tensor) -> list[Tensor]:
        """Return the input, the output of each hidden layer, and the prediction."""
        *hidden, last = self.layers
        outputs = [x]
        for layer in hidden:
            outputs.append(_ACTIVATIONS[self.activation](_dense(layer, outputs[-1])))
        return [*outputs, _dense(last, outputs[-1])]


def _dense(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ layer["weight"].T + layer["bias"]
