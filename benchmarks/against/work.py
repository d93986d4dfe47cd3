"""A piece of work, the ways in which others do it, and how both are measured.

Every way of one piece of work is timed in each round, in changing order, in the same process; a
program that is timed as a whole has an interpreter of its own. What is reported is the median of
the rounds' ratios, and the quartiles between which half of them lie.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from measure import Result, in_turn, process, sampler

NATIVE = "native"
"""The framework's own call, which is installed wherever the framework is."""

AIM = 1.0
"""Of the time of a peer: d2ldev is to be ahead of each of them."""

AIM_OF_NOTHING = 1.0
AIM_OF_WORK = 1.05
"""Of the time of the framework's own call, where there is nothing to do and where there is."""

CALLS, LONG_CALLS, PROGRAMS = 101, 21, 5
"""Rounds: of calls, of calls that take milliseconds, and of programs."""


_NEAR = "the aim lies between the quartiles of the rounds"


@dataclass(frozen=True)
class Peer:
    """A library that does some of the same.

    Args:
        name: what the tables call it.
        module: what is imported.
        install: what ``pip install`` takes.
    """

    name: str
    module: str
    install: str

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported; it is not imported for that."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of the package that the module is in
            return False


PEERS = {
    peer.name: peer
    for peer in (
        Peer("array-api-compat", "array_api_compat", "array-api-compat"),
        Peer("accelerate", "accelerate", "accelerate"),
        Peer("Lightning Fabric", "lightning_fabric", "lightning-fabric"),
        Peer("Keras 3", "keras", "keras"),
        Peer("TensorLy", "tensorly", "tensorly"),
        Peer("einops", "einops", "einops"),
        Peer("safetensors", "safetensors", "safetensors"),
        Peer("orbax", "orbax.checkpoint", "orbax-checkpoint"),
    )
}


@dataclass(frozen=True)
class Work:
    """A piece of work, and a statement for each way to do it.

    Args:
        name: what is done.
        ours: the statement with d2ldev.
        theirs: the name of a peer, or ``NATIVE`` -> its statement. Who cannot do the work is left
            out.
        aim: the part of the native call's time that ours should take at most.
        names: the names that the statements use.
        peers: the names that only a peer's statement uses, by the peer's name. They are asked
            for if it is installed.
        reasons: why ours takes longer than what is named, where it does.
        rounds: how often all of them are timed.
        finish: called at the end of each sample, for example to wait for the device.
        is_program: whether each statement is a program, for an interpreter of its own.
    """

    name: str
    ours: str
    theirs: Mapping[str, str]
    aim: float = AIM_OF_WORK
    names: Mapping[str, Any] = field(default_factory=dict)
    peers: Mapping[str, Callable[[], Mapping[str, Any]]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    rounds: int = CALLS
    finish: Callable[[], object] = lambda: None
    is_program: bool = False


@dataclass(frozen=True)
class Against(Result):
    """The result of one comparison with one other.

    Args:
        against: the name of the peer, or ``NATIVE``, with the loop where there are several.
        spread: the quartiles of the ratios of the rounds.
        install: what to install if the peer is not.
    """

    against: str = NATIVE
    spread: tuple[float, float] | None = None
    install: str = ""


def measure(work: Work) -> Iterator[Against]:
    """Time every way of a piece of work whose library is installed."""
    ways = {NATIVE: work.theirs[NATIVE]} if NATIVE in work.theirs else {}
    ways |= {name: way for name, way in work.theirs.items() if _is_installed(name)}
    names = dict(work.names)
    for name in ways:
        names |= work.peers[name]() if name in work.peers else {}
    sides = [_time(work, statement, names) for statement in (work.ours, *ways.values())]
    ours, *theirs = in_turn(sides, work.rounds)
    samples = dict(zip(ways, theirs, strict=True))
    for name, statement in work.theirs.items():
        aim = work.aim if name == NATIVE else AIM
        what = (work.name, work.ours, statement)
        if name in samples:
            reason = work.reasons.get(name, "")
            yield compare(what, name, (ours, samples[name]), aim, reason)
        else:
            yield not_installed(what, name, aim)


def compare(
    what: tuple[str, str, str],
    against: str,
    samples: tuple[list[float], list[float]],
    aim: float,
    reason: str,
) -> Against:
    """Return the result of as many samples of ours and of theirs, taken in turn.

    Args:
        what: the name of the work, our statement and theirs.
        against: the name of the peer.
        samples: the seconds of each round.
        aim: the ratio that should not be exceeded.
        reason: why it is, which is told where it is; empty if nothing is known but how near it is.
    """
    ratios = [ours / theirs for ours, theirs in zip(*samples, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    times = median(samples[0]), median(samples[1])
    note = ""
    if middle > aim:
        note = reason or (_NEAR if low <= aim else "")
    return Against(*what, *times, middle, "ratio", aim, note, against, (low, high))


def not_installed(what: tuple[str, str, str], peer: str, aim: float) -> Against:
    """Return the result of a comparison that could not run."""
    note = f"not installed: pip install {PEERS[peer].install}"
    return Against(*what, None, None, None, "ratio", aim, note, peer, install=PEERS[peer].install)


def sort_missed_first(results: list[Against]) -> list[Against]:
    """Return the results whose aim is missed before the others, each in their order."""
    return sorted(results, key=lambda result: result.met is not False)


def _is_installed(name: str) -> bool:
    return name not in PEERS or PEERS[name].is_installed


def _time(work: Work, statement: str, names: Mapping[str, Any]) -> Callable[[], float]:
    if work.is_program:
        return lambda: process(statement)[0]
    return sampler(statement, names, nullcontext, work.finish)
