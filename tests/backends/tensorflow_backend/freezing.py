"""A network whose layers are frozen and thawed, and optimizers that train it."""

import keras
import numpy as np
import pytest
from keras import layers

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "averaging": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.1)),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def network(backend, frozen=()):
    """Three layers on the second virtual GPU."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
    )
    freeze(net, frozen)
    return backend.place(net, "gpu:1")


def freeze(net, frozen):
    """Freeze the layers with these numbers, and thaw the others."""
    for index, layer in enumerate(net.layers):
        layer.trainable = index not in frozen


def learner_of(backend, net, optimizer, **options):
    """A learner of labels."""
    return backend.learner(net, loss="cross_entropy", optimizer=optimizer, **options)


def batch_for(backend):
    """Inputs and labels where the network is."""
    x, y = backend.rand((6, 3), seed=0, device="gpu:1"), [0, 1, 0, 1, 1, 0]
    return (x,), backend.asarray(y, device="gpu:1")


def losses(learner, batch, count):
    """Those of some steps on one batch."""
    return [float(learner.step(*batch)[0]) for _ in range(count)]


def values(obj):
    """Of all of its variables, for ``changed``."""
    return [np.array(v.numpy()) for v in obj.variables]


def changed(obj, before):
    """For each of its variables, whether it is another than before."""
    return [not np.array_equal(v, old) for v, old in zip(obj.variables, before, strict=True)]
