"""Keras on JAX, which is refused wherever it is; Keras is a stand-in."""

import pytest
from flax import nnx
from keras_elsewhere import CALLS, make_layer

from d2ldev import UnsupportedValueError


class Layer:
    """A layer of Keras', which is not a module of Flax there."""


@pytest.fixture
def layer(monkeypatch):
    return make_layer(monkeypatch, "jax", Layer)


class Model(nnx.Module):
    """A model with a layer of Keras' in it."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_layer_of_keras_is_refused_with_the_reason(backend, layer, call, tmp_path):
    with pytest.raises(UnsupportedValueError, match="Keras computes with jax") as caught:
        call(backend, layer, tmp_path)
    assert "KERAS_BACKEND=tensorflow" in caught.value.fix


@pytest.mark.parametrize("name", ["place", "placement", "save", "fit"])
def test_a_model_with_a_layer_of_keras_is_refused_by_its_name(backend, layer, name, tmp_path):
    with pytest.raises(UnsupportedValueError, match=r"at inner.*Keras computes with jax"):
        CALLS[name](backend, Model(layer), tmp_path)
