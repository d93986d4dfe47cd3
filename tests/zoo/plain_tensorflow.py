"""What Keras does without d2ldev: the numbers that d2ldev has to give, too."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_models import MODELS  # noqa: F401  # the table of this framework
from zoo import Model

from d2ldev import Backend


def build(model: Model, seed: int) -> Any:
    """Return the model, one and the same for a seed."""
    keras.utils.set_random_seed(seed)
    return model.build()


def make_optimizer(model: Model, net: Any) -> Any:
    if model.optimizer is not None:
        return model.optimizer(net)
    return keras.optimizers.AdamW(learning_rate=1e-3, epsilon=1e-3)


def split(batch: Any) -> tuple[Any, Any]:
    """Return the inputs as Keras takes them, and the target."""
    if isinstance(batch, dict):
        return {name: x for name, x in batch.items() if name != "y"}, batch["y"]
    return batch


start = make_optimizer  # a loop of one's own and ``fit`` take the same object


def predict(model: Model, net: Any, batch: Any) -> dict[str, np.ndarray]:
    inputs, _ = split(batch)
    return flatten(net(inputs, training=False))


def train(model: Model, net: Any, batches: list[Any], optimizer: Any) -> Any:
    """Train as a loop of one's own does, and return the model."""
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(inputs: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            output = net(inputs, training=True)
            is_keras = isinstance(model.loss, keras.losses.Loss)
            loss = model.loss(y, output) if is_keras else model.loss(output, y)
        # Dense ones: of an embedding Keras squares each row of a token that repeats alone.
        found = tape.gradient(loss, net.trainable_variables)
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in found]
        pairs = zip(gradients, net.trainable_variables, strict=True)
        optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])

    with tf.device(net.variables[0].value.device):  # as TensorFlow needs it, off the CPU
        for batch in batches:
            step(*split(batch))
    return net


def state_of(net: Any) -> dict[str, np.ndarray]:
    """Return the variables, but for the states of random numbers."""
    return {f"{i} {v.name}": v.numpy() for i, v in enumerate(_variables(net))}


def _variables(net: Any) -> list[Any]:
    return [v for v in net.variables if "seed_generator" not in v.path]


def flatten(output: Any) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(x) for i, x in enumerate(tf.nest.flatten(output))}


def find_elsewhere(model: Model, net: Any, backend: Backend[Any, Any], device: str) -> list[str]:
    """Return the names of variables that are not on a device."""
    there = backend.device(device)
    return [v.path for v in net.variables if backend.device_of(v.value) != there]


def has_batch_statistics(net: Any) -> bool:
    kinds = keras.layers.BatchNormalization
    return any(isinstance(layer, kinds) for layer in net._flatten_layers())


def ties_of(net: Any) -> set[frozenset[str]]:
    return set()
