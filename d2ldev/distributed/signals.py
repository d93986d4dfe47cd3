"""What a process does at the signals that end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handle_signals(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Give signals to a function in a block.

    A signal that is ignored, as ``nohup`` has it, stays ignored.

    Args:
        numbers: of the signals, such as ``signal.SIGTERM``.
        handler: is given the number of the signal, and the frame that was interrupted.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)
