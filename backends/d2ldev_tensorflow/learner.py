"""The TensorFlow backend's ``learner``: an MLP that Keras' Adam trains."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d2ldev.device import Device
from d2ldev.interface import Backend, Step, Tensor


def make_learner(backend: Backend, device: Device) -> tuple[Any, Step]:
    """See ``Backend.learner``."""
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    import keras  # not before it is needed: who computes without Keras need not have it

    with backend.on(device):
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(net.trainable_variables)

    def step(learner: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        # Outside of a scope TensorFlow computes on its default device, wherever the operands are.
        with backend.on(backend.device_of(x)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((learner["model"](x) - y) ** 2)
            parameters = learner["model"].trainable_variables
            learner["optimizer"].apply(tape.gradient(loss, parameters), parameters)
        return learner, loss

    return {"model": net, "optimizer": optimizer}, step
