"""Two ways of doing the same, measured side by side.

Each round times both, in alternating order, so that a machine that slows down slows both; what
is reported is the median of the rounds. The statements are texts, as ``timeit`` takes them,
because calling a function around them would take a good part of the time.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from timeit import Timer
from typing import Any

LOG_AIM = 1.1
"""How much of the time of a list and one transfer a ``DeviceLog`` takes at most."""
_ROUNDS = 101
_SECONDS_PER_SAMPLE = 0.001
_PROCESS_ROUNDS = 15
_STAGES = """
import time
start = time.perf_counter()
{theirs}
between = time.perf_counter()
{ours}
print([between - start, time.perf_counter() - between])
"""


# The options of ``mallopt``: https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let the C library keep the memory that is freed in this process, where it is glibc.

    Else it gives pages back to the system and takes them again in each step of training, or does
    not, by what lies at the end of its memory: up to a third of the time of a step, on either side.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for option, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26), (_MMAP_MAX, 0)):
        mallopt(option, value)


def _nothing() -> None:
    """Wait for nothing, where nothing is queued."""


@dataclass(frozen=True)
class Comparison:
    """Our statement against theirs.

    Args:
        name: what both do.
        ours: the statement with d2ldev.
        theirs: the framework's own; empty if it cannot run here.
        aim: the ratio of their times that ours should not exceed; None for information.
        names: the names that both statements use.
        note: why a statement cannot run, or what to know about the row.
        within: the context in which ours is measured.
        finish: called at the end of each sample, for example to wait for the device.
    """

    name: str
    ours: str
    theirs: str
    aim: float | None
    names: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[], object] = _nothing


@dataclass(frozen=True)
class ProcessComparison:
    """Our program against theirs, each in a Python interpreter of its own.

    Args:
        name: what is compared.
        ours: the program with d2ldev.
        theirs: the program without.
        aim: the milliseconds that ours should take more at most; None for information.
    """

    name: str
    ours: str
    theirs: str
    aim: float | None
    note: str = ""


@dataclass(frozen=True)
class Addition:
    """What ours adds to theirs, which runs before it in the same new interpreter.

    Args:
        name: what is added.
        ours: the statement with d2ldev.
        theirs: the framework's own statement, which comes first.
        aim: the part of their time that ours should take at most.
    """

    name: str
    ours: str
    theirs: str
    aim: float
    note: str = ""


Row = Comparison | ProcessComparison | Addition


@dataclass(frozen=True)
class Result:
    """The result of one comparison; ``None`` where it could not run.

    Args:
        ours, theirs: the medians, in seconds for one execution.
        value: the number that is compared with the aim, in ``unit``.
    """

    name: str
    ours_statement: str
    theirs_statement: str
    ours: float | None
    theirs: float | None
    value: float | None
    unit: str
    aim: float | None
    note: str

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None if there is no aim, or nothing was measured."""
        if self.value is None or self.aim is None:
            return None
        return self.value <= self.aim


def measure(row: Row) -> Result:
    """Run one comparison."""
    if isinstance(row, ProcessComparison):
        ours, theirs = _measure_in_turn(
            lambda: process(row.ours)[0], lambda: process(row.theirs)[0], _PROCESS_ROUNDS
        )
        return _result(row, ours, theirs, (ours - theirs) * 1000, "ms more")
    if isinstance(row, Addition):
        program = _STAGES.format(theirs=row.theirs, ours=row.ours)
        samples = [json.loads(process(program)[1]) for _ in range(_PROCESS_ROUNDS)]
        theirs, ours = (median(sample) for sample in zip(*samples, strict=True))
        return _result(row, ours, theirs, ours / theirs, "of theirs")
    if not row.theirs:
        return _result(row, None, None, None, "ratio")
    ours_in_context = sampler(row.ours, row.names, row.within, row.finish)
    plain = sampler(row.theirs, row.names, nullcontext, row.finish)
    ours, theirs = _measure_in_turn(ours_in_context, plain, _ROUNDS)
    return _result(row, ours, theirs, ours / theirs, "ratio")


def _result(
    row: Row, ours: float | None, theirs: float | None, value: float | None, unit: str
) -> Result:
    return Result(row.name, row.ours, row.theirs, ours, theirs, value, unit, row.aim, row.note)


def _measure_in_turn(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Return the medians of both, measured in turn."""
    first, second = in_turn((ours, theirs), rounds)
    return median(first), median(second)


def in_turn(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Return the samples of each side, of which every round takes one, in changing order."""
    for side in sides:
        side()  # the first time of each is not like the others
    samples: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        order = range(len(sides))
        for which in order if number % 2 else reversed(order):
            samples[which].append(sides[which]())
    return samples


def sampler(
    statement: str,
    names: Mapping[str, Any],
    within: Callable[[], AbstractContextManager[Any]],
    finish: Callable[[], object],
) -> Callable[[], float]:
    """Return a function that times one execution, as the mean of as many as make a sample."""
    timer = Timer(statement, globals=dict(names))

    def sample(number: int) -> float:
        with within():
            start = time.perf_counter()
            timer.timeit(number)
            finish()
            return time.perf_counter() - start

    sample(3)  # the first executions compile, for example, and do not count
    number = 1
    while sample(number) < _SECONDS_PER_SAMPLE:
        number *= 2
    return lambda: sample(number) / number


def process(program: str) -> tuple[float, str]:
    """Return the seconds that a program takes in an interpreter of its own, and its output."""
    command = [sys.executable, "-c", program]
    # With bytecode, as every installed package has it: else the compiling of ours is measured.
    # Without virtual GPUs, which a framework that was used before d2ldev could not make any more.
    left_out = ("PYTHONDONTWRITEBYTECODE", "D2LDEV_VIRTUAL_GPUS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    start = time.perf_counter()
    done = subprocess.run(  # noqa: S603
        command, check=True, capture_output=True, text=True, env=environment
    )
    return time.perf_counter() - start, done.stdout
