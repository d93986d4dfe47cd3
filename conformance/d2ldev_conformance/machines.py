"""Two machines, as two network namespaces with addresses of their own and a cable between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

LIMIT = 240
"""Seconds after which a launch that has not ended fails the test: four processes share cores."""
ADDRESSES = ("192.168.77.1", "192.168.77.2")
"""Larger than 127.0.1.1: of two addresses gloo lets the smaller one listen."""
PORT = 29500
"""Where the process with rank 0 listens."""
# On its own machine the name of the first one is a loopback address, as Debian's installer has it.
_HOSTS = ("127.0.1.1 first", f"{ADDRESSES[0]} first")
# What ``ip netns exec`` runs has mounts of its own.
_WITH_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'


def ip(*arguments: object) -> tuple[int, str]:
    """Run the command ``ip``; its status and what was wrong."""
    done = subprocess.run(  # noqa: S603
        ["ip", *map(str, arguments)],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.strip()


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Yield the names of two namespaces with ``ADDRESSES``; skip if they cannot be made."""
    names = [f"d2ldev-{os.getpid()}-{i}" for i in (0, 1)]
    cables = [f"d2l{os.getpid()}{end}"[:15] for end in "ab"]
    try:
        made: list[tuple[str, ...]] = []
        for name in names:
            made += [("netns", "add", name), ("-n", name, "link", "set", "lo", "up")]
        made.append(("link", "add", cables[0], "type", "veth", "peer", "name", cables[1]))
        for i, (name, cable) in enumerate(zip(names, cables, strict=True)):
            made += [
                ("link", "set", cable, "netns", name),
                ("-n", name, "link", "set", cable, "name", "cable"),
                ("-n", name, "address", "add", f"{ADDRESSES[i]}/24", "dev", "cable"),
                ("-n", name, "link", "set", "cable", "up"),
            ]
        for arguments in made:
            try:
                status, problem = ip(*arguments)
            except FileNotFoundError:
                status, problem = 1, "there is no command ip"
            if status:
                pytest.skip(f"no namespace can be made here: {problem}")
        yield names
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                ip("netns", "delete", name)


def of_machine(rank: int, hosts: Path | None = None) -> list[object]:
    """Return the options with which a machine launches; ``hosts`` as ``launch_on`` takes it."""
    host = ADDRESSES[0] if hosts is None else "first"
    return ["--nodes", 2, "--node-rank", rank, "--address", f"{host}:{PORT}"]


def launch_on(
    machine: str,
    rank: int,
    launch: Sequence[str],
    environment: Mapping[str, str],
    hosts: Path | None = None,
) -> subprocess.Popen[str]:
    """Start a launch on one of the machines.

    Args:
        machine: the name of its namespace.
        rank: its number.
        launch: the command, with what ``of_machine`` gives.
        environment: its variables.
        hosts: a folder for hosts files, which give the first machine a name; with None the others
            use its address.
    """
    launch = list(launch)
    if hosts is not None:
        path = hosts / f"hosts{rank}"
        path.write_text(f"127.0.0.1 localhost\n{_HOSTS[rank]}\n")
        launch = ["sh", "-c", _WITH_HOSTS, str(path), *launch]
    return subprocess.Popen(  # noqa: S603
        ["ip", "netns", "exec", machine, *launch],  # noqa: S607
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
