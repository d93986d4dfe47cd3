"""A bar in the terminal for a run; nothing at all, not even an import, where none is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(wanted: bool, epochs: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar for the length of a run.

    Args:
        wanted: whether it is shown.
        epochs: how many there are.
        done: how many are done already.

    Yields:
        What is called after each epoch, with the number of epochs done and a few words.
    """
    if not wanted:
        yield _show_nothing
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=epochs, completed=done, words="")
        yield lambda done, words: progress.update(task, completed=done, words=words)


def _show_nothing(done: int, words: str) -> None:
    """Return what is called after each epoch where no bar is shown."""
