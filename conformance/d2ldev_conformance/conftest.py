"""What the suite's tests are given: a backend, its places, its dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import d2ldev
from d2ldev import Backend, Device
from d2ldev.registry import _scoped
from d2ldev_conformance.plugin import backend_under_test

PLACES = (
    pytest.param("cpu", id="cpu"),
    pytest.param("gpu:0", id="gpu0", marks=pytest.mark.needs_gpus(1)),
    pytest.param("gpu:1", id="gpu1", marks=pytest.mark.needs_gpus(2)),
)
# From where to where: every direction there is.
ROUTES = (
    pytest.param(("cpu", "gpu:0"), id="cpu-gpu0", marks=pytest.mark.needs_gpus(1)),
    pytest.param(("gpu:0", "cpu"), id="gpu0-cpu", marks=pytest.mark.needs_gpus(1)),
    pytest.param(("gpu:0", "gpu:1"), id="gpu0-gpu1", marks=pytest.mark.needs_gpus(2)),
    pytest.param(("gpu:1", "gpu:0"), id="gpu1-gpu0", marks=pytest.mark.needs_gpus(2)),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", backend_under_test(metafunc.config).dtype_names)
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", PLACES, indirect=True)
    if "route" in metafunc.fixturenames:
        metafunc.parametrize("route", ROUTES, indirect=True)
    if "sample" in metafunc.fixturenames:
        metafunc.parametrize("sample", sorted(backend_under_test(metafunc.config).samples()))


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    """The backend under test."""
    return backend_under_test(pytestconfig)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Device:
    """Each device in turn."""
    return Device.parse(request.param)


@pytest.fixture
def route(request: pytest.FixtureRequest) -> tuple[Device, Device]:
    """Each pair of different devices in turn: from, to."""
    source, target = request.param
    return Device.parse(source), Device.parse(target)


@pytest.fixture
def missing(backend: Backend) -> Device:
    """A GPU that does not exist."""
    return d2ldev.gpu(backend.num_gpus())


@pytest.fixture
def mutable(backend: Backend) -> None:
    """Skips where a framework's tensors cannot be written to."""
    x = backend.zeros(1)
    try:
        x[0] = 1.0
    except TypeError:
        pytest.skip(f"tensors of {backend.name} are immutable")


@pytest.fixture(autouse=True)
def _leaves_no_trace(backend: Backend) -> Iterator[None]:
    """A test that changes the framework's default device or leaves a scope open has failed."""
    before = backend.default_device(), backend._scope.get(), _scoped.get()
    yield
    after = backend.default_device(), backend._scope.get(), _scoped.get()
    assert after == before, "the default device, the device scope or the backend was changed"
