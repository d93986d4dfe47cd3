"""The MXNet backend's ``mlp``: ``gluon.nn.Dense`` layers in a ``gluon.nn.HybridSequential``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from d2ldev.interface import Backend, DeviceLike
from d2ldev.operations.arguments import checked_mlp
from d2ldev_mxnet.framework import NumPySemantics, mx

_ACTIVATIONS = ("relu", "tanh", "sigmoid")


class NumPySequential(mx.gluon.nn.HybridSequential):  # type: ignore[misc]
    """A ``HybridSequential`` that is called with NumPy arrays, also without ``npx.set_np()``."""

    def __call__(self, *args: Any) -> Any:
        with NumPySemantics():
            return super().__call__(*args)


def make_mlp(
    backend: Backend, sizes: Sequence[int], activation: str, device: DeviceLike, seed: int
) -> NumPySequential:
    """See ``Backend.mlp``: weights uniform in +-1/sqrt(n_in), biases zero."""
    numbers, seed = checked_mlp(sizes, activation, seed, _ACTIVATIONS)
    net = NumPySequential()
    last = len(numbers) - 2
    for i, (n_in, n_out) in enumerate(itertools.pairwise(numbers)):
        weight = backend.rand((n_out, n_in), seed=seed + i, dtype="float32", device=device)
        bias = backend.zeros(n_out, dtype="float32", device=device)
        dense = mx.gluon.nn.Dense(
            n_out, activation=None if i == last else activation, flatten=False, in_units=n_in
        )
        initialise(dense.weight, (2 * weight - 1) / math.sqrt(n_in))
        initialise(dense.bias, bias)
        net.add(dense)
    return net


def initialise(parameter: Any, values: Any) -> None:
    """Give a parameter its values on the device where they are.

    By the way in which parameters are loaded: an initialiser would fill an array of the CPU, most
    of them with numbers from MXNet's random state, and copy it.
    """
    with NumPySemantics():
        parameter._load_init(values, values.ctx)
