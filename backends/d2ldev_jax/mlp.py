"""The JAX backend's ``mlp``: ``flax.nnx.Linear`` layers in a ``flax.nnx.Sequential``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from d2ldev.interface import Backend, DeviceLike
from d2ldev.operations.arguments import checked_mlp

_ACTIVATIONS = {"relu": nnx.relu, "tanh": nnx.tanh, "sigmoid": nnx.sigmoid}


def make_mlp(
    backend: Backend, sizes: Sequence[int], activation: str, device: DeviceLike, seed: int
) -> nnx.Sequential:
    """See ``Backend.mlp``: weights uniform in +-1/sqrt(n_in), biases zero."""
    numbers, seed = checked_mlp(sizes, activation, seed, _ACTIVATIONS)
    layers: list[Callable[..., Any]] = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(numbers)):
        uniform = backend.rand((n_in, n_out), seed=seed + i, dtype="float32", device=device)
        # Made without memory, then given arrays that were made on the device: nothing is drawn
        # from anyone's random state, and nothing is made elsewhere.
        linear = nnx.eval_shape(lambda i=n_in, o=n_out: nnx.Linear(i, o, rngs=nnx.Rngs(0)))
        linear.kernel = nnx.Param((2 * uniform - 1) / math.sqrt(n_in))
        linear.bias = nnx.Param(backend.zeros(n_out, dtype="float32", device=device))
        layers += [linear, _ACTIVATIONS[activation]]
    return nnx.Sequential(*layers[:-1])
