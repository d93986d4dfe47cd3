"""What rank 0 knows of all processes: how far each one is, and whether they do the same."""

from __future__ import annotations

from typing import Any, NamedTuple


class Failure(NamedTuple):
    """Why several processes cannot go on together.

    Args:
        problem: in words.
        rank: of the process that is lost; None where all are there and do not do the same.
    """

    problem: str
    rank: int | None = None


class _Entry(NamedTuple):
    """One thing that all processes do; ``rank`` was the first to do it."""

    label: str
    content: str
    rank: int
    values: dict[int, Any]


class Doings:
    """The things that all processes do, one after the other, in the same order.

    Args:
        size: how many processes there are.

    Attributes:
        left: the ranks of those that have ended.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lengths = [0] * size
        self.left: set[int] = set()
        # By number, as long as not all processes have done it.
        self._entries: dict[int, _Entry] = {}

    def add(self, rank: int, label: str, content: str, value: Any = None) -> list[Any] | None:
        """Note the next action of a process.

        Args:
            rank: of the process.
            label: the name of the action.
            content: what has to be the same in all processes.
            value: for the other processes.

        Returns:
            The values of all processes, as soon as all have done it; else None.

        Raises:
            DifferentError: if another process does something else at this place.
        """
        number = self._lengths[rank]
        self._lengths[rank] += 1
        entry = self._entries.setdefault(number, _Entry(label, content, rank, {}))
        if entry.label != label:
            raise DifferentError(
                f"rank {entry.rank} is at {entry.label}, and rank {rank} at {label}"
            )
        if entry.content != content:
            raise DifferentError(
                f"at {label}, rank {entry.rank} has {entry.content[:500]}, and rank {rank} has "
                f"{content[:500]}"
            )
        entry.values[rank] = value
        self._check_left()
        if len(entry.values) < self._size:
            return None
        del self._entries[number]
        return [entry.values[rank] for rank in range(self._size)]

    def leave(self, rank: int) -> None:
        """Note that a process has ended, and does nothing more.

        Raises:
            DifferentError: if another process has gone on to something that it has not done.
        """
        self.left.add(rank)
        self._check_left()

    def _check_left(self) -> None:
        for rank in sorted(self.left):
            length = self._lengths[rank]
            if length < max(self._lengths):
                entry = self._entries[length]
                raise DifferentError(describe_early_end(rank, entry.rank, entry.label))


class DifferentError(Exception):
    """Two processes do not do the same."""


def describe_early_end(rank: int, other: int, label: str) -> str:
    """Return the words for a process that has ended before another one, which is at ``label``."""
    return f"rank {rank} has ended, and rank {other} is at {label}"
