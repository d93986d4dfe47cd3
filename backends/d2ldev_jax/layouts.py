"""The layers of a ``flax.nnx.Sequential``, whose kernels are ``(*window, in, out)``.

Between them may be functions. Those that are known are the elementwise ones of ``jax.nn``, the
pooling of Flax, and two ways of flattening: ``partial(jax.lax.collapse, start_dimension=1)`` and
``partial(jnp.reshape, shape=(n, -1))``. What another function does to the channels of a convolution
is not known, nor is then the order of the columns of the next dense layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from d2ldev.files.layers import Layer
from d2ldev.files.layouts import turned, turned_after_flattening

_ELEMENTWISE = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus"),
    *("squareplus", "sigmoid", "log_sigmoid", "hard_sigmoid", "hard_silu", "hard_tanh", "tanh"),
    *("soft_sign", "softmax", "log_softmax"),
)


def layers_of(model: Any) -> list[Layer] | None:
    """The dense and convolution layers of a model in one sequence; None for another model."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or type(model) is not nnx.Sequential:
        return None
    return _layers(nnx, model.layers)


def _layers(nnx: Any, sequence: Iterable[Any]) -> list[Layer] | None:
    layers = []
    channels = 0  # of the last convolution, as long as they are the last axis
    is_flat, is_known = False, True
    for layer in sequence:
        if type(layer) is nnx.Conv:
            if is_flat or not is_known or layer.mask is not None:
                return None
            layers.append(Layer(_value(layer.kernel), _value(layer.bias), turned))
            channels = layer.out_features
        elif type(layer) is nnx.Linear:
            layout: Any = turned
            if channels and layer.in_features != channels:
                if not is_flat or not is_known:
                    return None
                layout = partial(turned_after_flattening, channels=channels)
            layers.append(Layer(_value(layer.kernel), _value(layer.bias), layout))
            channels = 0
        elif isinstance(layer, nnx.Module):
            return None
        else:
            is_flat = is_flat or _flattens(layer)
            is_known = is_known and (_flattens(layer) or _is_known(nnx, layer))
    return layers


def _value(variable: Any) -> Any:
    if variable is None:
        return None
    slot = "_raw_value" if hasattr(type(variable), "get_raw_value") else "raw_value"
    return object.__getattribute__(variable, slot)


def _flattens(layer: Any) -> bool:
    if not isinstance(layer, partial) or layer.args:
        return False
    if layer.func is jax.lax.collapse:
        return layer.keywords == {"start_dimension": 1}
    shape = layer.keywords.get("shape")
    return layer.func is jnp.reshape and len(layer.keywords) == 1 and len(shape or ()) == 2


def _is_known(nnx: Any, layer: Any) -> bool:
    if isinstance(layer, partial):
        return layer.func in (nnx.max_pool, nnx.avg_pool) or _is_known(nnx, layer.func)
    return layer is jnp.tanh or any(layer is getattr(jax.nn, name, None) for name in _ELEMENTWISE)
