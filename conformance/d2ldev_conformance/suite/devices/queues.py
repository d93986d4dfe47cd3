"""Work in the queue of a device, for long enough to be observed on any GPU.

A fixed amount of work takes a second on one core. On a GPU with 400 TFLOP/s it ends while Python
looks at the next device.

Each product is a factor of the next one. So a lazy framework computes all of them for the last one,
and the others need no memory.
"""

from __future__ import annotations

import math
import time
from typing import Any

from d2ldev import Backend, Device

LONG = 0.25
"""Seconds that the queue lasts; backends wait up to 0.05 to see whether a device is idle."""

PATIENCE = 5
"""Seconds after which a device with little work has to be idle."""

_SIZES = (1024, 2048, 4096, 8192)
# Seconds of a product that are many times those of its call, so that products pile up.
_PRODUCT = 0.002
_MOST = 1000


def fill_queue(backend: Backend, place: Device) -> Any:
    """Queue products of matrices on a device, which take some ``LONG`` seconds together.

    How long one takes is measured, on larger matrices until it takes milliseconds. A backend that
    computes before it returns computes them.

    Returns:
        The last product: a framework may drop what nobody holds.
    """
    for size in _SIZES:
        x = _make_matrix(backend, size, place)
        seconds = min(seconds_of_products(backend, x, place, 1) for _ in range(3))
        if seconds > _PRODUCT:
            break
    # A backend may take the numbers themselves for work.
    x = _make_matrix(backend, size, place)
    return multiply(x, min(math.ceil(LONG / seconds), _MOST))


def _make_matrix(backend: Backend, size: int, place: Device) -> Any:
    """Return numbers whose sum in a row is about 1, so that products of many are finite."""
    return backend.rand((size, size), seed=0, device=place) * (2 / size)


def multiply(x: Any, number: int) -> Any:
    """Return a matrix that was multiplied so many times with itself, from the left."""
    y = x
    for _ in range(number):
        y = x @ y
    return y


def seconds_of_products(backend: Backend, x: Any, place: Device, number: int) -> float:
    """Return how long products of a matrix take, one after the other, until they are done.

    A read of values that need all of the last product waits for them: ``synchronize`` is under
    test.
    """
    column = backend.ones((x.shape[1], 1), device=place)
    backend.synchronize(place)
    begin = time.perf_counter()
    backend.to_numpy(multiply(x, number) @ column)
    return time.perf_counter() - begin


def becomes_idle(backend: Backend, place: Device) -> bool:
    """Return whether a device becomes idle although nobody waits for it or reads from it."""
    end = time.monotonic() + PATIENCE
    while not backend.is_idle(place):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
