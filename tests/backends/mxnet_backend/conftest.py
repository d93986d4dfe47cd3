"""The MXNet backend with two virtual GPUs, and as the machine is."""

import pytest
from d2ldev_mxnet.backend import MXNetBackend
from d2ldev_mxnet.framework import mx


@pytest.fixture(scope="session")
def backend():
    """Two virtual GPUs, which are MXNet's contexts ``cpu(1)`` and ``cpu(2)``."""
    return MXNetBackend(virtual_gpus=2)


@pytest.fixture(scope="session")
def hardware():
    """MXNet on what the machine has."""
    return MXNetBackend()


@pytest.fixture
def set_np():
    """What a user of MXNet's NumPy arrays writes first: ``npx.set_np()``."""
    mx.npx.set_np()
    yield
    mx.npx.reset_np()
