"""Programs of Python whose process is forked from one that has imported a framework already.

To import a framework takes longer than most programs of the documents. ``run`` is for programs that
say nothing about what is imported, or when: a process that is new from the start is
``processes.run_interpreter``'s.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


def run(
    modules: Sequence[str],
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, where modules are imported before; how that ended.

    Args:
        modules: what is imported once, for all programs; of d2ldev nothing is.
        arguments: of the interpreter: the path of a program or ``-m`` and a module, and its own.
        cwd: the working folder.
        env: all variables.
        timeout: seconds after which it is killed.
    """
    server = _start(tuple(modules))
    with tempfile.TemporaryDirectory() as folder:
        request = {"arguments": [*map(str, arguments)], "cwd": str(cwd), "env": dict(env)}
        print(json.dumps({**request, "folder": folder, "timeout": timeout}), file=server.stdin)
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the process that has imported {', '.join(modules)} has ended"
        output, errors = (Path(folder, name).read_text() for name in ("output", "errors"))
    return subprocess.CompletedProcess(arguments, int(answer), output, errors)


@cache
def _start(modules: tuple[str, ...]) -> Any:
    """Start the process from which others are forked; it ends with this one."""
    command = [sys.executable, "-P", __file__, *modules]
    environment = {name: each for name, each in os.environ.items() if "D2LDEV_" not in name}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=environment, **streams)

    def end() -> None:
        for stream in (server.stdin, server.stdout):
            stream.close()
        server.wait()

    atexit.register(end)
    return server


def main() -> None:
    """Import modules, and fork a process for each request until there are no more."""
    before = [*sys.path]
    # AutoGraph imports files that it writes to the temporary folder, and removes only these.
    sys.dont_write_bytecode = True
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    # A child would go through, and so copy, all that is here whenever it collects garbage.
    gc.freeze()
    for line in sys.stdin:
        print(_fork(before, **json.loads(line)), flush=True)


def _fork(path: list[str], *, timeout: float, **request: Any) -> int:
    child = os.fork()
    if not child:
        _run(path, **request)
    status = wait_for_child(child, timeout)
    return -signal.SIGKILL if status is None else status


def wait_for_child(child: int, timeout: float) -> int | None:
    """Return the exit status of a forked process; kill its group after a time, and return None."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(path: list[str], arguments: list[str], cwd: str, env: dict[str, str], folder: str) -> None:
    """Be a new process that runs Python with arguments, and end it."""
    status = 1
    try:
        os.setpgid(0, 0)
        for stream, name in ((0, os.devnull), (1, f"{folder}/output"), (2, f"{folder}/errors")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
        status = _run_as_main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _run_as_main(arguments: list[str]) -> int:
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    return 0


def _end(status: int) -> None:
    """End as Python does: threads, what is registered for the end, and the streams."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
