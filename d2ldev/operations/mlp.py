"""A small model of each framework's own layers.

Source: D2L, section 5.1, "Multilayer Perceptrons".
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any

from d2ldev.contract import DeviceLike, Framework
from d2ldev.contract.abilities import require
from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError, describe, quote, text_of
from d2ldev.operations import creation, devices, moving, placing
from d2ldev.options import ACTIVATIONS, problem_of, write_option

_MOST_SIZES = 10_000
"""More sizes are a mistake, such as a range, which need not end."""


def mlp(
    framework: Framework, sizes: Iterable[int], activation: str, device: DeviceLike, seed: int
) -> Any:
    """Make a multilayer perceptron; see ``Backend.mlp``.

    It draws and scales the weights on the host. For the same seed a GPU may draw other numbers, and
    it may divide by multiplying.
    """
    require(framework, "mlp", "make an MLP")
    numbers, first_seed = _check(sizes, activation, seed)
    place = devices.current(framework) if device is None else device
    place = devices.resolve(framework, place, "make an MLP")
    kernels, biases = [], []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(numbers)):
        shape, number = (n_out, n_in), first_seed + i
        uniform: Any = creation.random(framework, "uniform", shape, number, "float32", CPU)
        with devices.on(framework, CPU):  # where TensorFlow computes
            kernels.append((2 * uniform - 1) / math.sqrt(n_in))
        zeros = framework.tensors.zeros
        biases.append(creation.make_tensor(framework, zeros, (n_out,), "float32", place, None))
    if place is not CPU:
        kernels = moving.transfer(framework, kernels, place, f"make an MLP on {place}", copy=True)
    layers = list(zip(kernels, biases, strict=True))
    return placing.settle(framework, framework.models.mlp(layers, activation), place)


def _check(sizes: Iterable[int], activation: str, seed: int) -> tuple[list[int], int]:
    """Return the sizes and the seed as integers of Python's."""
    problem = ""
    try:
        numbers = [operator.index(size) for size in itertools.islice(sizes, _MOST_SIZES + 1)]
        number = operator.index(seed)
    except Exception as error:  # whatever a value's own ``__index__`` raises
        numbers, number, problem = [], 0, text_of(error)
    if isinstance(sizes, (str, bytes)) or len(numbers) < 2 or min(numbers) < 1:
        problem = problem or "it must have at least two sizes, each 1 or more"
    elif len(numbers) > _MOST_SIZES:
        problem = f"it may have at most {_MOST_SIZES} sizes"
    elif problem := problem_of(activation, ACTIVATIONS):
        raise UnsupportedValueError(
            f"make an MLP with activation={describe(activation)}",
            problem,
            write_option(
                "activation", activation, ACTIVATIONS, "write the network with the framework's own"
            ),
        )
    if problem:
        raise UnsupportedValueError(
            f"make an MLP of sizes {quote(sizes)} with {quote(activation)} and seed {quote(seed)}",
            problem,
            "net = backend.mlp([20, 64, 1], activation='relu', seed=0)",
        )
    return numbers, number
