"""A small model of each framework's own layers.

Source: D2L, section 5.1, "Multilayer Perceptrons".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from d2ldev.framework import DeviceLike, Framework
from d2ldev.framework.models import ACTIVATIONS
from d2ldev.operations import creation, devices, placing
from d2ldev.operations.arguments import checked_mlp


def mlp(
    framework: Framework, sizes: Iterable[int], activation: str, device: DeviceLike, seed: int
) -> Any:
    """Make a multilayer perceptron; see ``Backend.mlp``."""
    framework.require("mlp", "make an MLP")
    numbers, first_seed = checked_mlp(sizes, activation, seed, ACTIVATIONS)
    place = devices.current(framework) if device is None else device
    place = devices.existing(framework, place, "make an MLP")
    layers = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(numbers)):
        shape = framework.models.kernel_shape(n_in, n_out)
        uniform: Any = creation.random(
            framework, "uniform", shape, first_seed + i, "float32", place
        )
        bias = creation.made(framework, framework.tensors.zeros, (n_out,), "float32", place, None)
        with devices.on(framework, place):  # where TensorFlow computes
            layers.append(((2 * uniform - 1) / math.sqrt(n_in), bias))
    return placing.settled(framework, framework.models.mlp(layers, activation), place)
