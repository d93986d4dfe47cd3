"""Copies of models: what cannot be copied is named."""

import threading
from types import SimpleNamespace

import pytest

from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import deep_copy


def model(**attributes):
    """Return an object that refers to itself, as a model does by its bound methods."""
    made = SimpleNamespace(layers=[SimpleNamespace(width=3), SimpleNamespace(**attributes)])
    made.whole = made
    made.layers[1].owner = made
    return made


def test_deep_copy_copies_containers_too():
    x = model(names={"a": [1]})
    copy = deep_copy(x, {})
    assert copy.whole is copy
    assert copy.layers[1].names == x.layers[1].names
    assert copy.layers[1].names["a"] is not x.layers[1].names["a"]


def test_deep_copy_uses_copies_from_its_memo():
    kept, other = object(), object()
    assert deep_copy(model(kept=kept), {id(kept): other}).layers[1].kept is other


def test_the_failing_attribute_is_named():
    x = model(kept={"its lock": (0, threading.Lock())})
    with pytest.raises(UnsupportedValueError, match=r"at layers\.1\.kept\.its lock\.1: ") as caught:
        deep_copy(x, {})
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_object_that_fails_itself_is_named_as_the_model():
    with pytest.raises(UnsupportedValueError, match="fails at the model itself"):
        deep_copy(threading.Lock(), {})
