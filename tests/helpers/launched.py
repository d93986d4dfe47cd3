"""Processes that train together, as a launcher starts them, on this machine.

``together`` forks them from the process of the test, so that a group costs tenths of a second, and
what they do is a function of the test. ``launched`` runs the command.
"""

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

from d2ldev_conformance.suite.parallel import launching
from ports import free_port
from processes import extend_path

LIMIT = 60
"""Seconds after which a process that has not ended fails the test."""
LONG_LIMIT = 600
"""The same for a process of ``run_processes``, which may train many models."""


class Ended(NamedTuple):
    """How a process ended.

    Args:
        status: its exit status; less than 0 is a signal's number.
        value: what the function returned.
        error: the name of the class of its exception, or empty.
        text: of the exception, or what the process has written to its standard error.
        seconds: from the start of all until its end.
    """

    status: int
    value: Any
    error: str
    text: str
    seconds: float


def variables(rank, size, port, **others):
    """Return what a launcher of processes on this machine sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **others,
    }


def together(body, size=2, *, timeout=20, during=None, others=None):
    """Call ``body(rank)`` in so many new processes of one launch; how each ended, by rank.

    Args:
        body: returns what can be pickled.
        size: how many.
        timeout: ``D2LDEV_PEER_TIMEOUT``.
        during: called with the numbers of the processes while they run.
        others: rank -> more variables; None removes one.
    """
    port = free_port()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            process = os.fork()
            if not process:
                given = variables(rank, size, port, D2LDEV_PEER_TIMEOUT=str(timeout))
                _run(body, rank, {**given, **(others or {}).get(rank, {})}, f"{folder}/{rank}")
            processes.append(process)
        try:
            if during is not None:
                during(processes)
        finally:
            ended = _end_processes(processes, begin)
        return [
            _read_told(f"{folder}/{rank}", *ended[process])
            for rank, process in enumerate(processes)
        ]


def _run(body, rank, environment, path):
    status = 1
    try:
        # What the tests have registered is not this process's.
        atexit._clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in (1, 2):
            os.dup2(os.open(f"{path}.{stream}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update({name: value for name, value in environment.items() if value is not None})
        for name in environment:
            if environment[name] is None:
                os.environ.pop(name, None)
        try:
            told = (body(rank), "", "")
            status = 0
        except BaseException as error:
            told = (None, type(error).__name__, str(error))
        with open(path, "wb") as file:
            pickle.dump(told, file)
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


def _end_processes(processes, begin):
    """Wait for processes; their statuses and seconds, by number."""
    ended = {}
    while len(ended) < len(processes) and time.monotonic() - begin < LIMIT:
        for process in processes:
            if process not in ended:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    seconds = time.monotonic() - begin
                    ended[process] = (os.waitstatus_to_exitcode(status), seconds)
        time.sleep(0.005)
    for process in {*processes} - {*ended}:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert len(ended) == len(processes), f"{len(processes) - len(ended)} did not end"
    return ended


def _read_told(path, status, seconds):
    value, error, text = None, "", ""
    if os.path.exists(path) and os.path.getsize(path):
        with open(path, "rb") as file:
            value, error, text = pickle.load(file)
    elif os.path.exists(f"{path}.2"):  # it was ended in the middle
        with open(f"{path}.2") as file:
            text = file.read()
    return Ended(status, value, error, text, seconds)


def run_processes(program, *arguments, number=2, timeout=5, lost=None, path=(), environment=None):
    """Run a program in several new processes of a launch; how they have ended, by rank.

    Args:
        program: Python source.
        arguments: its own.
        number: how many processes.
        timeout: ``D2LDEV_PEER_TIMEOUT``.
        lost: the rank of one that may be stopped, which is killed when all others have ended.
        path: folders to be searched for modules.
        environment: more variables; those that begin with ``D2LDEV_`` are not inherited.

    Returns:
        For each process ``returncode``, ``stdout`` and ``stderr``.
    """
    common = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    common |= {"PYTHONPATH": extend_path(path), "PYTHONWARNINGS": "ignore", **(environment or {})}
    port = free_port()
    running, found = [], []
    try:
        for rank in range(number):
            own = variables(rank, number, port, D2LDEV_PEER_TIMEOUT=str(timeout))
            running.append(
                subprocess.Popen(
                    [sys.executable, "-c", program, *map(str, arguments)],
                    env=common | own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        with ThreadPoolExecutor(number) as readers:
            told = [readers.submit(process.communicate) for process in running]
            try:
                for rank, process in enumerate(running):
                    if rank != lost:
                        process.wait(LONG_LIMIT)
            except subprocess.TimeoutExpired:
                for process in running:  # whose readers would be waited for without an end
                    process.kill()
                raise
            if lost is not None:
                running[lost].kill()
            for process, texts in zip(running, told, strict=True):
                stdout, stderr = texts.result()
                found.append(
                    SimpleNamespace(stdout=stdout, stderr=stderr, returncode=process.returncode)
                )
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


def find_survivors(port):
    """Return the processes of a launch that are still there, some seconds later."""
    return launching.find_survivors(f"MASTER_PORT={port}")


def alive(port):
    """Yield the numbers of the processes of a launch, and of those that they have started."""
    yield from launching.alive(f"MASTER_PORT={port}")


class Launched(NamedTuple):
    """How a launch ended.

    Args:
        status: of the command.
        output, errors: what it has written.
        values: what ``show(value)`` was given, by rank.
    """

    status: int
    output: str
    errors: str
    values: dict[int, list[Any]]


PROLOGUE = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
def show(value): print("shown:" + json.dumps(value), flush=True)
"""


def write(folder, code, name="program.py"):
    """Write a program that has ``rank`` and ``show(value)``; its path."""
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        file.write(PROLOGUE + textwrap.dedent(code))
    return path


def environment(**others):
    """Return the variables of a launcher; those that begin with ``D2LDEV_`` are not inherited."""
    found = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    return {**found, "PYTHONPATH": extend_path([]), "D2LDEV_BACKEND": "reference", **others}


def launch_program(code, folder, *options, arguments=(), **keywords):
    """Run a program with ``d2ldev launch``; how it ended.

    Args:
        code: see ``written``.
        folder: where the program is written, and runs.
        options: of the launch.
        arguments: of the program.
        keywords: of ``subprocess.run``.
    """
    with contextlib.chdir(folder):
        done = subprocess.run(
            launching.command(*options, write(folder, code), *arguments),
            **{"env": environment(), "timeout": LIMIT, "capture_output": True, **keywords},
            check=False,
        )
    output = (done.stdout or b"").decode(errors="replace")
    return Launched(
        done.returncode, output, (done.stderr or b"").decode(errors="replace"), read_shown(output)
    )


def read_shown(output):
    """Return what ``show(value)`` was given, by rank."""
    values = {}
    for line in output.splitlines():
        prefix, is_shown, text = line.partition("shown:")
        if is_shown:
            values.setdefault(int(prefix[6:-2]), []).append(json.loads(text))
    return values
