"""``Group``: the processes of a launch, as a backend and a program see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from d2ldev.errors import D2LDevError


class Group(ABC):
    """The processes of a launch, which go on together or end together.

    Attributes:
        rank, size: the number of this process, from 0, and how many there are.
        local_rank: its number on this machine.
        hosts: the names of the machines, by rank.
        addresses: ``"host:port"`` by rank, where the framework's engine may listen.
        timeout: the seconds without a heartbeat after which a process is lost.
    """

    rank: int
    size: int
    local_rank: int
    hosts: Sequence[str]
    addresses: Sequence[str]
    timeout: float

    @abstractmethod
    def mark(self, label: str, content: str = "") -> None:
        """Announce the next action of this process, without waiting for the others.

        Args:
            label: its name, such as ``"batch 3 of epoch 0"``.
            content: what has to be the same in all processes.

        Raises:
            PeerLostError: if a process is lost.
            UnsupportedValueError: if the processes do not do the same.
        """

    @abstractmethod
    def gather(self, label: str, value: Any = None, content: str = "") -> list[Any]:
        """Wait for all processes, and return the values of all by rank.

        Args:
            label, content: see ``mark``.
            value: what JSON can hold.

        Returns:
            The value of each process, by rank.

        Raises:
            PeerLostError: if a process is lost before it has come.
            UnsupportedValueError: if the processes do not do the same.
        """

    @abstractmethod
    def stops(self, is_wanted: bool) -> bool:
        """Return whether all processes stop here, because one of them wants to.

        All processes call it at the same places. It waits only after a process wants to stop. Then
        all stop at one place: the next one of the process that is ahead of the others.

        Args:
            is_wanted: whether this process wants it.

        Raises:
            PeerLostError: if a process is lost.
        """

    @abstractmethod
    def renew_stop(self) -> None:
        """Forget who has wanted to stop; called in all processes before they gather something."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the processes cannot go on together."""

    @abstractmethod
    def work(self) -> AbstractContextManager[None]:
        """Return a block that runs in all processes; if one of them fails, all end it.

        If a process was lost, an engine's own error becomes an error of the group. If the engine
        waits forever, the process ends with exit status 1, and the error on its standard error.

        Raises:
            PeerLostError: if another process fails, or is lost.
        """

    @abstractmethod
    def give_up(self, problem: str) -> None:
        """End the work of all processes, because this one failed; any thread may call it.

        Args:
            problem: the reason.
        """

    @abstractmethod
    def make_lost_error(self, rank: int, problem: str) -> D2LDevError:
        """Return the error that the other processes raise after one of them failed.

        Args:
            rank: the number of the process that failed.
            problem: the reason.
        """

    @abstractmethod
    def leave(self) -> None:
        """Leave the group; called when the process ends.

        Its thread ends soon after, and closes the connections.
        """
