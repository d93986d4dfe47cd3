"""Frameworks that are imported before d2ldev, in any order of two, work all the same."""

import itertools
import os
import subprocess
import sys

import pytest

NAMES = ("mxnet", "torch", "jax", "tensorflow")
IMPORTS = {
    # What the user of MXNet 1.9.1 has to write; it is the backend's own business otherwise.
    "mxnet": "import numpy; numpy.bool = bool; import mxnet",
    "torch": "import torch",
    "jax": "import jax",
    "tensorflow": "import tensorflow",
}
USE = """
import d2ldev
for name in {names!r}:
    backend = d2ldev.get_backend(name)
    x = backend.full((2, 2), 3.0)
    assert backend.to_numpy(x @ x).tolist() == [[18.0, 18.0], [18.0, 18.0]], name
    assert d2ldev.backend_of(x) is backend
print("used", *{names!r})
"""


@pytest.mark.parametrize("pair", list(itertools.permutations(NAMES, 2)), ids="-".join)
def test_two_frameworks_imported_first_are_both_usable(pair):
    program = "\n".join([*(IMPORTS[name] for name in pair), USE.format(names=pair)])
    environment = {key: value for key, value in os.environ.items() if "D2LDEV" not in key}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout == f"used {' '.join(pair)}\n", done.stderr


@pytest.mark.parametrize("pair", list(itertools.permutations(NAMES, 2)), ids="-".join)
def test_two_frameworks_imported_by_d2ldev_are_both_usable(pair):
    environment = {key: value for key, value in os.environ.items() if "D2LDEV" not in key}
    done = subprocess.run(
        [sys.executable, "-c", USE.format(names=pair)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout == f"used {' '.join(pair)}\n", done.stderr
