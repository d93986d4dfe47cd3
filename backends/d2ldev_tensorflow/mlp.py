"""The TensorFlow backend's ``mlp``: ``keras.layers.Dense`` layers in a ``keras.Sequential``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from d2ldev.errors import UnsupportedValueError
from d2ldev.operations.arguments import checked_mlp

_ACTIVATIONS = ("relu", "tanh", "sigmoid")


def make_mlp(sizes: Sequence[int], activation: str, seed: int, native: str) -> Any:
    """See ``Backend.mlp``: kernels uniform in +-1/sqrt(n_in), biases zero."""
    (n_in, *sizes), seed = checked_mlp(sizes, activation, seed, _ACTIVATIONS)
    import keras  # not before it is needed: who computes without Keras need not have it

    if keras.config.backend() != "tensorflow":
        raise UnsupportedValueError(
            "make an MLP of Keras layers",
            f"Keras computes with {keras.config.backend()} in this process",
            "set KERAS_BACKEND=tensorflow before Keras is imported, or unset it",
        )
    layers = [keras.Input((n_in,))]
    for i, n_out in enumerate(sizes):
        layers.append(
            keras.layers.Dense(
                n_out,
                activation=activation if i < len(sizes) - 1 else None,
                # Keras' own name for it, so that the model can be saved and cloned. With a seed
                # it draws from no state.
                kernel_initializer=keras.initializers.VarianceScaling(
                    1 / 3, "fan_in", "uniform", seed=(seed + i) % 2**63
                ),
                name=f"dense_{i}",
            )
        )
    with tf.device(native):
        return keras.Sequential(layers, name="mlp")
