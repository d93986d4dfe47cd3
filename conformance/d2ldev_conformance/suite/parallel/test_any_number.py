"""D2L 13.5 and 13.6: any number of GPUs or processes has the numbers of one.

Two is a special case. Other numbers share no batch evenly, and add up in another order.

Every model, optimizer and number is tried, clipped and not. Each test prints by how much the
numbers differ, relative to ``|expected| + 0.1``.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2ldev import Backend, Trainer, get_backend
from d2ldev_conformance.provision import classifiers
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import (
    assert_same_run,
    difference_of_runs,
    needs_float32,
    read_saved_values,
)
from d2ldev_conformance.suite.parallel.launching import (
    command,
    require_processes,
    run_launch,
    virtual_gpus_of_each,
)
from d2ldev_conformance.suite.parallel.test_processes import keep, read_learned

SOURCE = "D2L"

NUMBERS = (2, 3, 4)
SIZES = (12, 5, 1)
"""Of batches: one that any number shares evenly, one that none does, one smaller than any."""
RATES = {"sgd": 0.1, "momentum": 0.1, "adam": 0.01}
CLIPS = (0, 0.05)
"""No clipping, and a norm that the gradients exceed."""

LIMIT = 1800
"""Seconds for all cases: four processes share the cores, and JAX compiles each case in each."""

PROGRAM = "from d2ldev_conformance.suite.parallel import test_any_number as suite; suite.main()"

pytestmark = [pytest.mark.nightly, pytest.mark.starts_processes]


def cases(backend: Backend) -> dict[str, tuple[str, str, float]]:
    """Return the name of a case -> a model, an optimizer, and where gradients are clipped."""
    made = itertools.product(classifiers(backend), RATES, CLIPS)
    return {
        f"{model}, {optimizer}, {clip}": (model, optimizer, clip) for model, optimizer, clip in made
    }


def train(backend: Backend, num_gpus: int, model: str, optimizer: str, clip: float) -> Any:
    """Train a classifier; return its parameters and the history."""
    build, shape = classifiers(backend)[model]
    random = np.random.default_rng(0)
    batches = [
        (
            random.normal(size=(n, *shape)).astype("float32"),
            random.integers(0, 3, n).astype("int32"),
        )
        for n in SIZES
    ]
    backend.seed(0)
    trainer = Trainer(2, num_gpus, clip, backend=backend)
    history = trainer.fit(
        build(backend.cpu()),
        batches,
        batches,
        loss="cross_entropy",
        optimizer=optimizer,
        lr=RATES[optimizer],
        metrics=["accuracy"],
    )
    return read_saved_values(backend, trainer.model), history


def main() -> None:
    """Train all cases in a process of a launch, and keep what it has learned."""
    name, folder, num_gpus = sys.argv[1:]
    backend = get_backend(name)
    for case, how in cases(backend).items():
        keep(Path(folder), case, train(backend, int(num_gpus), *how))


def _tell(number: int, case: str, difference: float) -> None:
    sys.stdout.write(f"{number}: {case}: {difference:.1e}\n")


@requirement("several.learn-what-one-learns", section="13.6")
@needs_float32
@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.needs_gpus(n)) for n in NUMBERS]
)
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("clip", CLIPS)
def test_any_number_of_gpus_has_the_same_numbers(backend, number, classifier, optimizer, clip):
    """Train each model with each optimizer on 2 to 4 GPUs as on one, to rounding."""
    how = classifier, optimizer, clip
    together, alone = train(backend, number, *how), train(backend, 1, *how)
    _tell(number, ", ".join(map(str, how)), difference_of_runs(together, alone))
    assert_same_run(together, alone)


@requirement("processes.learn-what-one-learns", section="13.6")
@needs_float32
@pytest.mark.parametrize("number", NUMBERS)
def test_any_number_of_processes_has_the_same_numbers(backend, tmp_path, number):
    """Train each model with each optimizer in 2 to 4 processes as in one."""
    require_processes(backend, number)
    num_gpus = virtual_gpus_of_each(backend)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = backend.name, tmp_path, num_gpus
    done = run_launch(backend, command("--processes", number, program, *arguments), LIMIT)
    assert done.returncode == 0, done.stderr
    for case, how in cases(backend).items():
        first, *others = (read_learned(tmp_path, case, rank) for rank in range(number))
        alone = train(backend, num_gpus, *how)
        _tell(number, case, difference_of_runs(first, alone))
        assert_same_run(first, alone)
        assert all(difference_of_runs(other, first) == 0 for other in others)
