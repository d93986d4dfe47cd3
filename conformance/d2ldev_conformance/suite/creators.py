"""Every call that makes a tensor, for the tests that hold for all of them."""

from __future__ import annotations

import pytest

CREATORS = {
    "asarray": lambda backend, **where: backend.asarray([1.0, 2.0], **where),
    "zeros": lambda backend, **where: backend.zeros((2, 3), **where),
    "ones": lambda backend, **where: backend.ones((2, 3), **where),
    "full": lambda backend, **where: backend.full((2, 3), 7.0, **where),
    "arange": lambda backend, **where: backend.arange(5.0, **where),
    "rand": lambda backend, **where: backend.rand((2, 3), **where),
    "rand with a seed": lambda backend, **where: backend.rand((2, 3), seed=1, **where),
    "randn": lambda backend, **where: backend.randn((2, 3), **where),
    "randn with a seed": lambda backend, **where: backend.randn((2, 3), seed=1, **where),
}
creators = pytest.mark.parametrize("make", CREATORS.values(), ids=CREATORS)
