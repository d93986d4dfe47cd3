"""The reference backend's model: a parameter pytree that can be called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_strict as xp

from d2ldev.interface import Backend, DeviceLike, Tensor
from d2ldev.operations.arguments import checked_mlp

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: xp.where(x > 0, x, xp.zeros_like(x)),
    "tanh": xp.tanh,
    "sigmoid": lambda x: 1 / (1 + xp.exp(-x)),
}


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


def make_mlp(
    backend: Backend, sizes: Sequence[int], activation: str, device: DeviceLike, seed: int
) -> MLP:
    """See ``Backend.mlp``: weights uniform in +-1/sqrt(n_in), biases zero."""
    numbers, seed = checked_mlp(sizes, activation, seed, _ACTIVATIONS)
    layers = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(numbers)):
        uniform: Any = backend.rand((n_out, n_in), seed=seed + i, device=device)
        layers.append(
            {
                "weight": (2 * uniform - 1) / math.sqrt(n_in),
                "bias": backend.zeros((n_out,), device=device),
            }
        )
    return MLP(layers, activation)


def activate(activation: str, x: Tensor) -> Tensor:
    """An activation by name, of each number."""
    return _ACTIVATIONS[activation](x)


def _dense(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ layer["weight"].T + layer["bias"]
