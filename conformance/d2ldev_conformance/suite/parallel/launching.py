"""Processes that train together, as ``d2ldev launch`` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from d2ldev import Backend
from d2ldev.contract.abilities import require
from d2ldev.framework import NotBegunError, Parallel
from d2ldev.framework.testing import framework_of
from d2ldev.settings import VIRTUAL_GPUS

LIMIT = 300
"""Seconds that a launch takes at most, unless a test says otherwise."""


def command(*options: object) -> list[str]:
    """Return the command that launches a program, which comes last, with its arguments."""
    return [sys.executable, "-m", "d2ldev", "launch", *map(str, options)]


def require_processes(backend: Backend, number: int) -> None:
    """Check that the backend trains in several processes: of other processes there is only text.

    Args:
        backend: the backend under test.
        number: how many processes train.

    Raises:
        UnsupportedValueError: if the framework cannot do it.
        NotBegunError: if its author has not begun with it.
    """
    attempted = f"train in {number} processes"
    require(framework_of(backend), "train in several processes", attempted)
    if type(framework_of(backend).parallel).learner_of_group is Parallel.learner_of_group:
        raise NotBegunError("Parallel.learner_of_group", attempted)


def virtual_gpus_of_each(backend: Backend) -> int:
    """Return how many virtual GPUs each process of a launch has: one of its own, if any."""
    return min(framework_of(backend).virtual_gpus or 0, 1)


def environment(backend: Backend, **others: str) -> dict[str, str]:
    """Return the variables of a launch, with the virtual GPUs of each process."""
    found = {**os.environ, **others}
    if framework_of(backend).virtual_gpus is not None:
        found[VIRTUAL_GPUS] = str(virtual_gpus_of_each(backend))
    return found


def run_launch(
    backend: Backend, launch: Sequence[str], limit: float = LIMIT, **others: str
) -> subprocess.CompletedProcess[str]:
    """Run a ``command``; how it ended, and what all processes have written.

    Args:
        backend: the backend under test.
        launch: the command.
        limit: seconds after which it fails the test.
        others: more variables.
    """
    return subprocess.run(  # noqa: S603
        launch,
        env=environment(backend, **others),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def find_survivors(variable: str) -> list[int]:
    """Return the processes with a variable, ``NAME=value``, that are still there 5 seconds later.

    Those that the processes of a launch have started have its variables, too. Linux only: elsewhere
    none is found.
    """
    deadline = time.monotonic() + 5
    while (found := list(alive(variable))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def alive(variable: str) -> Iterator[int]:
    """Yield the numbers of the processes that were started with a variable, ``NAME=value``."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            given = (path / "environ").read_bytes()  # empty for one that has ended
        except OSError:
            continue
        if variable.encode() in given.split(b"\0"):
            yield int(path.name)
