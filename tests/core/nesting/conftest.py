"""What the tests of every kind of nesting begin with."""

import pytest

from d2ldev import gpu


@pytest.fixture
def x(reference):
    return reference.asarray([1.0, 2.0])


@pytest.fixture
def moved(reference):
    """Moves a nesting to gpu:0."""
    return lambda batch: reference.to(batch, gpu(0))
