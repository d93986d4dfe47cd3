"""Each public function is given each hostile value: no call ends the process, and errors are ours.

A process of its own makes the calls. The suite draws some of them, with values in nestings, too.
"""

import os
import subprocess
import sys

import pytest

CHILD = """
import sys
from pathlib import Path

import d2ldev
from d2ldev_conformance.suite.tensors import hostile
from d2ldev_conformance.suite.tensors import test_hostile_arguments as calls

name, first, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
d2ldev.virtual_gpus(2)
backend = d2ldev.set_backend(name)
right, values = hostile.right(backend, folder), hostile.values(backend)
each = [(at, value) for at in calls.arguments(backend) for value in values]
for number, (at, value) in enumerate(each[first:], first):
    print(number, at.owner.__name__, at.function, at.parameter, value.encode(), flush=True)
    if wrong := calls.outcome(backend, right, at, values[value]):
        print("wrong:", wrong.encode(), flush=True)
print(len(each), "calls")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["reference", "torch", "jax", "tensorflow", "mxnet"])
def test_no_value_ends_the_process_or_gets_an_error_that_is_not_ours(name, tmp_path):
    found, first = [], 0
    while len(found) < 20:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CHILD, name, str(first), str(tmp_path)],
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": str(tmp_path)},  # where torch's compiler leaves a folder
            stdout=subprocess.PIPE,
            text=True,
        )
        call = f"{first} before its call"
        for line in done.stdout.splitlines():
            if line.startswith("wrong: "):
                found.append(f"{call}: {line}")
            else:
                call = line
        if done.returncode >= 0:
            break
        found.append(f"{call}: signal {-done.returncode}")
        first = int(call.split()[0]) + 1
    assert (found, done.returncode) == ([], 0)
    assert call.endswith("calls")
