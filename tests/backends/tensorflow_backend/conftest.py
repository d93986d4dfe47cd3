"""The TensorFlow backend with two virtual GPUs, and processes of their own for what comes first."""

import json
import os
import subprocess
import sys

import pytest
from d2ldev_conformance.provision import samples
from processes import WITHOUT_GPUS

import d2ldev


@pytest.fixture(scope="session", autouse=True)
def backend():
    """The backend with two virtual GPUs: TensorFlow makes its devices once in a process.

    Keras leaves traces when it is imported, and AutoGraph leaves files behind when TensorFlow's
    prefetching is used first.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("D2LDEV_VIRTUAL_GPUS", "2")
        backend = d2ldev.get_backend("tensorflow")
    for make in samples(backend).values():
        make(backend.cpu())
    import tensorflow as tf

    list(backend.prefetch(tf.data.Dataset.range(1), "gpu:0"))
    return backend


@pytest.fixture(scope="session")
def run():
    """Runs a program with TensorFlow in a process of its own; what it gives to ``show(...)``.

    The machine's GPUs are hidden from it, as from this process, which has virtual ones.
    """

    def run_program(program, **variables):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if "D2LDEV" not in name and not name.startswith("TF_FORCE")
        }
        done = subprocess.run(
            [sys.executable, "-c", _PREAMBLE + program],
            env=inherited | WITHOUT_GPUS | {"TF_CPP_MIN_LOG_LEVEL": "3"} | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("shown:")]
        return [json.loads(line.removeprefix("shown:")) for line in lines]

    return run_program


_PREAMBLE = """
import json, warnings
import tensorflow as tf
import d2ldev

def show(value):
    print("shown:" + json.dumps(value))

def caught(call, *arguments):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*arguments)
    return [f"{each.category.__name__}: {each.message}" for each in found]

"""
