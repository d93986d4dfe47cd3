"""D2L 13.6: one of three processes is lost at any instant, and the others end in time.

Machines fail at any instant. The others have to end in time, name the lost one, and leave a file to
resume from.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2ldev import Backend, Trainer, get_backend
from d2ldev.contract.abilities import require
from d2ldev.distributed import join
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import read_saved_values
from d2ldev_conformance.suite.parallel.launching import (
    command,
    find_survivors,
    require_processes,
    run_launch,
)

SOURCE = "contract, Several processes"

TIMEOUT = 5
GRACE = 15
"""Seconds that the others have after the timeout.

The launcher gives them 5 to end by themselves. The rest is for a machine that is busy.
"""
LONGEST = {"loading": 8.0, "meeting": 1.0}
"""The instant is drawn from so many seconds after the backend is loaded, or after the processes
have met.
"""
TOLERANCE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
"""For hundreds of steps in float32, in which processes add up in another order."""

PROGRAM = "from d2ldev_conformance.suite.parallel import test_lost_at_any_instant as suite; suite."
EPOCHS = 4
_BEGINNING = "lose a process while the engine begins"

pytestmark = [pytest.mark.nightly, pytest.mark.starts_processes]


def main() -> None:
    """Train in a process of a launch, which is lost if it is that one."""
    name, folder, given = sys.argv[1:]
    options = json.loads(given)
    meet = join.meet

    def lose_later(after: str) -> None:
        if os.environ["RANK"] == str(options["lost"]) and options["after"] == after:
            threading.Timer(options["delay"], _lose, [folder, options["number"]]).start()

    def meet_and_lose(*arguments: Any) -> Any:
        group = meet(*arguments)
        lose_later("meeting")
        return group

    join.meet = meet_and_lose
    backend = get_backend(name)
    lose_later("loading")
    train(backend, Path(folder, "run"), 10**6)


def _lose(folder: str, number: int) -> None:
    Path(folder, "lost").write_text(str(time.time()))
    os.kill(os.getpid(), number)


def begin_again() -> None:
    """Train in a process of a launch; rank 1 is killed in its third epoch, the first time."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ["RANK"]

    def end(epoch: int, _history: Any) -> None:
        with (folder / f"epochs of {rank}").open("a") as file:
            file.write(f"{epoch} ")
        killed = folder / "killed"
        if rank == "1" and epoch == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    values = train(get_backend(name), folder / "run", EPOCHS, callbacks=end)
    (folder / f"learned by {rank}").write_bytes(pickle.dumps(values))


def train(backend: Backend, path: Path, epochs: int, **options: Any) -> Any:
    """Train a small model, or go on with that; return its parameters.

    Args:
        backend: the backend.
        path: of the checkpoint.
        epochs: how many.
        options: of the trainer.
    """
    numbers = np.random.default_rng(0)
    inputs, labels = numbers.normal(size=(13, 6)).astype("float32"), numbers.integers(0, 3, 13)
    rows = [slice(start, start + 5) for start in range(0, 13, 5)]
    trainer = Trainer(epochs, 0, backend=backend, **options)
    trainer.fit(
        backend.mlp([6, 8, 3], seed=0),
        [(inputs[each], labels[each].astype("int32")) for each in rows],
        loss="cross_entropy",
        optimizer="momentum",
        lr=0.01,
        checkpoint=path,
        resume=True,
    )
    return read_saved_values(backend, trainer.model)


def _assert_all_end(backend, folder, number, lost, after):
    """Check that two processes end in time with an error, and leave nothing but the checkpoint.

    A run that goes on from it ends with the parameters of one that nothing has disturbed.
    """
    delay = random.uniform(0, LONGEST[after])  # noqa: S311
    given = {"number": int(number), "lost": lost, "delay": delay, "after": after}
    program, path = folder / "program.py", folder / "run"
    program.write_text(f"{PROGRAM}main()")
    launch = ["--processes", 3, "--timeout", TIMEOUT, program]
    launch = command(*launch, backend.name, folder, json.dumps(given))
    done = run_launch(backend, launch, LAUNCHED_IN=str(folder))
    assert (folder / "lost").exists(), (delay, done.stderr)
    seconds = time.time() - float((folder / "lost").read_text())
    assert done.returncode == (1 if number == signal.SIGSTOP else 137), (delay, done.stderr)
    assert seconds < TIMEOUT + GRACE, (delay, done.stderr)
    host = re.escape(socket.gethostname())
    # Before they have met, the others know rank 0 by its address alone.
    meeting = "" if lost else r"|rank 0 does not answer at \S+, where all meet: "
    for rank in {0, 1, 2} - {lost}:
        told = rf"rank {lost} on {host} is lost: .+\. Rank {rank} on {host} was at [a-zM]{meeting}"
        expected = rf"\[rank {rank}\] .*PeerLostError: cannot train in 3 processes: ({told})"
        assert re.search(expected, done.stderr), (delay, done.stderr)
    assert not find_survivors(f"LAUNCHED_IN={folder}")
    epochs = 2 + (backend.load(path)["run"]["epoch"] if path.exists() else 0)
    resumed = train(backend, path, epochs)
    for name, values in train(backend, folder / "undisturbed", epochs).items():
        np.testing.assert_allclose(resumed[name], values, **TOLERANCE, err_msg=f"{delay}")


HOW = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
WHO = pytest.mark.parametrize("lost", [0, 1])


@requirement("processes.end-with-a-lost-one", section="13.6")
@HOW
@WHO
@pytest.mark.parametrize("_attempt", range(4))
def test_a_process_is_lost_at_any_instant(backend, tmp_path, number, lost, _attempt):
    """End in time if a process is lost at a random instant.

    Each instant of a run waits for something else.
    """
    require_processes(backend, 3)
    _assert_all_end(backend, tmp_path, number, lost, "loading")


@requirement("processes.end-while-they-begin", section="13.6")
@HOW
@WHO
def test_a_process_is_lost_while_the_engine_begins(backend, tmp_path, number, lost):
    """End in time if a process is lost while the engine of the exchange begins.

    The engine has timeouts of its own.
    """
    require_processes(backend, 3)
    require(framework_of(backend), _BEGINNING, "train in 3 processes")
    _assert_all_end(backend, tmp_path, number, lost, "meeting")


@requirement("processes.start-again", section="13.6", source="PyTorch, torchrun")
def test_a_launch_that_has_lost_a_process_goes_on_by_itself(backend, tmp_path):
    """Start all processes again from the checkpoint, with ``--restarts``."""
    require_processes(backend, 2)
    program = tmp_path / "program.py"
    program.write_text(f"{PROGRAM}begin_again()")
    launch = ["--processes", 2, "--restarts", 1, program, backend.name, tmp_path]
    done = run_launch(backend, command(*launch))
    assert done.returncode == 0, done.stderr
    assert "status 137: all are started again, 0 left" in done.stderr
    expected = train(backend, tmp_path / "undisturbed", EPOCHS)
    for rank in range(2):
        found = pickle.loads((tmp_path / f"learned by {rank}").read_bytes())  # noqa: S301  # our own
        assert list(found) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, **TOLERANCE)
    # The epoch whose state was being written is trained again at most, and no other.
    assert (tmp_path / "epochs of 1").read_text() in ("0 1 2 3 ", "0 1 2 2 3 ")
