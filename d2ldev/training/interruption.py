"""Ctrl-C during a run: it ends the run after the step, also where other processes read the data."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

END = object()
"""In the place of a batch, after the last one."""


class _PressedWhileWaiting(KeyboardInterrupt):
    """Ctrl-C while no step runs."""


class Interruption:
    """Ctrl-C, which is noted in a step, and ends the waiting for a batch at once.

    A terminal sends it to the processes of a loader, too. They may end, and the batch may never
    come.

    Attributes:
        is_pressed: whether it was pressed.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self._is_waiting = False

    def press(self) -> None:
        """Note it, or raise what ends the waiting."""
        self.is_pressed = True
        if self._is_waiting:
            raise _PressedWhileWaiting

    def draw(self, batches: Iterator[Any]) -> Any:
        """Return the next batch; ``END`` if there is none, or it is pressed."""
        try:
            self._is_waiting = True
            # Looked at only now: what is pressed from here on raises.
            batch = END if self.is_pressed else next(batches, END)
            self._is_waiting = False
        except (Exception, _PressedWhileWaiting):
            self._is_waiting = False
            if not self.is_pressed:
                raise
            return END  # an error of data whose processes have ended, too
        return END if self.is_pressed else batch


@contextmanager
def catch_interruption(is_wanted: bool = True) -> Iterator[Interruption]:
    """Note the first Ctrl-C in a block instead of raising; the second one raises.

    Only where Ctrl-C would raise, and not in another thread or under a handler of the user's; nor
    where it is not wanted, because other processes would wait for one that ends early.
    """
    interruption = Interruption()
    default = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_wanted or not is_main or signal.getsignal(signal.SIGINT) is not default:
        yield interruption
        return

    def press(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, default)
        interruption.press()

    signal.signal(signal.SIGINT, press)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, default)


def shield(data: Iterable[Any]) -> Iterable[Any]:
    """Return data, whose processes are spared Ctrl-C where a loader starts some.

    One that ends while it starts would be an error in the middle of a step: torch looks after its
    processes in a signal handler, torch/utils/data/_utils/signal_handling.py.
    """
    if getattr(data, "num_workers", 0):
        return _Shielded(data)
    return data


@dataclass(frozen=True)
class _Shielded:
    """A loader with processes, which are started when it is gone through."""

    data: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        with shield_processes():
            return iter(self.data)


@contextmanager
def shield_processes() -> Iterator[None]:
    """Spare the processes that are started in a block Ctrl-C, where the system can."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Processes inherit it. A signal that comes meanwhile waits, and nothing is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
