"""The queue that the suite fills lasts long enough on any device, and not too long."""

from types import SimpleNamespace

import pytest
from d2ldev_conformance.suite.devices import queues

CALL = 20e-6
"""Seconds that Python takes for a product that is only queued."""


class Card:
    """A backend with one device, whose clock goes on as work is queued and waited for.

    Args:
        flops: how many operations the device makes in a second.
    """

    def __init__(self, flops):
        self.now = self.end = 0.0
        self.bytes = 0
        self._flops = flops

    def rand(self, shape, *, seed, device):
        self.bytes = max(self.bytes, 4 * shape[0] * shape[1])
        return Matrix(self, shape)

    def ones(self, shape, *, device):
        return Matrix(self, shape)

    def multiply(self, rows, inner, columns):
        self.now += CALL
        self.end = max(self.end, self.now) + 2 * rows * inner * columns / self._flops

    def synchronize(self, device):
        self.now = max(self.now, self.end)

    def to_numpy(self, x):
        self.now = max(self.now, self.end)


class Matrix:
    """A matrix on it."""

    def __init__(self, card, shape):
        self._card, self.shape = card, shape

    def __mul__(self, number):
        return self

    def __matmul__(self, other):
        self._card.multiply(*self.shape, other.shape[1])
        return Matrix(self._card, (self.shape[0], other.shape[1]))


@pytest.mark.parametrize("flops", [2e9, 5e10, 1e12, 5e13, 4e14, 2e15])
def test_the_queue_is_long_on_any_card(flops, monkeypatch):
    card = Card(flops)
    monkeypatch.setattr(queues, "time", SimpleNamespace(perf_counter=lambda: card.now))
    queues.fill_queue(card, None)
    # A slow processor is given one product.
    assert 0.8 * queues.LONG < card.end - card.now < 1.2 * max(queues.LONG, 2 * 1024**3 / flops)
    assert card.now < 10
    assert card.bytes <= 2**28
