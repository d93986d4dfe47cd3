"""The progress of a run: bars in a terminal, one line in a notebook, and nothing elsewhere.

Rich draws the bars. Without rich, a terminal gets a line of text for each epoch.
"""

from __future__ import annotations

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from d2ldev.display import format_number, is_notebook
from d2ldev.training.log import DeviceLog

if TYPE_CHECKING:
    import rich.progress

# Seconds between two transfers of the loss, because each one waits for the device.
_PAUSE = 0.5
_BAR = 20
"""The width of a bar."""


@contextmanager
def show_progress(is_wanted: bool, epochs: int, done: int) -> Iterator[Progress | None]:
    """Show the progress of a run during a block.

    Args:
        is_wanted: whether to show it. Without it, or where nobody looks, the block gets None.
        epochs: the number of epochs of the run.
        done: how many epochs are done at the beginning.
    """
    if not is_wanted:
        yield None
    elif is_notebook():
        yield NotebookLine(epochs, done)
    elif not _is_terminal():
        yield None
    elif (bars := _make_bars()) is None:
        yield Lines(epochs, done)
    else:
        with bars:
            yield Bars(bars, epochs, done)


def _make_bars() -> rich.progress.Progress | None:
    """Return the bars of rich; None without rich."""
    try:
        from rich import progress
        from rich.table import Column
    except ImportError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        progress.BarColumn(_BAR, table_column=Column(no_wrap=True)),
        # In a narrow terminal it takes more lines, and the others keep their width.
        progress.TextColumn("{task.fields[words]}", table_column=Column()),
        progress.TimeElapsedColumn(table_column=Column(no_wrap=True)),
    )


def _is_terminal() -> bool:
    """Return whether somebody looks at the output; in a pipe or a file bars are only noise."""
    # A program may have closed the output, or replaced it by an object of its own.
    is_terminal = getattr(sys.stdout, "isatty", None)
    try:
        return is_terminal is not None and bool(is_terminal())
    except ValueError:
        return False


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
        self._show_loss(f"loss {format_number(loss, 4)}, {format_number(rate, 4)} examples/s")

    def end_epoch(self, done: int, numbers: dict[str, float]) -> None:
        """End an epoch.

        Args:
            done: how many epochs are done.
            numbers: the numbers of the epoch.
        """
        self._done = done
        words = [f"{name} {format_number(value, 4)}" for name, value in numbers.items()]
        self._show_epoch(", ".join(words))

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
    """The bars of a run in a terminal."""

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
        line = f"epoch {self._done + 1}/{self._epochs}, batch {self._batch}{of}: {words}"
        self._write(line, is_kept=False)

    def _show_epoch(self, words: str) -> None:
        seconds = time.monotonic() - self._start
        line = f"epoch {self._done}/{self._epochs}: {words}, {self._words}, {seconds:.1f} s"
        self._write(line, is_kept=True)
        self._end_line()

    def _write(self, line: str, *, is_kept: bool) -> None:
        """Replace the current line; one that is replaced later is no longer than the terminal."""
        if not is_kept:
            line = line[: shutil.get_terminal_size().columns - 1]
        sys.stdout.write(f"\r{line:<{self._length}}")
        sys.stdout.flush()
        self._length = len(line)

    def _end_line(self) -> None:
        """Keep the current line, and begin another one."""
        sys.stdout.write("\n")
        self._length = 0


class NotebookLine(Lines):
    """One line below the cell of a notebook, with a bar; each update replaces it.

    It needs no widgets. A saved notebook keeps the last line.
    """

    def __init__(self, epochs: int, done: int) -> None:
        super().__init__(epochs, done)
        from IPython.display import display

        self._handle: Any = display(self._bundle(""), raw=True, display_id=True)

    def _show_epoch(self, words: str) -> None:
        self._batch = 0  # of the next epoch
        super()._show_epoch(words)

    def _write(self, line: str, *, is_kept: bool) -> None:
        self._handle.update(self._bundle(line), raw=True)

    def _end_line(self) -> None:
        """Let the next epoch replace the line."""

    def _bundle(self, line: str) -> dict[str, str]:
        from html import escape

        share = self._batch / self._batches if self._batches else 0.0
        value = min(self._done + share, self._epochs)
        bar = f'<progress value="{value:.4g}" max="{max(self._epochs, 1)}"></progress>'
        return {"text/plain": line, "text/html": f"{bar} {escape(line)}"}
