"""``launch``: start the processes of one machine, show their output, and end them together.

The contract with the program is torchrun's, so that torchrun, Slurm, Ray or Kubernetes may start it
instead: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from d2ldev.distributed.join import free_port
from d2ldev.distributed.signals import handle_signals
from d2ldev.errors import UnsupportedValueError, quote
from d2ldev.locks import Lock
from d2ldev.settings import PEER_TIMEOUT, Peers, peer_timeout

# How many seconds the others have to end by themselves, and after SIGTERM.
PATIENCE = 5.0

_PERIOD = 0.02
# In bytes; more is shown as several.
_LONGEST_LINE = 1 << 20


class Launch(NamedTuple):
    """What is to be started on this machine.

    Args:
        command: the program and its arguments.
        processes: how many on this machine.
        nodes: how many machines there are, all with as many processes.
        node_rank: the number of this machine, from 0.
        address: ``"host:port"`` of machine 0; empty is a free port of this one.
        restarts: how often all processes are started again after one has failed.
        timeout: how many seconds a process may give no sign; None is ``D2LDEV_PEER_TIMEOUT``, else
            60.
    """

    command: Sequence[str]
    processes: int
    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    restarts: int = 0
    timeout: float | None = None

    def check(self) -> Launch:
        """Return it.

        Raises:
            UnsupportedValueError: if it is contradictory, or ``D2LDEV_PEER_TIMEOUT`` is not a
                number.
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
                attempted, "the address of machine 0 is not known", "--address host:29500"
            )
        host, _, port = self.address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65535
        if self.address and not (host and is_port):
            raise UnsupportedValueError(
                attempted, f"{quote(self.address)} is not an address", "--address host:29500"
            )
        self.longest_stop()
        return self

    def longest_stop(self) -> float:
        """Return for how many seconds a process may be stopped, before it has failed.

        Raises:
            UnsupportedValueError: if ``D2LDEV_PEER_TIMEOUT``, where it counts, is not a number.
        """
        seconds = peer_timeout() if self.timeout is None else self.timeout
        # A machine alone may be paused. Those of several end, and begin again without this one.
        # The processes of this machine fail first. They say what they waited for.
        return seconds + PATIENCE if self.nodes > 1 else math.inf

    def variables(self) -> list[dict[str, str]]:
        """Return the environment variables of each process."""
        host, _, port = (self.address or f"127.0.0.1:{free_port()}").rpartition(":")
        # Show output at once. Processes that each use all cores are slower than one process.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        common = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
        if self.timeout is not None:
            common[PEER_TIMEOUT] = str(self.timeout)
        first, number = self.node_rank * self.processes, self.processes
        peers = [
            Peers(first + i, self.nodes * number, i, number, host, int(port)) for i in range(number)
        ]
        return [{**common, **each.variables()} for each in peers]


def launch(request: Launch) -> int:
    """Run a program on several processes, until all have ended.

    Returns:
        0, or the exit status of the process that failed first. If a signal has ended it, or stopped
        it for too long, 128 plus the number of the signal.
    """
    received: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM
    # They are noted, and end the program only after its processes.
    with handle_signals(numbers, lambda number, _: received.append(number)), _Guard() as guard:
        for left in range(request.restarts, -1, -1):
            status = _run(request, received, guard)
            if not status or received:
                break
            if left:
                _say(
                    f"a process failed with status {status}: all are started again, {left - 1} left"
                )
    return 128 + received[0] if received else status


def _run(request: Launch, received: list[int], guard: _Guard) -> int:
    processes: dict[int, subprocess.Popen[bytes]] = {}
    readers: list[threading.Thread] = []
    lock, stops = Lock(), Stops(request.longest_stop())
    try:
        for variables in request.variables():
            rank = int(variables["RANK"])
            processes[rank] = process = _start(request.command, variables)
            guard.look_after(process.pid)
            _say(f"rank {rank} is process {process.pid} on {socket.gethostname()}")
        # Only now, because a process that has threads is not to fork.
        for rank, process in processes.items():
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                arguments = (stream, target, f"[rank {rank}] ".encode(), lock)
                reader = threading.Thread(target=_show, args=arguments, daemon=True)
                reader.start()
                readers.append(reader)
        return _watch(processes, received, stops)
    finally:
        _end(processes.values())
        deadline = time.monotonic() + PATIENCE
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0))


def _start(command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    # ps-lite, the engine of MXNet, takes a PORT for its own.
    environment = {name: value for name, value in os.environ.items() if name != "PORT"}
    return subprocess.Popen(  # noqa: S603  # the user's own program
        command,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that its children can be ended with it
    )


class _Guard:
    """A process that ends the others and their children when the launcher is killed."""

    def __enter__(self) -> _Guard:
        receiving, self._sending = os.pipe()
        self._process = os.fork()
        if not self._process:
            try:
                os.setsid()
                os.close(self._sending)
                self._wait(receiving)
            finally:
                os._exit(0)
        os.close(receiving)
        return self

    def look_after(self, process: int) -> None:
        """End a process, and its group, with the launcher."""
        with suppress(OSError):  # the guard itself may have been killed
            os.write(self._sending, b"%d\n" % process)

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._sending)

    def _wait(self, receiving: int) -> None:
        with open(receiving, "rb") as file:  # to its end, which is the launcher's
            processes = [int(number) for number in file.read().split()]
        for process in processes:
            with suppress(OSError):
                os.killpg(process, signal.SIGKILL)


def _show(stream: IO[bytes], target: IO[str] | None, prefix: bytes, lock: Lock) -> None:
    """Show the lines of a process, with its rank before each."""
    rest = b""
    while data := stream.read1(1 << 16):  # type: ignore[attr-defined]
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        _write(target, prefix, lines, lock)
    _write(target, prefix, [rest] if rest else [], lock)
    stream.close()


def _write(target: IO[str] | None, prefix: bytes, lines: list[bytes], lock: Lock) -> None:
    # Of a bar that was drawn again and again, only the last state.
    shown = [prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines]
    view = memoryview(b"".join(shown))
    # Nobody may read, and the process is not to wait.
    with lock, suppress(OSError):
        while view and target is not None:
            # Not by its buffer, which a thread that waits would hold when the launcher ends.
            view = view[os.write(target.fileno(), view) :]


def _watch(processes: dict[int, subprocess.Popen[bytes]], received: list[int], stops: Stops) -> int:
    """Wait until all processes have ended, or some time after one has failed."""
    status, deadline = 0, float("inf")
    while time.monotonic() < deadline and not received:
        states = {rank: process.poll() for rank, process in processes.items()}
        running = {rank: processes[rank].pid for rank, code in states.items() if code is None}
        stopped = stops.too_long(running, time.monotonic())
        states |= {rank: -number for rank, number in stopped.items()}
        if not status:
            # Of those that have failed at once, first one that a signal has ended.
            failed = [(code, rank) for rank, code in states.items() if code]
            for code, rank in sorted(failed)[:1]:
                status = code if code > 0 else 128 - code
                why = ""
                if rank in stopped:
                    name = signal.Signals(stopped[rank]).name
                    why = f": {name} has stopped it for {stops.longest:g} s"
                _say(f"rank {rank} failed with status {status}{why}")
                deadline = time.monotonic() + PATIENCE
        if None not in states.values():
            break
        time.sleep(_PERIOD)
    return status


class Stops:
    """Which processes have been stopped for too long.

    Args:
        longest: how many seconds they may be.
    """

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self._since: dict[int, float] = {}
        self._last = 0.0

    def too_long(self, running: Mapping[int, int], now: float) -> dict[int, int]:
        """Return the ranks that have been stopped for too long, each with the signal's number.

        Args:
            running: the number of each process by its rank.
            now: in seconds; of one call after the other.
        """
        if now - self._last > self.longest / 2:
            # This process was stopped itself, and those that were stopped with it may go on.
            self._since.clear()
        self._last = now
        stopped = {
            rank: number for rank, pid in running.items() if (number := _find_stop_signal(pid))
        }
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        return {
            rank: number
            for rank, number in stopped.items()
            if now - self._since[rank] > self.longest
        }


def _find_stop_signal(process: int) -> int:
    """Return the number of the signal that has stopped a child; 0 if it runs, or is traced."""
    if not hasattr(os, "waitid"):  # on macOS before Python 3.13
        return 0
    try:
        # ``Popen.poll`` notices its end. A process that goes on is no longer reported.
        found = os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # it has ended, or the system has no such call
        return 0
    return found.si_status if found is not None and found.si_code == os.CLD_STOPPED else 0


def _end(processes: Any) -> None:
    """End the processes that are left, with all their children."""
    # One that was stopped goes on, to end.
    for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
        left = [process for process in processes if process.poll() is None]
        for process in left if signal.SIGTERM in numbers else processes:
            for number in numbers:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + PATIENCE
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))


def _say(text: str) -> None:
    if sys.stderr is not None:  # as ``2>&-`` leaves it
        with suppress(OSError, ValueError):
            sys.stderr.write(f"d2ldev launch: {text}\n")
            sys.stderr.flush()
