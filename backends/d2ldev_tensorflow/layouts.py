"""The layers of a ``keras.Sequential``, whose kernels are ``(*window, in, out)``.

Channels come last where a convolution has made them. What is flattened without one is the model's
input, which has its order from whoever calls the model, in every framework the same.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from d2ldev.files.layers import Layer
from d2ldev.files.layouts import turned, turned_after_flattening


def layers_of(model: Any) -> list[Layer] | None:
    """The dense and convolution layers of a model in one sequence; None for another model."""
    keras: Any = sys.modules.get("keras")
    if not hasattr(keras, "Sequential") or type(model) is not keras.Sequential or not model.built:
        return None
    of = keras.layers
    layers = []
    channels = 0  # in the last axis before it was flattened, if it was
    has_channels = False
    for layer in model.layers:
        if getattr(layer, "data_format", None) == "channels_first":
            return None  # Keras' Flatten transposes these, and a layer beside it may not
        if type(layer) is of.Flatten:
            if has_channels:
                channels = _channels_of(layer.input.shape)
        elif type(layer) is of.Dense:
            layout: Any = turned
            if channels:
                layout = partial(turned_after_flattening, channels=channels)
            layers.append(_layer(layer, layout))
            channels = 0
        elif type(layer) in (of.Conv1D, of.Conv2D, of.Conv3D):
            layers.append(_layer(layer, turned))
            has_channels = True
        elif layer.weights or not type(layer).__module__.startswith(_WITHOUT_PARAMETERS):
            return None  # it may put what it is given into another order
    return layers


_WITHOUT_PARAMETERS = (
    *("keras.src.layers.activations.", "keras.src.layers.pooling."),
    *("keras.src.layers.core.input_layer", "keras.src.layers.regularization."),
)


def _layer(layer: Any, layout: Any) -> Layer:
    bias = layer.bias
    return Layer(layer._kernel._value, None if bias is None else bias._value, layout)


def _channels_of(shape: tuple[int | None, ...]) -> int:
    """How many channels come last; 0 where there is nothing to flatten."""
    return 0 if len(shape) < 3 else shape[-1] or 0
