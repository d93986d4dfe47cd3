"""Keras on PyTorch, which is refused wherever it is; Keras is a stand-in."""

import pytest
import torch
from keras_elsewhere import CALLS, make_layer

from d2ldev import UnsupportedValueError


class Layer(torch.nn.Module):
    """A layer of Keras', which is a module there."""


@pytest.fixture
def layer(monkeypatch):
    return make_layer(monkeypatch, "torch", Layer)


class Model(torch.nn.Module):
    """A model with a layer of Keras' in it."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_layer_of_keras_is_refused_with_the_reason(virtual, layer, call, tmp_path):
    with pytest.raises(UnsupportedValueError, match="Keras computes with torch") as caught:
        call(virtual, layer, tmp_path)
    assert "KERAS_BACKEND=tensorflow" in caught.value.fix


@pytest.mark.parametrize("name", ["place", "placement", "save", "fit"])
def test_a_model_with_a_layer_of_keras_is_refused_by_its_name(virtual, layer, name, tmp_path):
    with pytest.raises(UnsupportedValueError, match=r"at inner.*Keras computes with torch"):
        CALLS[name](virtual, Model(layer), tmp_path)
