"""The bars of a run in the terminal: its epochs, and the batches of the one that runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from d2ldev.training.log import DeviceLog

if TYPE_CHECKING:
    import rich.progress

# Seconds between two looks at the loss, each of which waits for the device.
_PAUSE = 0.5


@contextmanager
def shown(wanted: bool, epochs: int, done: int) -> Iterator[Progress | None]:
    """Show bars in the terminal for a block, which gets None where they are not wanted.

    Args:
        wanted: whether they are.
        epochs: of the run.
        done: of these, at the beginning.
    """
    if not wanted:
        yield None
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[words]}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns) as bars:
        yield Progress(bars, epochs, done)


class Progress:
    """The bars of a run."""

    def __init__(self, bars: rich.progress.Progress, epochs: int, done: int) -> None:
        self._bars = bars
        self._epochs = bars.add_task("epoch", total=epochs, completed=done, words="")
        self._batches = bars.add_task("batch", total=None, words="")
        self._examples = 0
        self._begun = self._seen = time.monotonic()

    def begin_epoch(self, batches: int | None) -> None:
        """Begin an epoch with so many batches; None if that is not known."""
        self._examples = 0
        self._begun = self._seen = time.monotonic()
        self._bars.reset(self._batches, total=batches, words="")

    def step(self, done: int, examples: int, log: DeviceLog) -> None:
        """Count a batch: how many are done, its examples, and the log with its loss."""
        self._examples += examples
        self._bars.update(self._batches, completed=done)
        if time.monotonic() - self._seen >= _PAUSE:
            self.end_batches(log.last()["loss"])

    def end_batches(self, loss: float) -> None:
        """Show the loss, and how many examples were computed in a second."""
        # The loss is there, so that the device has done what is counted.
        self._seen = time.monotonic()
        rate = self._examples / max(self._seen - self._begun, 1e-9)
        self._bars.update(self._batches, words=f"loss {loss:.4g}, {rate:.4g} examples/s")

    def end_epoch(self, done: int, found: dict[str, float]) -> None:
        """End an epoch: how many are done, and its numbers."""
        words = ", ".join(f"{name} {found[name]:.4g}" for name in found)
        self._bars.update(self._epochs, completed=done, words=words)
