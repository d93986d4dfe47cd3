"""Keras on PyTorch, which is refused wherever it is; Keras is a stand-in."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from d2ldev import ArrayLoader, Trainer, UnsupportedValueError


class Layer(torch.nn.Module):
    """A layer of Keras', which is a module there."""


class Other:
    """What Keras has besides."""


@pytest.fixture
def layer(monkeypatch):
    keras = SimpleNamespace(
        Layer=Layer,
        Optimizer=Other,
        Variable=Other,
        metrics=SimpleNamespace(Metric=Other),
        random=SimpleNamespace(SeedGenerator=Other),
        config=SimpleNamespace(backend=lambda: "torch"),
    )
    monkeypatch.setitem(sys.modules, "keras", keras)
    # No subclass of a test before, which Keras was not imported for.
    return type("Dense", (Layer,), {})()


class Model(torch.nn.Module):
    """A model with a layer of Keras' in it."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer


DATA = ArrayLoader(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=2)
CALLS = {
    "place": lambda backend, x, _: backend.place(x, "gpu:0"),
    "placement": lambda backend, x, _: backend.placement(x),
    "to": lambda backend, x, _: backend.to({"layer": x}, "gpu:0"),
    "replicate": lambda backend, x, _: backend.replicate(x, ["cpu", "gpu:0"]),
    "save": lambda backend, x, path: backend.save(x, path / "net.st"),
    "fit": lambda backend, x, _: Trainer(1, num_gpus=1, backend=backend).fit(x, DATA),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_layer_of_keras_is_refused_with_the_reason(virtual, layer, call, tmp_path):
    with pytest.raises(UnsupportedValueError, match="Keras computes with torch") as caught:
        call(virtual, layer, tmp_path)
    assert "KERAS_BACKEND=tensorflow" in caught.value.fix


@pytest.mark.parametrize("name", ["place", "placement", "save", "fit"])
def test_a_model_with_a_layer_of_keras_is_refused_by_its_name(virtual, layer, name, tmp_path):
    with pytest.raises(UnsupportedValueError, match=r"at inner.*Keras computes with torch"):
        CALLS[name](virtual, Model(layer), tmp_path)
