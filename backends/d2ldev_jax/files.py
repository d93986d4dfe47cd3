"""Files: save random keys as numbers, and list the layers of a ``flax.nnx.Sequential``.

Kernels have the shape ``(*window, in, out)``. Functions may stand between the layers. Common
activations and Flax's pooling keep the order of a convolution's channels. Two functions that
flatten are supported: ``partial(jax.lax.collapse, start_dimension=1)`` and
``partial(jnp.reshape, shape=(n, -1))``. After any other function the order of the next dense
layer's columns is unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from d2ldev.framework import Files, Layer, Tensor, turn, turn_after_flattening
from d2ldev_jax.keras import KerasObject
from d2ldev_jax.models import value_of
from d2ldev_jax.tensors import JaxTensors, numbers_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The generators of random keys, by the names of the dtypes.
_GENERATORS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
_nn = jax.nn
_ELEMENTWISE = (jnp.tanh, _nn.relu, _nn.sigmoid, _nn.gelu, _nn.silu, _nn.leaky_relu, _nn.elu)


class JaxFiles(Files):
    """JAX's arrays and Flax's models in files."""

    tensors: JaxTensors

    def borrow(self, x: Tensor) -> NDArray[Any]:
        self.tensors.device_of(x)  # refuses a tensor without memory, with the reason
        return np.asarray(numbers_of(x))

    def adopt(self, array: NDArray[Any], dtype: str, native: Any) -> Tensor:
        made = self.tensors.adopt(array, native)
        is_key = dtype in _GENERATORS
        return jax.random.wrap_key_data(made, impl=_GENERATORS[dtype]) if is_key else made

    def list_parameters(self, optimizer: Any) -> Sequence[tuple[str, Tensor]]:
        keras: Any = sys.modules.get("keras")
        if not isinstance(optimizer, KerasObject) or not isinstance(optimizer, keras.Optimizer):
            return ()
        # Private: the public list of an optimizer's variables does not tell what it trains.
        return [("", x.value) for x in getattr(optimizer, "_trainable_variables", ())]

    def layers(self, model: Any) -> Sequence[Layer] | None:
        nnx: Any = sys.modules.get("flax.nnx")
        if nnx is None or type(model) is not nnx.Sequential:
            return None
        layers = []
        channels = 0  # of the last convolution, while they are the last axis
        is_flat, is_known = False, True
        for layer in model.layers:
            if type(layer) in (nnx.Conv, nnx.Linear) and not is_known:
                return None  # the function may reorder its input
            if type(layer) is nnx.Conv:
                if is_flat or layer.mask is not None:
                    return None
                layers.append(_layer(layer, turn))
                channels = layer.out_features
            elif type(layer) is nnx.Linear:
                layout: Any = turn
                if channels and layer.in_features != channels:
                    if not is_flat:
                        return None
                    layout = partial(turn_after_flattening, channels=channels)
                layers.append(_layer(layer, layout))
                channels = 0
            elif isinstance(layer, nnx.Module):
                return None
            else:
                is_flat = is_flat or _flattens(layer)
                is_known = is_known and (_flattens(layer) or _is_known(nnx, layer))
        return layers


def _layer(layer: Any, layout: Any) -> Layer:
    return Layer(
        value_of(layer.kernel), None if layer.bias is None else value_of(layer.bias), layout
    )


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
    return any(layer is function for function in _ELEMENTWISE)
