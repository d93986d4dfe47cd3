"""Ctrl-C during a run: it ends the run after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from d2ldev.distributed.spawning import shield_processes

END = object()
"""A mark in place of a batch, after the last one."""


class _PressedWhileWaiting(KeyboardInterrupt):
    """Ctrl-C during the wait for a batch."""


class Interruption:
    """The state of Ctrl-C: it ends the run after a step, and a wait for a batch at once.

    A terminal also sends Ctrl-C to the processes of a loader. They may end, and the batch may never
    come.

    Attributes:
        is_pressed: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self._is_waiting = False

    def press(self) -> None:
        """Set ``is_pressed``, and end a wait for a batch."""
        self.is_pressed = True
        if self._is_waiting:
            raise _PressedWhileWaiting

    def draw_next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or ``END`` after the last one and after Ctrl-C."""
        try:
            self._is_waiting = True
            # Only now, because Ctrl-C raises from here on.
            batch = END if self.is_pressed else next(batches, END)
            self._is_waiting = False
        except (Exception, _PressedWhileWaiting):
            self._is_waiting = False
            if not self.is_pressed:
                raise
            return END  # also for an error of data whose processes have ended
        return END if self.is_pressed else batch


@contextmanager
def catch_interruption(is_wanted: bool = True) -> Iterator[Interruption]:
    """Catch the first Ctrl-C in a block; the second one raises ``KeyboardInterrupt``.

    In another thread than the main one, or with a handler of the user's, it catches nothing.

    Args:
        is_wanted: False catches nothing. In a launch, the other processes would wait for a process
            that ends early.
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
    """Return data whose processes ignore Ctrl-C, if it is a loader with processes.

    Otherwise Ctrl-C could end a process at its start. Torch's signal handler would then raise in
    the middle of a step: torch/utils/data/_utils/signal_handling.py.
    """
    if getattr(data, "num_workers", 0):
        return _Shielded(data)
    return data


@dataclass(frozen=True)
class _Shielded:
    """A loader whose iterator starts processes."""

    data: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        with shield_processes():
            return iter(self.data)
