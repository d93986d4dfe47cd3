"""Work in the queue of a device, for long enough to be observed on any GPU.

A fixed amount of work takes a second on one core. On a GPU with 400 TFLOP/s it ends while Python
looks at the next device.
"""

from __future__ import annotations

import math
import time

from d2ldev import Backend, Device

LONG = 0.25
"""Seconds that the queue lasts; backends wait up to 0.05 to see whether a device is idle."""

_SIZES = (1024, 2048, 4096, 8192)
# Seconds of a product that are many times those of its call, so that products pile up.
_PRODUCT = 0.002
_MOST = 1000


def fill_queue(backend: Backend, place: Device) -> None:
    """Queue products of matrices on a device, which take some ``LONG`` seconds together.

    How long one takes is measured, on larger matrices until it takes milliseconds. A backend that
    computes before it returns computes them.
    """
    for size in _SIZES:
        x = backend.rand((size, size), seed=0, device=place)
        seconds = min(_seconds_of_product(backend, x, place) for _ in range(3))
        if seconds > _PRODUCT:
            break
    # A backend may take the numbers themselves for work.
    x = backend.rand((size, size), seed=0, device=place)
    for _ in range(min(math.ceil(LONG / seconds), _MOST)):
        x @ x  # queued all the same if nobody takes the result


def _seconds_of_product(backend: Backend, x: object, place: Device) -> float:
    backend.synchronize(place)
    begin = time.perf_counter()
    x @ x  # type: ignore[operator]
    backend.synchronize(place)
    return time.perf_counter() - begin
