"""``Timer``: the book's timer, with a wait for the devices.

Source: D2L, section 12.4 ("Timer"), and 13.5.
"""

from __future__ import annotations

import time

from d2ldev._backend import Backend
from d2ldev.active import active_backend, get_backend
from d2ldev.display import format_number


class Timer:
    """Record several times, and wait for every device before each one ends.

    It starts when it is created, like the book's. The book's timer measures only how long it takes
    to queue the work.

    Args:
        backend: the backend of the devices, or its name; None is the active backend.

    Attributes:
        times: the seconds from each ``start`` to its ``stop``.

    >>> timer = Timer('reference')
    >>> seconds = timer.stop()
    >>> timer.start()
    >>> seconds += timer.stop()
    >>> timer.sum() == seconds, timer.avg() == seconds / 2, len(timer.cumsum())
    (True, True, 2)
    """

    def __init__(self, backend: Backend | str | None = None) -> None:
        self._backend = active_backend() if backend is None else get_backend(backend)
        self.times: list[float] = []
        self.start()

    def __repr__(self) -> str:
        times = "1 time" if len(self.times) == 1 else f"{len(self.times)} times"
        seconds = format_number(self.sum(), 4)
        return f"<Timer of the {self._backend.name} backend: {times}, {seconds} s in all>"

    def start(self) -> None:
        """Wait until the devices are idle, and start to measure."""
        self._backend.synchronize()
        self._begin = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since ``start``, and record them; wait for the devices first."""
        self._backend.synchronize()
        self.times.append(time.perf_counter() - self._begin)
        return self.times[-1]

    def avg(self) -> float:
        """Return the mean of the times; NaN without a time."""
        return self.sum() / len(self.times) if self.times else float("nan")

    def sum(self) -> float:
        """Return the sum of the times."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """Return the sums of the first time, the first two, and so on."""
        return [sum(self.times[: i + 1]) for i in range(len(self.times))]
