"""The torch backend's ``mlp``: ``torch.nn.Linear`` layers in a ``torch.nn.Sequential``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from d2ldev.interface import Backend, DeviceLike
from d2ldev.operations.arguments import checked_mlp

_ACTIVATIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh, "sigmoid": torch.nn.Sigmoid}


def make_mlp(
    backend: Backend, sizes: Sequence[int], activation: str, device: DeviceLike, seed: int
) -> torch.nn.Sequential:
    """See ``Backend.mlp``: weights uniform in +-1/sqrt(n_in), biases zero."""
    numbers, seed = checked_mlp(sizes, activation, seed, _ACTIVATIONS)
    layers: list[torch.nn.Module] = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(numbers)):
        weight = backend.rand((n_out, n_in), seed=seed + i, dtype="float32", device=device)
        # Made without memory, then given tensors that were made on the device: nothing is drawn
        # from torch's random state, and nothing is made elsewhere.
        linear = torch.nn.Linear(n_in, n_out, device="meta")
        linear.weight = torch.nn.Parameter((2 * weight - 1) / math.sqrt(n_in))
        linear.bias = torch.nn.Parameter(backend.zeros(n_out, dtype="float32", device=device))
        layers += [linear, _ACTIVATIONS[activation]()]
    return torch.nn.Sequential(*layers[:-1])
