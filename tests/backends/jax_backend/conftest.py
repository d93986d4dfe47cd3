"""The JAX backend with two virtual GPUs, made past the registry: no other backend gets any."""

import os

# JAX reads it when it is imported, here and in what the tests start. A program that runs once costs
# more to optimise than it saves; those of the conformance suite are optimised.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest
from d2ldev_jax import JaxFramework, tensors

from d2ldev import Backend


@pytest.fixture(scope="session")
def backend():
    return Backend(JaxFramework(virtual_gpus=2))


@pytest.fixture
def configure():
    """Sets a value of ``jax.config``, and puts all of them back."""
    before = {}

    def set_value(name, value):
        before.setdefault(name, jax.config.values[name])
        jax.config.update(name, value)

    yield set_value
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def puts(monkeypatch):
    """How many arrays each ``jax.device_put`` was given, and where they were to go."""
    calls, put = [], jax.device_put

    def count(x, device=None, **options):
        calls.append((len(jax.tree.leaves(x)), device))
        return put(x, device, **options)

    monkeypatch.setattr(jax, "device_put", count)
    return calls


@pytest.fixture
def copies(monkeypatch):
    """Where each array that the backend copies goes, and whether JAX is told to copy it at once."""
    calls, put = [], tensors.batched_device_put

    def count(aval, sharding, xs, natives, is_committed, is_copy):
        calls.append((*natives, is_copy))
        return put(aval, sharding, xs, natives, is_committed, is_copy)

    monkeypatch.setattr(tensors, "batched_device_put", count)
    return calls
