"""Frameworks that are imported before d2ldev, in any order of two, work all the same."""

import itertools
import os
import subprocess
import sys

import pytest

NAMES = ("mxnet", "torch", "jax", "tensorflow")
IMPORTS = {
    # The lines that a user of MXNet 1.9.1 has to write; otherwise the backend does the same.
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


def run(program):
    environment = {key: value for key, value in os.environ.items() if "D2LDEV" not in key}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# TensorFlow before MXNet ends the process, whoever imports them; the last test is about it.
PAIRS = [p for p in itertools.permutations(NAMES, 2) if p != ("tensorflow", "mxnet")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_frameworks_imported_first_are_both_usable(pair):
    program = "\n".join([*(IMPORTS[name] for name in pair), USE.format(names=pair)])
    done = run(program)
    assert done.stdout == f"used {' '.join(pair)}\n", done.stderr


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_frameworks_imported_by_d2ldev_are_both_usable(pair):
    done = run(USE.format(names=pair))
    assert done.stdout == f"used {' '.join(pair)}\n", done.stderr


def test_mxnet_after_tensorflow_is_an_error_that_says_what_to_do():
    program = """
import tensorflow
import d2ldev
try:
    d2ldev.get_backend("mxnet")
except d2ldev.BackendNotInstalledError as error:
    print(error)
backend = d2ldev.get_backend("tensorflow")
print(backend.to_numpy(backend.ones(1)).tolist())
"""
    done = run(program)
    assert "before anything imports tensorflow" in done.stdout, done.stderr
    assert done.stdout.endswith("[1.0]\n")
