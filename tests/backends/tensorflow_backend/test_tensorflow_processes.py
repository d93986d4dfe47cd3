"""Several processes: a multi-worker strategy between processes of one virtual GPU each.

All models are trained in one launch, because TensorFlow takes seconds to begin.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from several_gpus import CLASSES, FEATURES, TOLERANCE, flat_batches, images, trained

layers = keras.layers

COARSE = {"rtol": 2e-3, "atol": 2e-3}
"""For numbers of 8 or 11 bits."""


def sequential(*parts):
    keras.utils.set_random_seed(0)
    return keras.Sequential([*parts])


def dense(**options):
    return sequential(keras.Input((FEATURES,)), layers.Dense(CLASSES, **options))


def compiled():
    net = dense()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.1), loss)
    return net


def frozen():
    net = sequential(keras.Input((FEATURES,)), layers.Dense(8), layers.Dense(CLASSES))
    net.layers[0].trainable = False
    return net


def normalized(**options):
    norm = layers.BatchNormalization(momentum=0.5, **options)
    return sequential(keras.Input((FEATURES,)), norm, layers.Dense(CLASSES))


def embedded():
    return sequential(
        keras.Input((3,), dtype="int32"),
        layers.Embedding(11, 4),
        layers.Flatten(),
        layers.Dense(CLASSES),
    )


def of_two_dtypes():
    return sequential(
        keras.Input((FEATURES,)), layers.Dense(4, dtype="float64"), layers.Dense(CLASSES)
    )


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.dense = layers.Dense(CLASSES)

    def call(self, x):
        return self.dense(x)

    def training_step(self, batch):
        x, y = batch
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, self(x))


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones((FEATURES, CLASSES)))
        self.count = tf.Variable(0, trainable=False)
        self.unused = tf.Variable(1.0)

    def __call__(self, x):
        return x @ self.weight


def lenet():
    return sequential(
        keras.Input((28, 28, 1)),
        layers.Conv2D(6, 5, padding="same", activation="sigmoid"),
        layers.AveragePooling2D(7),
        layers.Flatten(),
        layers.Dense(CLASSES),
    )


def words():
    random = np.random.default_rng(0)
    return [
        (random.integers(0, 11, (n, 3)).astype("int32"), np.arange(n, dtype="int32") % CLASSES)
        for n in (5, 4, 1)
    ]


def even():
    return flat_batches(8, 4)


def unweighted():
    x, y = flat_batches(4, 4)[0]
    return [{"x": x, "y": y, "sample_weight": np.zeros(4, "float32")}]


def huge():
    x, y = flat_batches(4, 4)[0]
    x = x.copy()
    x[3] = 1e6  # a gradient that no float16 holds, in the part of the last process
    return [(x, y), *flat_batches(4, 4)]


def scaled_by(optimizer):
    return lambda: keras.optimizers.LossScaleOptimizer(optimizer())


FEW_BITS = {"accumulate": 2, "gradient_clip_val": 0.5}

CASES = {
    "lenet": (lenet, lambda: images(28, 28, 1), {"lr": 0.1}),
    "unbuilt": (lambda: sequential(layers.Dense(CLASSES)), flat_batches, {"lr": 0.1}),
    "own": (Own, flat_batches, {"lr": 0.1}),
    "module": (Scale, flat_batches, {"lr": 0.1}),
    "compiled": (compiled, flat_batches, {}),
    "frozen": (frozen, flat_batches, {"optimizer": "adam"}),
    "embedded": (embedded, words, {"optimizer": "adam"}),
    "embedded and clipped": (embedded, words, {"gradient_clip_val": 0.1}),
    "two dtypes": (of_two_dtypes, flat_batches, {"lr": 0.1}),
    "regularized": (lambda: dense(kernel_regularizer="l2"), unweighted, {"lr": 0.1}),
    "nadam": (dense, flat_batches, {"optimizer": lambda: keras.optimizers.Nadam(0.1)}),
    "ema": (dense, flat_batches, {"optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True)}),
    "accumulating": (
        dense,
        flat_batches,
        {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
    ),
    "clipnorm": (dense, flat_batches, {"optimizer": lambda: keras.optimizers.SGD(1.0, clipnorm=0.1)}),
    "global_clipnorm": (
        dense,
        flat_batches,
        {"optimizer": lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.1)},
    ),
    "clipvalue": (
        dense,
        flat_batches,
        {"optimizer": scaled_by(lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))},
    ),
    "bf16": (dense, flat_batches, {"precision": "bf16", **FEW_BITS}),
    "fp16": (dense, flat_batches, {"precision": "fp16", **FEW_BITS}),
    "left out": (dense, huge, {"precision": "fp16"}),
    "synchronized": (lambda: normalized(synchronized=True), even, {"lr": 0.1}),
}


def learn(backend, name, num_gpus):
    """Train a model; what it has, by name, and the history."""
    make, data, options = CASES[name]
    options = dict(options)
    if callable(options.get("optimizer")):
        options["optimizer"] = options["optimizer"]()
    if make is not Own and make is not compiled:
        options["loss"] = "cross_entropy"
        options["metrics"] = ["accuracy"]
    return trained(backend, make, data(), num_gpus, **options)
