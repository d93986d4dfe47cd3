"""``launch``: start the processes of one machine, show what they print, and end them together.

The contract with the program is torchrun's, so that torchrun, Slurm, Ray or Kubernetes may start it
instead: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

from d2ldev.errors import UnsupportedValueError, shown

# How many seconds the others have to end by themselves, and after SIGTERM.
PATIENCE = 5.0

_PERIOD = 0.05


class Launch(NamedTuple):
    """What is to be started on this machine.

    Args:
        command: the program and its arguments.
        processes: how many on this machine.
        nodes: how many machines there are, all with as many processes.
        node_rank: the number of this machine, from 0.
        address: ``"host:port"`` of machine 0; empty is a free port of this one.
        restarts: how often all processes are started again after one has failed.
        timeout: how many seconds a process may give no sign; None is 60.
    """

    command: Sequence[str]
    processes: int
    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    restarts: int = 0
    timeout: float | None = None

    def checked(self) -> Launch:
        """Return it.

        Raises:
            UnsupportedValueError: if it is contradictory.
        """
        attempted = f"launch on {self.nodes} machines"
        if self.node_rank >= self.nodes:
            raise UnsupportedValueError(
                attempted,
                f"--node-rank is {self.node_rank}, and they are numbered from 0",
                f"--nodes {self.node_rank + 1}, or a smaller --node-rank",
            )
        if self.nodes > 1 and not self.address:
            raise UnsupportedValueError(
                attempted, "nobody knows where machine 0 is", "--address host:29500"
            )
        host, _, port = self.address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65535
        if self.address and not (host and is_port):
            raise UnsupportedValueError(
                attempted, f"{shown(self.address)} is no address", "--address host:29500"
            )
        return self

    def variables(self) -> list[dict[str, str]]:
        """Return the environment variables of each process."""
        host, _, port = (self.address or f"127.0.0.1:{_free_port()}").rpartition(":")
        common = {
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            # What a process prints is shown at once.
            "PYTHONUNBUFFERED": "1",
        }
        if self.timeout is not None:
            common["D2LDEV_PEER_TIMEOUT"] = str(self.timeout)
        # Processes that each use all cores are slower than one.
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        first = self.node_rank * self.processes
        return [
            {**common, "RANK": str(first + i), "LOCAL_RANK": str(i)} for i in range(self.processes)
        ]


def launch(request: Launch) -> int:
    """Run a program on several processes, until all have ended.

    Returns:
        0, or the exit status of the process that failed first: 128 and the signal's number, if one
        has ended it.
    """
    with _signals_noted() as received:
        for left in range(request.restarts, -1, -1):
            status = _run(request, received)
            if not status or received:
                break
            if left:
                _say(f"a process failed with status {status}: all are started again, {left} left")
    return 128 + received[0] if received else status


def _run(request: Launch, received: list[int]) -> int:
    processes: dict[int, subprocess.Popen[bytes]] = {}
    readers: list[threading.Thread] = []
    try:
        for variables in request.variables():
            rank = int(variables["RANK"])
            process = _started(request.command, variables)
            processes[rank] = process
            _say(f"rank {rank} is process {process.pid} on {socket.gethostname()}")
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                reader = threading.Thread(target=_show, args=(stream, target, rank), daemon=True)
                reader.start()
                readers.append(reader)
        return _watch(processes, received)
    finally:
        _end(processes.values())
        for reader in readers:
            reader.join(PATIENCE)


def _started(command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    # ps-lite, the engine of MXNet, takes a PORT for its own.
    environment = {name: value for name, value in os.environ.items() if name != "PORT"}
    return subprocess.Popen(  # noqa: S603  # the user's own program
        command,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that what it starts can be ended with it
        preexec_fn=_end_with_parent if _LIBC is not None else None,
    )


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Let the kernel end this process when the launcher is killed."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _show(stream: IO[bytes], target: IO[str], rank: int) -> None:
    """Show the lines of a process, with its rank before each."""
    for line in stream:
        text = line.decode(errors="replace").rstrip("\r\n")
        with suppress(OSError, ValueError):  # nobody reads, and the process is not to wait
            target.write(f"[rank {rank}] {text}\n")
            target.flush()
    stream.close()


def _watch(processes: dict[int, subprocess.Popen[bytes]], received: list[int]) -> int:
    """Wait until all processes have ended, or some time after one has failed."""
    status, deadline = 0, float("inf")
    while time.monotonic() < deadline and not received:
        states = {rank: process.poll() for rank, process in processes.items()}
        if not status:
            for rank, code in states.items():
                if code:
                    status = code if code > 0 else 128 - code
                    _say(f"rank {rank} failed with status {status}")
                    deadline = time.monotonic() + PATIENCE
                    break
        if None not in states.values():
            break
        time.sleep(_PERIOD)
    return status


def _end(processes: Any) -> None:
    """End what is left of the processes, with all that they have started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in processes if number == signal.SIGKILL else left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + PATIENCE
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Note Ctrl-C and SIGTERM instead of ending with them."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"d2ldev launch: {text}\n")
        sys.stderr.flush()
