"""A stand-in for Keras on another framework than TensorFlow, and calls of d2ldev with its layer."""

import sys
from types import SimpleNamespace

import numpy as np

from d2ldev import ArrayLoader, Trainer

DATA = ArrayLoader(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=2)
CALLS = {
    "place": lambda backend, x, _: backend.place(x, "gpu:0"),
    "placement": lambda backend, x, _: backend.placement(x),
    "to": lambda backend, x, _: backend.to({"layer": x}, "gpu:0"),
    "replicate": lambda backend, x, _: backend.replicate(x, ["cpu", "gpu:0"]),
    "save": lambda backend, x, path: backend.save(x, path / "net.st"),
    "fit": lambda backend, x, _: Trainer(1, num_gpus=1, backend=backend).fit(x, DATA),
}


class Other:
    """What Keras has besides layers."""


def make_layer(monkeypatch, framework, base):
    """Return a layer of a stand-in for Keras.

    Args:
        monkeypatch: takes the stand-in away after the test.
        framework: what Keras computes with.
        base: Keras' class of layers there.
    """
    keras = SimpleNamespace(
        Layer=base,
        Optimizer=Other,
        Variable=Other,
        metrics=SimpleNamespace(Metric=Other),
        random=SimpleNamespace(SeedGenerator=Other),
        config=SimpleNamespace(backend=lambda: framework),
    )
    monkeypatch.setitem(sys.modules, "keras", keras)
    # No subclass of a test before, which Keras was not imported for.
    return type("Dense", (base,), {})()
