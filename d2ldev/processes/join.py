"""How the processes of a launch find each other: all of them call rank 0."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from d2ldev.errors import D2LDevError, PeerLostError, UnsupportedValueError, shown
from d2ldev.locks import Lock
from d2ldev.processes.group import Group, Member
from d2ldev.processes.wire import Connection
from d2ldev.settings import Peers

PATIENCE = 60.0
"""How many seconds the processes wait for each other in the beginning, if ``timeout`` is less."""

_lock = Lock()
_joined: Group | None = None


def joined() -> Group | None:
    """Return the group that this process has joined; None before that."""
    return _joined


def join(peers: Peers, program: dict[str, str], timeout: float) -> Group:
    """Return the group of this process, which it joins once.

    Args:
        peers: what the launcher said.
        program: what has to be the same in all processes, by name, such as versions.
        timeout: how many seconds a process may give no sign.

    Raises:
        PeerLostError: if the others do not come in time, or rank 0 does not answer.
        UnsupportedValueError: if the port is in use, or another program meets this one.
    """
    global _joined
    with _lock:
        if _joined is None:
            program = {**program, "program": os.path.basename(sys.argv[0])}
            program["launch"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
            hello = {"d2ldev": program, "rank": peers.rank, "size": peers.world_size}
            hello |= {"host": socket.gethostname(), "port": free_port()}
            deadline = time.monotonic() + max(timeout, PATIENCE)
            meet = _received if peers.rank == 0 else _called
            _joined = meet(peers, hello, timeout, deadline)
        return _joined


def _attempted(peers: Peers) -> str:
    return f"meet {peers.world_size} processes at {peers.address}:{peers.port}"


def free_port() -> int:
    """Return the number of a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# -- rank 0 ---------------------------------------------------------------------------------------


def _received(peers: Peers, hello: dict[str, Any], timeout: float, deadline: float) -> Group:
    """Return the group of rank 0, when all others have called."""
    try:
        # Other machines need not reach what stays on this one.
        is_local = peers.address == "localhost" or peers.address.startswith("127.")
        server = socket.create_server((peers.address if is_local else "", peers.port))
    except OSError as error:
        raise UnsupportedValueError(
            _attempted(peers),
            f"port {peers.port} is in use here: {error.strerror}",
            "another port: d2ldev launch --address host:29501, or MASTER_PORT=29501",
        ) from error
    connections: dict[int, Connection] = {}
    hellos = {0: hello}
    try:
        with server:
            while len(hellos) < peers.world_size:
                left = deadline - time.monotonic()
                server.settimeout(max(left, 0.01))
                try:
                    connection = Connection(server.accept()[0], timeout)
                except TimeoutError as error:
                    raise _missing(peers, hellos) from error
                _admit(peers, connection, connections, hellos)
        members = [
            Member(hellos[rank]["host"], f"{_address(peers, connections, rank)}:{at['port']}")
            for rank, at in sorted(hellos.items())
        ]
        for connection in connections.values():
            connection.send({"welcome": members})
    except D2LDevError as error:
        for connection in connections.values():
            _refuse(connection, error.problem)
        raise
    except OSError as error:
        raise _missing(peers, hellos) from error
    return Group(peers, members, connections, timeout)


def _address(peers: Peers, connections: dict[int, Connection], rank: int) -> str:
    return connections[rank].there if rank else peers.address


def _admit(
    peers: Peers,
    connection: Connection,
    connections: dict[int, Connection],
    hellos: dict[int, dict[str, Any]],
) -> None:
    """Take a process that calls; a stranger is left out.

    Raises:
        UnsupportedValueError: if it belongs to another program, or has other versions.
    """
    try:
        hello = connection.receive_one()
        rank, program, host = hello["rank"], hello["d2ldev"], str(hello["host"])
        is_whole = type(rank) is int and isinstance(program, dict) and type(hello["port"]) is int
    except (OSError, KeyError):
        is_whole = False
    if not is_whole:
        connection.close()
        return
    problem = ""
    if hello["size"] != peers.world_size:
        problem = f"rank 0 has WORLD_SIZE={peers.world_size}, and rank {rank} {hello['size']}"
    elif program != hellos[0]["d2ldev"]:
        problem = _difference(hellos[0]["d2ldev"], program, rank)
    elif rank in hellos or not 0 < rank < peers.world_size:
        problem = f"rank {rank} came twice: the second one from {host}"
    if problem:
        _refuse(connection, problem)
        raise UnsupportedValueError(_attempted(peers), problem, _ONE_PROGRAM)
    connections[rank], hellos[rank] = connection, hello


_ONE_PROGRAM = (
    "the same program and versions on all machines, each with a --node-rank of its own, and for "
    "each launch a port of its own: d2ldev launch --address host:29501"
)


def _difference(first: dict[str, str], other: dict[str, str], rank: int) -> str:
    names = [name for name in first if first[name] != other.get(name)] or list(other)
    return ", ".join(
        f"rank 0 has {name} {shown(first.get(name))}, and rank {rank} {shown(other.get(name))}"
        for name in names
    )


def _refuse(connection: Connection, problem: str) -> None:
    with suppress(OSError):  # it may be gone
        connection.send({"refused": problem})
    connection.close()


def _missing(peers: Peers, hellos: dict[int, dict[str, Any]]) -> PeerLostError:
    missing = [str(rank) for rank in range(peers.world_size) if rank not in hellos]
    return PeerLostError(
        _attempted(peers),
        f"of ranks 0 to {peers.world_size - 1} there came no {', '.join(missing[:20])}",
        "start d2ldev launch on all machines, with --nodes and a --node-rank of each",
    )


# -- all others -----------------------------------------------------------------------------------


def _called(peers: Peers, hello: dict[str, Any], timeout: float, deadline: float) -> Group:
    """Return the group of another process, when rank 0 has answered."""
    while True:
        left = deadline - time.monotonic()
        try:
            place = (peers.address, peers.port)
            connected = socket.create_connection(place, max(left, 0.01))
            if connected.getsockname() != connected.getpeername():
                break
            # Nobody listened, and the port that the system chose for the call was the one called.
            connected.close()
        except OSError as error:
            if time.monotonic() > deadline - 0.1:
                raise _silent(peers, error) from error
            time.sleep(0.1)  # rank 0 may not have begun yet
    connection = Connection(connected, timeout)
    try:
        connection.send(hello)
        connection.wait(deadline - time.monotonic())
        answer = connection.receive_one()
    except OSError as error:
        raise _silent(peers, error) from error
    connection.wait(timeout)
    if "refused" in answer:
        raise UnsupportedValueError(_attempted(peers), str(answer["refused"]), _ONE_PROGRAM)
    members = [Member(*member) for member in answer["welcome"]]
    return Group(peers, members, {0: connection}, timeout)


def _silent(peers: Peers, error: OSError) -> PeerLostError:
    return PeerLostError(
        _attempted(peers),
        f"rank 0 does not answer: {error.strerror or error}",
        "the machine of --node-rank 0 as --address, and a port that it lets in",
    )
