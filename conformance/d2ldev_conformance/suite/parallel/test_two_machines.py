"""D2L 13.6: processes on two machines train one model, and learn what one process learns.

Two machines have no memory in common, and find each other by name.
"""

from __future__ import annotations

import json

import pytest

from d2ldev_conformance.machines import LIMIT, launch_on, of_machine
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_run
from d2ldev_conformance.suite.parallel.launching import command, environment, require_processes
from d2ldev_conformance.suite.parallel.test_processes import PROGRAM, read_learned, train

SOURCE = "contract, Several processes"

pytestmark = [pytest.mark.nightly, pytest.mark.starts_processes]


@requirement("processes.train-on-two-machines", section="13.6")
@pytest.mark.parametrize("processes", [1, 2])
def test_two_machines_learn_like_one_process(backend, machines, tmp_path, processes):
    """Train in processes on two machines what one process trains.

    An address of one machine may mean nothing on the other.

    Call the first machine by its name, which is a loopback address on the machine itself.
    """
    require_processes(backend, 2)
    options = {"optimizer": "adam", "gradient_clip_val": 0.05, "num_gpus": 0}
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    case = json.dumps({"machines": {**options, "is_seeded_by_rank": True}})
    started = []
    try:
        for rank, machine in enumerate(machines):
            launch = [*of_machine(rank, tmp_path), "--processes", processes, path]
            launch = command(*launch, backend.name, tmp_path, case)
            started.append(launch_on(machine, rank, launch, environment(backend), tmp_path))
        for process in started:
            errors = process.communicate(timeout=LIMIT)[1]
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.terminate()  # which ends its processes, too
            process.communicate()
    alone = train(backend, tmp_path, **options)
    for rank in range(2 * processes):
        assert_same_run(read_learned(tmp_path, "machines", rank), alone)
