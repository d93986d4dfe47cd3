"""The JAX backend with two virtual GPUs, made past the registry: no other backend gets any."""

import pytest
from d2ldev_jax.backend import JaxBackend


@pytest.fixture(scope="session")
def backend():
    return JaxBackend(virtual_gpus=2)
