"""No call ends the process: each public function is given each hostile value, in a child."""

import subprocess
import sys

import pytest

CHILD = """
import sys
from pathlib import Path

import d2ldev
from d2ldev_conformance.suite import hostile
from d2ldev_conformance.suite.tensors import test_hostile_arguments as calls

name, first, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
d2ldev.virtual_gpus(2)
backend = d2ldev.get_backend(name)
right, values = hostile.right(backend, folder), hostile.values(backend)
each = [(at, value) for at in calls.arguments(backend) for value in values]
for number, (at, value) in enumerate(each[first:], first):
    print(number, at.owner.__name__, at.function, at.parameter, value.encode(), flush=True)
    calls.outcome(backend, right, at, values[value])
print(len(each), "calls")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["reference", "torch", "jax", "tensorflow", "mxnet"])
def test_no_argument_ends_the_process(name, tmp_path):
    deaths, first = [], 0
    while len(deaths) < 20:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CHILD, name, str(first), str(tmp_path)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        last = done.stdout.splitlines()[-1]
        if done.returncode >= 0:
            break
        deaths.append(f"{last}: signal {-done.returncode}")
        first = int(last.split()[0]) + 1
    assert (deaths, done.returncode) == ([], 0)
    assert last.endswith("calls")
