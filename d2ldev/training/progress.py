"""The progress of a run in the terminal or a notebook: bars, or lines of text.

Rich draws the bars. Lines replace them without rich, and in a notebook without ipywidgets.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from d2ldev.training.log import DeviceLog

if TYPE_CHECKING:
    import rich.progress

# Seconds between two transfers of the loss, because each one waits for the device.
_PAUSE = 0.5


@contextmanager
def show_progress(is_wanted: bool, epochs: int, done: int) -> Iterator[Progress | None]:
    """Show the progress of a run during a block.

    Args:
        is_wanted: whether to show it; False gives None to the block.
        epochs: the number of epochs of the run.
        done: how many epochs are done at the beginning.
    """
    if not is_wanted:
        yield None
        return
    if not _has_bars():
        yield Lines(epochs, done)
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
        yield Bars(bars, epochs, done)


def _has_bars() -> bool:
    """Return whether rich is installed, and can show bars here."""
    try:
        import rich
    except ImportError:
        return False
    return not rich.get_console().is_jupyter or find_spec("ipywidgets") is not None


class Progress(ABC):
    """The progress of a run, as bars or as lines.

    Args:
        epochs: the number of epochs of the run.
        done: how many epochs are done at the beginning.
    """

    def __init__(self, epochs: int, done: int) -> None:
        self._epochs, self._done = epochs, done
        self._batches: int | None = None
        self._examples = 0
        self._start = self._last_look = time.monotonic()

    def begin_epoch(self, batches: int | None) -> None:
        """Begin an epoch with a number of batches; None if it is unknown."""
        self._batches, self._examples = batches, 0
        self._start = self._last_look = time.monotonic()

    def step(self, done: int, examples: int, log: DeviceLog) -> None:
        """Count a batch.

        Args:
            done: how many batches of the epoch are done.
            examples: the number of examples in the batch.
            log: the log with its loss.
        """
        self._examples += examples
        self._show_batches(done)
        if time.monotonic() - self._last_look >= _PAUSE:
            self.end_batches(log.last()["loss"])

    def end_batches(self, loss: float) -> None:
        """Show the loss, and the number of examples per second."""
        # The loss is on the host: the device has finished these examples.
        self._last_look = time.monotonic()
        rate = self._examples / max(self._last_look - self._start, 1e-9)
        self._show_loss(f"loss {loss:.4g}, {rate:.4g} examples/s")

    def end_epoch(self, done: int, numbers: dict[str, float]) -> None:
        """End an epoch.

        Args:
            done: how many epochs are done.
            numbers: the numbers of the epoch.
        """
        self._done = done
        self._show_epoch(", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))

    @abstractmethod
    def _show_batches(self, done: int) -> None:
        """Show how many batches are done; called after each batch."""

    @abstractmethod
    def _show_loss(self, words: str) -> None:
        """Show the loss so far."""

    @abstractmethod
    def _show_epoch(self, words: str) -> None:
        """Show the numbers of an epoch after its end."""


class Bars(Progress):
    """The bars of a run in a terminal, or in a notebook's widget."""

    def __init__(self, bars: rich.progress.Progress, epochs: int, done: int) -> None:
        super().__init__(epochs, done)
        self._bars = bars
        self._of_epochs = bars.add_task("epoch", total=epochs, completed=done, words="")
        self._of_batches = bars.add_task("batch", total=None, words="")

    def begin_epoch(self, batches: int | None) -> None:
        super().begin_epoch(batches)
        self._bars.reset(self._of_batches, total=batches, words="")

    def _show_batches(self, done: int) -> None:
        self._bars.update(self._of_batches, completed=done)

    def _show_loss(self, words: str) -> None:
        self._bars.update(self._of_batches, words=words)

    def _show_epoch(self, words: str) -> None:
        self._bars.update(self._of_epochs, completed=self._done, words=words)


class Lines(Progress):
    """A line of text for each epoch of a run; it rewrites the line of the current epoch."""

    def __init__(self, epochs: int, done: int) -> None:
        super().__init__(epochs, done)
        self._batch, self._length = 0, 0

    def _show_batches(self, done: int) -> None:
        self._batch = done

    def _show_loss(self, words: str) -> None:
        of = "" if self._batches is None else f"/{self._batches}"
        self._words = words.partition(", ")[2]
        self._write(f"epoch {self._done + 1}/{self._epochs}, batch {self._batch}{of}: {words}")

    def _show_epoch(self, words: str) -> None:
        seconds = time.monotonic() - self._start
        self._write(f"epoch {self._done}/{self._epochs}: {words}, {self._words}, {seconds:.1f} s")
        sys.stdout.write("\n")
        self._length = 0

    def _write(self, line: str) -> None:
        """Replace the current line."""
        sys.stdout.write(f"\r{line:<{self._length}}")
        sys.stdout.flush()
        self._length = len(line)
