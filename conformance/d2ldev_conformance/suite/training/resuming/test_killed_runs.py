"""D2L 6.7.3 with 6.6: a run that the operating system kills goes on as if nothing had happened.

Python runs no code when a process is killed. So all that a run needs has to be in its file.

Python runs no code when a process is killed, and a new process resumes from the file alone. Each
process makes the model and the loader from its own seed. So a run that starts again, or restores
half of the state, ends with other parameters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from d2ldev import ArrayLoader, Backend, Trainer
from d2ldev.framework.testing import framework_of
from d2ldev.settings import VIRTUAL_GPUS
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_run, values_of

SECTION = "6.7.3"
SOURCE = "contract, Resuming a run"
EPOCHS = 3
# The number of the epoch, and the number of its batch. An epoch has four batches.
IN_THE_FIRST_EPOCH, IN_THE_MIDDLE_OF_THE_SECOND = (0, 1), (1, 2)

PROGRAM = """
import json, sys
import d2ldev
import numpy as np
from d2ldev_conformance.suite.data import values_of
from d2ldev_conformance.suite.training.resuming.test_killed_runs import train

name, folder, options = sys.argv[1:]
backend = d2ldev.get_backend(name)
model, history = train(backend, f"{folder}/run.safetensors", **json.loads(options))
np.savez(f"{folder}/values.npz", **values_of(backend, model))
with open(f"{folder}/history.json", "w") as file:
    json.dump(history, file)
"""


class KilledLoader(ArrayLoader):
    """Batches, with one at which the process is killed.

    Args:
        killed_in: the number of the epoch, and that of the batch; None lets it live.
    """

    def __init__(self, *arrays: Any, killed_in: Sequence[int] | None, **options: Any) -> None:
        super().__init__(*arrays, **options)
        self._killed_in = killed_in

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        epoch = self.state_dict()["epoch"]
        for number, batch in enumerate(super().__iter__()):
            if self._killed_in is not None and (epoch, number) == tuple(self._killed_in):
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def train(
    backend: Backend,
    checkpoint: str | None,
    *,
    num_gpus: int,
    seed: int,
    killed_in: Sequence[int] | None = None,
) -> tuple[Any, dict[str, list[float]]]:
    """Train a small model to the end, from the checkpoint if there is one; or be killed."""
    inputs = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
    targets = inputs @ np.array([[2.0], [-3.4]], "float32") + np.float32(4.2)
    loader = KilledLoader(
        inputs, targets, batch_size=4, shuffle=True, seed=seed, killed_in=killed_in
    )
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    history = trainer.fit(
        backend.mlp([2, 4, 1], seed=seed),
        loader,
        optimizer="adam",
        lr=0.1,
        checkpoint=checkpoint,
        resume=checkpoint is not None,
    )
    return trainer.model, history


@pytest.fixture
def run(backend, tmp_path):
    """Train in a process of its own; its exit status."""
    environment = dict(os.environ)
    if framework_of(backend).virtual_gpus is not None:
        environment[VIRTUAL_GPUS] = str(framework_of(backend).virtual_gpus)

    def run(**options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603
            [sys.executable, "-c", PROGRAM, backend.name, str(tmp_path), json.dumps(options)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@requirement("fit.resumes-when-killed", section=SECTION)
@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "num_gpus", [0, pytest.param(1, marks=pytest.mark.needs_gpus(1))], ids=["cpu", "gpu0"]
)
def test_a_run_killed_twice_ends_like_an_uninterrupted_one(backend, run, num_gpus, tmp_path):
    """End a run that is killed twice like an unbroken one."""
    model, history = train(backend, None, num_gpus=num_gpus, seed=0)
    first = run(num_gpus=num_gpus, seed=0, killed_in=IN_THE_FIRST_EPOCH)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = run(num_gpus=num_gpus, seed=1, killed_in=IN_THE_MIDDLE_OF_THE_SECOND)
    assert second.returncode == -signal.SIGKILL, second.stderr
    last = run(num_gpus=num_gpus, seed=2)
    assert last.returncode == 0, last.stderr
    found = json.loads((tmp_path / "history.json").read_text())
    with np.load(tmp_path / "values.npz") as values:
        # Another process may add in another order.
        assert_same_run((dict(values), found), (values_of(backend, model), history))
