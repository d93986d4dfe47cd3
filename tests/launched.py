"""Processes that train together, started by hand: how each of them ends is its own."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from processes import searched


def run_processes(program, *arguments, number=2, timeout=5, lost=None, path=(), environment=None):
    """Run a program in several processes of a launch; how they have ended, by rank.

    Args:
        program: Python source.
        arguments: its own.
        number: how many processes.
        timeout: how many seconds one of them may give no sign.
        lost: the rank of one that may be stopped, which is killed when all others have ended.
        path: folders to be searched for modules.
        environment: variables to set; those that begin with ``D2LDEV_`` are not inherited.

    Returns:
        For each process ``returncode``, ``stdout`` and ``stderr``.
    """
    variables = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    variables |= {
        "PYTHONPATH": searched(path),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "D2LDEV_PEER_TIMEOUT": str(timeout),
        **(environment or {}),
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        running = [_started(command, variables, rank, Path(folder)) for rank in range(number)]
        try:
            for rank, process in enumerate(running):
                if rank != lost:
                    process.wait(600)
        finally:
            for process in running:
                process.kill()
        return [
            SimpleNamespace(
                returncode=process.wait(),
                stdout=(Path(folder) / f"{rank}.out").read_text(),
                stderr=(Path(folder) / f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(running)
        ]


def _started(command, variables, rank, folder):
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as err:
        return subprocess.Popen(command, env={**variables, **own}, stdout=out, stderr=err)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
