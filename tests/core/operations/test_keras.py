"""Keras' objects where Keras computes with another framework; Keras is a stand-in."""

import sys
from types import SimpleNamespace

import pytest

from d2ldev.operations.keras import keras_elsewhere

KINDS = {name: type(name, (), {}) for name in ("Layer", "Optimizer", "Variable", "Metric", "Seed")}


@pytest.fixture
def keras(monkeypatch):
    keras = SimpleNamespace(
        **{name: KINDS[name] for name in ("Layer", "Optimizer", "Variable")},
        metrics=SimpleNamespace(Metric=KINDS["Metric"]),
        random=SimpleNamespace(SeedGenerator=KINDS["Seed"]),
        config=SimpleNamespace(backend=lambda: "numpy"),
    )
    monkeypatch.setitem(sys.modules, "keras", keras)
    return keras


@pytest.mark.parametrize("name", KINDS)
def test_keras_framework_is_named_with_the_variable_that_chooses_it(keras, name):
    assert keras_elsewhere(KINDS[name](), "jax") == (
        "Keras computes with numpy in this process",
        "KERAS_BACKEND=jax, before Keras is imported",
    )


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_said_where_keras_computes_with_the_framework(keras, name):
    assert keras_elsewhere(KINDS[name](), "numpy") is None


def test_nothing_is_said_of_other_objects(keras):
    assert keras_elsewhere(object(), "jax") is None


def test_nothing_is_said_where_keras_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    assert keras_elsewhere(object(), "jax") is None
