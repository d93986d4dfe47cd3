"""Frameworks that are imported before d2ldev, in any order, work all the same."""

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


# Each pair is in one of them, either way round, but for TensorFlow before MXNet: that ends the
# process, whoever imports them, and the last test is about it.
ORDERS = [
    ("mxnet", "torch", "tensorflow", "jax"),
    ("jax", "torch", "mxnet", "tensorflow"),
    ("tensorflow", "jax", "torch"),
]


def test_the_orders_have_every_pair_that_can_be():
    possible = set(itertools.permutations(NAMES, 2)) - {("tensorflow", "mxnet")}
    assert {pair for order in ORDERS for pair in itertools.combinations(order, 2)} == possible


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_frameworks_imported_first_are_usable(order):
    done = run("\n".join([*(IMPORTS[name] for name in order), USE.format(names=order)]))
    assert done.stdout == f"used {' '.join(order)}\n", done.stderr


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_frameworks_imported_by_d2ldev_are_usable(order):
    done = run(USE.format(names=order))
    assert done.stdout == f"used {' '.join(order)}\n", done.stderr


def test_mxnet_after_tensorflow_is_an_error_with_a_fix():
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
    fix = "write 'from d2ldev import mxnet' before anything imports tensorflow"
    assert fix in done.stdout, done.stderr
    assert done.stdout.endswith("[1.0]\n")
