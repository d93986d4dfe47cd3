"""The MXNet backend with two virtual GPUs, and as the machine is."""

import numpy as np
import pytest
from d2ldev_mxnet import MXNetFramework
from d2ldev_mxnet.framework import mx

from d2ldev import Backend


def backend_of(virtual_gpus=None):
    return Backend(MXNetFramework(virtual_gpus))


@pytest.fixture(scope="session")
def backend():
    """Two virtual GPUs, which are MXNet's contexts ``cpu(1)`` and ``cpu(2)``."""
    return backend_of(2)


@pytest.fixture(scope="session")
def hardware():
    """MXNet on what the machine has."""
    return backend_of()


@pytest.fixture
def set_np():
    """What a user of MXNet's NumPy arrays writes first: ``npx.set_np()``."""
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.fixture
def numpy_s_generator():
    """Gluon's loaders shuffle with it, and resuming a run sets it."""
    before = np.random.get_state()
    np.random.seed(5)
    yield
    np.random.set_state(before)
