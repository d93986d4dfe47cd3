"""How the processes of a launch find each other: all of them call rank 0."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from contextlib import suppress
from random import SystemRandom
from typing import Any

from d2ldev.contract.group import Group
from d2ldev.distributed.group import GRACE, PeerGroup
from d2ldev.distributed.wire import Connection
from d2ldev.errors import D2LDevError, PeerLostError, UnsupportedValueError, quote
from d2ldev.locks import Lock
from d2ldev.settings import Peers

PATIENCE = 60.0
"""How many seconds the processes wait for each other in the beginning, if ``timeout`` is less."""

# How many bytes a process has to say who it is.
_LONGEST = 1 << 16

# Below those that Linux, macOS and Windows give away by themselves, and Kubernetes' own.
_PORTS = range(20000, 30000)
_DRAWS = 100

_lock = Lock()
_joined: tuple[Group, dict[str, str]] | None = None


def find_group() -> Group | None:
    """Return the group that this process has joined; None before that."""
    return None if _joined is None else _joined[0]


def join(peers: Peers, program: dict[str, str], timeout: float) -> Group:
    """Return the group of this process, which it joins once.

    Args:
        peers, program, timeout: see ``meet``.

    Raises:
        PeerLostError: see ``meet``.
        UnsupportedValueError: see ``meet``; or if it has joined with another program.
    """
    global _joined
    with _lock:
        if _joined is None:
            _joined = meet(peers, program, timeout), program
        group, before = _joined
        if before != program:
            raise UnsupportedValueError(
                f"train in {peers.world_size} processes with {_in_words(program, before)}",
                f"this process has joined the others with {_in_words(before, program)}",
                "one backend in each launch",
            )
        return group


def meet(peers: Peers, program: dict[str, str], timeout: float) -> Group:
    """Return a new group, as soon as all processes are there.

    Args:
        peers: the message of the launcher.
        program: what has to be the same in all processes, by name, such as versions.
        timeout: how many seconds a process may give no sign.

    Raises:
        PeerLostError: if the others do not come in time, or rank 0 does not answer.
        UnsupportedValueError: if the port is in use, or another program meets this one.
    """
    program = {**program, "program": os.path.basename(sys.argv[0])}
    program["launch"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    hello = {"d2ldev": program, "rank": peers.rank, "size": peers.world_size}
    hello |= {"host": socket.gethostname(), "port": free_port()}
    call = _receive_all if peers.rank == 0 else _call
    return call(peers, hello, timeout, max(timeout, PATIENCE))


def _describe_attempt(peers: Peers) -> str:
    return f"meet {peers.world_size} processes at {peers.address}:{peers.port}"


def free_port() -> int:
    """Return the number of a free port.

    Whoever is to listen there imports a framework first. Meanwhile the system could give one of its
    own choice to another program.
    """
    draw = SystemRandom()  # a seed of the program's may repeat its own random numbers
    for _ in range(_DRAWS):
        if _is_free(port := draw.choice(_PORTS)):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False


# -- rank 0 ---------------------------------------------------------------------------------------


def _receive_all(peers: Peers, hello: dict[str, Any], timeout: float, patience: float) -> Group:
    """Return the group of rank 0, when all others have called."""
    calls = _Calls(peers, hello, timeout)
    try:
        with _listen(peers) as server:
            calls.take(server, time.monotonic() + patience)
    except D2LDevError as error:
        for connection in (*calls.connections.values(), *calls.unknown):
            _refuse(connection, error)
        raise
    finally:
        for connection in calls.unknown:
            connection.close()
    members = calls.members()
    for connection in calls.connections.values():
        with suppress(OSError):  # one that is gone already is noted by the group
            connection.send({"welcome": members})
    return PeerGroup(peers, members, calls.connections, timeout)


def _listen(peers: Peers) -> socket.socket:
    try:
        # Other machines need not reach what stays on this one.
        is_local = peers.address == "localhost" or peers.address.startswith("127.")
        server = socket.create_server((peers.address if is_local else "", peers.port))
    except OSError as error:
        raise UnsupportedValueError(
            _describe_attempt(peers),
            f"rank 0 cannot listen at port {peers.port} here: {error.strerror}",
            "another port: d2ldev launch --address host:29501, or MASTER_PORT=29501",
        ) from error
    server.setblocking(False)
    return server


def _is_loopback(host: str) -> bool:
    """Return whether a name stands for an address here that no other machine reaches."""
    with suppress(OSError, UnicodeError):  # it may be a name for the others alone
        return socket.gethostbyname(host).startswith("127.")
    return False


class _Calls:
    """Those who have called rank 0.

    Args:
        peers, hello: of rank 0.
        timeout: see ``Connection``.

    Attributes:
        connections: by rank.
        unknown: of those who have not said who they are. Strangers may be among them, which say
            anything or nothing.
    """

    def __init__(self, peers: Peers, hello: dict[str, Any], timeout: float) -> None:
        self.connections: dict[int, Connection] = {}
        self._peers, self._timeout = peers, timeout
        self._hellos = {0: hello}
        self.unknown: set[Connection] = set()

    def take(self, server: socket.socket, deadline: float) -> None:
        """Take calls until all have called.

        Raises:
            PeerLostError: if they have not, until the deadline.
            UnsupportedValueError: if one belongs to another program, or has other versions.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while len(self._hellos) < self._peers.world_size:
                found = selector.select(max(deadline - time.monotonic(), 0))
                if time.monotonic() > deadline:
                    raise self._peers_lost()
                for key, _ in found:
                    if key.fileobj is server:
                        with suppress(OSError):  # the caller is gone
                            connection = Connection(server.accept()[0], self._timeout)
                            self.unknown.add(connection)
                            selector.register(connection, selectors.EVENT_READ)
                    elif not self._hear(key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]

    def _hear(self, connection: Connection) -> bool:
        """Read the available bytes; return whether it is one of the processes, or may still be."""
        try:
            for message in connection.receive(_LONGEST):
                return connection in self.unknown and self._admit(connection, message)
        except OSError as error:
            for rank, known in self.connections.items():
                if known is connection:
                    raise PeerLostError(
                        _describe_attempt(self._peers),
                        f"rank {rank} on {self._hellos[rank]['host']} is lost: {error}",
                        _TOGETHER,
                    ) from error
            self.unknown.discard(connection)
            return False
        return True

    def _admit(self, connection: Connection, hello: dict[str, Any]) -> bool:
        self.unknown.discard(connection)
        kinds = {"d2ldev": dict, "rank": int, "size": int, "host": str, "port": int}
        if any(type(hello.get(name)) is not kind for name, kind in kinds.items()):
            return False
        rank, size = hello["rank"], hello["size"]
        program, own = hello["d2ldev"], self._hellos[0]["d2ldev"]
        problem = ""
        if size != self._peers.world_size:
            problem = f"rank 0 has WORLD_SIZE={self._peers.world_size}, and rank {rank} {size}"
        elif program != own:
            problem = f"rank 0 has {_in_words(own, program)}, and rank {rank} "
            problem += _in_words(program, own)
        elif rank in self._hellos or not 0 < rank < size:
            problem = f"rank {rank} came twice: the second one from {hello['host'][:100]}"
        if problem:
            error = UnsupportedValueError(_describe_attempt(self._peers), problem, _ONE_PROGRAM)
            _refuse(connection, error)
            raise error
        self.connections[rank], self._hellos[rank] = connection, hello
        return True

    def members(self) -> list[tuple[str, str]]:
        """Return the name of the machine and the address of each process, by rank."""
        own, calls = self._peers.address, dict(sorted(self.connections.items()))
        outside = [call.here for call in calls.values() if not _is_loopback(call.there)]
        # On its own machine the name of rank 0 may stand for 127.0.1.1, which others cannot reach.
        if outside and _is_loopback(own):
            own = outside[0]
        hosts = {0: own}
        for rank, call in calls.items():
            hosts[rank] = own if outside and _is_loopback(call.there) else call.there
        return [
            (hello["host"], f"{hosts[rank]}:{hello['port']}")
            for rank, hello in sorted(self._hellos.items())
        ]

    def _peers_lost(self) -> PeerLostError:
        size = self._peers.world_size
        missing = [str(rank) for rank in range(size) if rank not in self._hellos]
        return PeerLostError(
            _describe_attempt(self._peers),
            f"of ranks 0 to {size - 1}, these have not come: {', '.join(missing[:20])}",
            _TOGETHER,
        )


_TOGETHER = "start d2ldev launch on all machines, with --nodes and a --node-rank of each"
_ONE_PROGRAM = (
    "the same program and versions on all machines, each with a --node-rank of its own, and for "
    "each launch a port of its own: d2ldev launch --address host:29501"
)


def _in_words(program: dict[str, Any], other: dict[str, Any]) -> str:
    """Return what another program has not."""
    names = [name for name in sorted({*program, *other}) if program.get(name) != other.get(name)]
    return ", ".join(f"{name[:100]} {quote(program.get(name))}" for name in names[:20])


def _refuse(connection: Connection, error: D2LDevError) -> None:
    with suppress(OSError):  # it may be gone
        connection.send({"refused": error.problem, "lost": isinstance(error, PeerLostError)})
    connection.close()


# -- all others -----------------------------------------------------------------------------------


def _call(peers: Peers, hello: dict[str, Any], timeout: float, patience: float) -> Group:
    """Return the group of another process, when rank 0 has answered."""
    connection = Connection(_connect(peers, time.monotonic() + patience), timeout)
    try:
        connection.send(hello)
        # Rank 0 is there, and tells by its own clock who has not come.
        answer = connection.receive_one(time.monotonic() + patience + GRACE)
        if "refused" in answer:
            problem = str(answer["refused"])
            if answer.get("lost"):
                raise PeerLostError(_describe_attempt(peers), problem, _TOGETHER)
            raise UnsupportedValueError(_describe_attempt(peers), problem, _ONE_PROGRAM)
        members = [(str(host), str(address)) for host, address in answer["welcome"]]
    except D2LDevError:
        connection.close()
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        connection.close()
        raise _first_lost(peers, error) from error
    return PeerGroup(peers, members, {0: connection}, timeout)


def _connect(peers: Peers, deadline: float) -> socket.socket:
    while True:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            connected = socket.create_connection((peers.address, peers.port), left)
            if connected.getsockname() != connected.getpeername():
                return connected
            # Nobody listened, and the port that the system chose for the call was the one called.
            connected.close()
        except (OSError, UnicodeError) as error:  # the name of a host may be no name at all
            if time.monotonic() > deadline - 0.1:
                raise _first_lost(peers, error) from error
        time.sleep(0.1)  # rank 0 may not have begun yet


def _first_lost(peers: Peers, error: Exception) -> PeerLostError:
    problem = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, (OSError, UnicodeError)):
        problem = "another program listens there"
    return PeerLostError(
        _describe_attempt(peers),
        f"rank 0 does not answer at {peers.address}:{peers.port}, where all meet: {problem}",
        "the machine of --node-rank 0 as --address, and a port that it lets in",
    )
