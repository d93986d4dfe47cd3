"""What the tests of every kind of nesting begin with."""

import pytest

import d2ldev
from d2ldev import gpu
from d2ldev.nesting import kinds


@pytest.fixture
def x(reference):
    return reference.asarray([1.0, 2.0])


@pytest.fixture
def moved(reference):
    """Moves a nesting to gpu:0."""
    return lambda batch: reference.to(batch, gpu(0))


@pytest.fixture
def registered(monkeypatch):
    """``register_container``, of which nothing is left afterwards."""
    monkeypatch.setattr(kinds, "_registered", dict(kinds._registered))
    return d2ldev.register_container
