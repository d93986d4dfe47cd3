"""Helpers of the subcommands: consoles, errors and notes, and environments of processes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from d2ldev import settings
from d2ldev.errors import D2LDevError, D2LDevWarning, InvalidDeviceError, UnknownBackendError


def make_console() -> Console:
    """Return a console on the standard output, without automatic colours."""
    return Console(highlight=False)


def complain(message: str) -> None:
    """Print an error on the standard error: in red, its fix in the usual colour.

    The lines are not wrapped: a reader may copy a command from them.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    first, *rest = message.splitlines()
    console.print(Text(f"error: {first}", style="bold red"))
    for line in rest:
        console.print(Text(line))


def show_note(console: Console, note: str) -> None:
    """Print a remark."""
    console.print(Text.assemble(("note: ", "bold yellow"), note))


def exit_status(error: Exception) -> int:
    """Return 2 for an invalid name or number, as for a wrong option; 1 for any other error."""
    return 2 if isinstance(error, (UnknownBackendError, InvalidDeviceError)) else 1


def in_words(error: BaseException) -> str:
    """Return an exception as Python shows it: its type and its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def message_of(error: Exception) -> str:
    """Return the text of one of d2ldev's errors, and any other error with its type."""
    return str(error) if isinstance(error, D2LDevError) else in_words(error)


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a new process with this one's packages and virtual GPUs."""
    path = os.pathsep.join(sys.path)
    return {**os.environ, "PYTHONPATH": path, **settings.list_choices(), **variables}


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the texts of d2ldev's own warnings, each once, instead of showing them.

    Other warnings are shown as usual.
    """
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", D2LDevWarning)
        show = warnings.showwarning

        def collect(message: Any, category: type[Warning], *where: Any, **details: Any) -> None:
            if not issubclass(category, D2LDevWarning):
                show(message, category, *where, **details)
            elif str(message) not in texts:
                texts.append(str(message))

        warnings.showwarning = collect
        yield texts


@contextmanager
def only_for_the_result() -> Iterator[None]:
    """Redirect the standard output to the standard error, also for C libraries."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)
