"""The progress of a run: bars in a terminal, one line in a notebook, and nothing elsewhere.

Rich draws the bars. Without rich, a terminal gets a line of text for each epoch. A process that
``fit`` started sends its progress to the process that shows it.
"""

from __future__ import annotations

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from d2ldev.display import format_number, is_notebook
from d2ldev.distributed.spawning import find_sender
from d2ldev.training.log import DeviceLog

if TYPE_CHECKING:
    import rich.progress

VIEW = "progress"
"""The name of the view that a process of ``fit`` calls."""

# Seconds between two transfers of the loss, because each one waits for the device.
_PAUSE = 0.5
_BAR = 20
"""The width of a bar."""

# Seconds between two messages to the process that shows the progress.
_SENDING_PAUSE = 0.1


@contextmanager
def show_progress(is_wanted: bool, epochs: int, done: int) -> Iterator[Progress | None]:
    """Show the progress of a run during a block.

    Args:
        is_wanted: whether to show it. Without it, or where nobody looks, the block gets None.
        epochs: the number of epochs of the run.
        done: how many epochs are done at the beginning.
    """
    with open_view(is_wanted, epochs) as view:
        if view is None:
            yield None
        else:
            view.begin(done)
            yield Progress(view)


@contextmanager
def open_view(is_wanted: bool, epochs: int) -> Iterator[View | None]:
    """Give a block what shows the progress of a run, or None where nobody looks.

    Args:
        is_wanted: whether to show it.
        epochs: the number of epochs of the run.
    """
    if not is_wanted:
        yield None
    elif (send := find_sender(VIEW)) is not None:
        yield Sent(send)
    elif is_notebook():
        yield NotebookLine(epochs)
    elif not _is_terminal():
        yield None
    elif (bars := _make_bars()) is None:
        yield Lines(epochs)
    else:
        with bars:
            yield Bars(bars, epochs)


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


class Progress:
    """The progress of a run, which counts the examples.

    Args:
        view: what shows it.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._examples = 0
        self._start = self._last_look = time.monotonic()

    def begin_epoch(self, batches: int | None) -> None:
        """Begin an epoch with a number of batches; None if it is unknown."""
        self._view.begin_epoch(batches)
        self._examples = 0
        self._start = self._last_look = time.monotonic()

    def step(self, done: int, examples: int, log: DeviceLog) -> None:
        """Count a batch.

        Args:
            done: how many batches of the epoch are done.
            examples: the number of examples in the batch.
            log: the log with its loss.
        """
        self._examples += examples
        self._view.show_batches(done)
        if time.monotonic() - self._last_look >= _PAUSE:
            self.end_batches(log.last()["loss"])

    def end_batches(self, loss: float) -> None:
        """Show the loss, and the number of examples per second."""
        # The loss is on the host: the device has finished these examples.
        self._last_look = time.monotonic()
        rate = self._examples / max(self._last_look - self._start, 1e-9)
        words = f"loss {format_number(loss, 4)}, {format_number(rate, 4)} examples/s"
        self._view.show_loss(words)

    def end_epoch(self, done: int, numbers: dict[str, float]) -> None:
        """End an epoch.

        Args:
            done: how many epochs are done.
            numbers: the numbers of the epoch.
        """
        words = [f"{name} {format_number(value, 4)}" for name, value in numbers.items()]
        self._view.show_epoch(done, ", ".join(words))


class View(ABC):
    """What shows the progress of a run, as bars or as lines."""

    @abstractmethod
    def begin(self, done: int) -> None:
        """Begin with a number of epochs that are done."""

    @abstractmethod
    def begin_epoch(self, batches: int | None) -> None:
        """Begin an epoch with a number of batches; None if it is unknown."""

    @abstractmethod
    def show_batches(self, done: int) -> None:
        """Show how many batches are done; called after each batch."""

    @abstractmethod
    def show_loss(self, words: str) -> None:
        """Show the loss so far."""

    @abstractmethod
    def show_epoch(self, done: int, words: str) -> None:
        """Show how many epochs are done, and the numbers of the last one."""


class Sent(View):
    """What sends the progress to the process that started this one, and shows it.

    Args:
        send: sends the name of a method of its ``View``, and the arguments.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._batch, self._next = 0, 0.0

    def begin(self, done: int) -> None:
        self._send("begin", done)

    def begin_epoch(self, batches: int | None) -> None:
        self._send("begin_epoch", batches)

    def show_batches(self, done: int) -> None:
        self._batch = done
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SENDING_PAUSE
            self._send("show_batches", done)

    def show_loss(self, words: str) -> None:
        self._send("show_batches", self._batch)
        self._send("show_loss", words)

    def show_epoch(self, done: int, words: str) -> None:
        self._send("show_epoch", done, words)


class Bars(View):
    """The bars of a run in a terminal.

    Args:
        bars: the bars of rich.
        epochs: the number of epochs of the run.
    """

    def __init__(self, bars: rich.progress.Progress, epochs: int) -> None:
        self._bars = bars
        self._of_epochs = bars.add_task("epoch", total=epochs, words="")
        self._of_batches = bars.add_task("batch", total=None, words="")

    def begin(self, done: int) -> None:
        self._bars.update(self._of_epochs, completed=done)

    def begin_epoch(self, batches: int | None) -> None:
        self._bars.reset(self._of_batches, total=batches, words="")

    def show_batches(self, done: int) -> None:
        self._bars.update(self._of_batches, completed=done)

    def show_loss(self, words: str) -> None:
        self._bars.update(self._of_batches, words=words)

    def show_epoch(self, done: int, words: str) -> None:
        self._bars.update(self._of_epochs, completed=done, words=words)


class Lines(View):
    """A line of text for each epoch of a run; it rewrites the line of the current epoch.

    Args:
        epochs: the number of epochs of the run.
    """

    def __init__(self, epochs: int) -> None:
        self._epochs, self._done = epochs, 0
        self._batches: int | None = None
        self._batch, self._length, self._words = 0, 0, ""
        self._start = time.monotonic()

    def begin(self, done: int) -> None:
        self._done = done

    def begin_epoch(self, batches: int | None) -> None:
        self._batches, self._start = batches, time.monotonic()

    def show_batches(self, done: int) -> None:
        self._batch = done

    def show_loss(self, words: str) -> None:
        of = "" if self._batches is None else f"/{self._batches}"
        self._words = words.partition(", ")[2]
        line = f"epoch {self._done + 1}/{self._epochs}, batch {self._batch}{of}: {words}"
        self._write(line, is_kept=False)

    def show_epoch(self, done: int, words: str) -> None:
        self._done = done
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

    def __init__(self, epochs: int) -> None:
        super().__init__(epochs)
        from IPython.display import display

        self._handle: Any = display(self._bundle(""), raw=True, display_id=True)

    def show_epoch(self, done: int, words: str) -> None:
        self._batch = 0  # of the next epoch
        super().show_epoch(done, words)

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
