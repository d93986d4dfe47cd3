"""The four frameworks and the reference, in one process, each with two virtual GPUs."""

import os

# JAX reads it when it is imported. A program that runs once costs more to optimise than it saves.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import pytest

import d2ldev

# MXNet first: it looks at NumPy while it is imported. JAX after torch, as the facts have it.
NAMES = ("mxnet", "torch", "jax", "tensorflow", "reference")

# The tests write ``import mxnet`` at their top, before TensorFlow is imported.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("D2LDEV_VIRTUAL_GPUS", "2")
    d2ldev.get_backend("mxnet")


@pytest.fixture(scope="session", autouse=True)
def _all_are_loaded():
    """Importing a framework leaves its own traces, which are no test's leaks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("D2LDEV_VIRTUAL_GPUS", "2")
        for name in NAMES:
            backend = d2ldev.get_backend(name)
            backend.to_numpy(backend.mlp([2, 2])(backend.ones((1, 2))))
        yield
