"""Keras' objects where Keras computes with another framework; Keras is a stand-in."""

import sys
from types import SimpleNamespace

import pytest

from d2ldev.nesting.keras import is_refused, keras_elsewhere
from d2ldev.operations.keras import backend_of_function

KINDS = {name: type(name, (), {}) for name in ("Layer", "Optimizer", "Variable", "Metric", "Seed")}


@pytest.fixture
def keras(monkeypatch):
    keras = SimpleNamespace(
        **{name: KINDS[name] for name in ("Layer", "Optimizer", "Variable")},
        metrics=SimpleNamespace(Metric=KINDS["Metric"]),
        random=SimpleNamespace(SeedGenerator=KINDS["Seed"]),
        config=SimpleNamespace(backend=lambda: "torch"),
    )
    monkeypatch.setitem(sys.modules, "keras", keras)
    return keras


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("asked", ["torch", "jax", "tensorflow"])
def test_keras_on_pytorch_is_refused_alike(keras, name, asked):
    assert keras_elsewhere(KINDS[name](), asked) == (
        "Keras computes with torch in this process, and d2ldev takes Keras objects on tensorflow "
        "and jax alone",
        "KERAS_BACKEND=tensorflow, before Keras is imported, and D2LDEV_BACKEND=tensorflow",
    )
    assert is_refused(KINDS[name], asked) is (asked == "torch")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("computes", ["tensorflow", "jax"])
def test_keras_on_tensorflow_and_jax_gives_no_error(keras, name, computes):
    keras.config.backend = lambda: computes
    assert keras_elsewhere(KINDS[name](), computes) == ("", "")
    assert not is_refused(KINDS[name], computes)
    # Another backend takes it: its line says how to choose that one.
    assert keras_elsewhere(KINDS[name](), "torch") == (
        f"Keras computes with {computes} in this process",
        "",
    )


def test_other_objects_give_no_warning(keras):
    assert keras_elsewhere(object(), "jax") == ("", "")
    assert not is_refused(object, "torch")


def test_a_loss_of_keras_is_of_the_framework_that_keras_computes_with(keras):
    def loss(y_true, y_pred):
        return y_true - y_pred

    assert backend_of_function(loss) == ""
    loss.__module__ = "keras.src.losses"
    own = type("Own", (type("Loss", (), {"__module__": "keras.src.losses"}),), {})
    assert [backend_of_function(each) for each in (loss, own())] == ["torch", "torch"]


def test_without_keras_there_is_no_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    assert keras_elsewhere(object(), "jax") == ("", "")
