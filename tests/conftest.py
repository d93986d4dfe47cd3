"""What every test of the project is given, and what none of them may leave behind."""

import os
import signal
import tempfile

# Frameworks read it when they are imported, here and in what the tests start. With a thread for
# each core in each of as many processes, small programs take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from d2ldev_conformance.leaks import children_use, detect_leaks
from d2ldev_conformance.machines import machines  # noqa: F401  # a fixture
from d2ldev_conformance.plugin import freeze_what_is_loaded
from hypothesis import HealthCheck, configuration, settings
from processes import make_backend, make_package

import d2ldev
from d2ldev.framework.testing import framework_of
from d2ldev.registry import selection

pytest_plugins = ["pytester"]


def pytest_configure(config):
    # Whatever frameworks are installed: a test that is about the choice makes it itself.
    d2ldev.set_backend("reference")
    # A shell that starts the tests in the background has them, and their children, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if settings.get_current_profile_name() != "d2ldev":
        # Already while tests are collected, Hypothesis writes into the working directory.
        folder = tempfile.TemporaryDirectory(prefix="d2ldev-hypothesis-")
        config.add_cleanup(folder.cleanup)
        configuration.set_hypothesis_home_dir(folder.name)
        settings.register_profile(
            "d2ldev",
            database=None,
            deadline=None,
            max_examples=50,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        settings.load_profile("d2ldev")


def pytest_collection_finish(session):
    freeze_what_is_loaded()


@pytest.fixture(scope="session")
def _for_leaks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    with children_use(folder):
        yield folder


@pytest.fixture(autouse=True)
def _no_leaks(_for_leaks):
    """A test that leaks an environment variable, a thread, a file, a patch or a scope fails."""
    with detect_leaks(folder=_for_leaks):
        yield


@pytest.fixture
def reference():
    """The reference backend: the CPU, and gpu:0 and gpu:1 that are not there."""
    return d2ldev.get_backend("reference")


@pytest.fixture
def path(tmp_path):
    """A file to save to, which is not there yet."""
    return tmp_path / "saved.safetensors"


@pytest.fixture
def other(reference):
    """A second backend that is not the process's, with one GPU."""
    return d2ldev.Backend(type(framework_of(reference))(virtual_gpus=1))


@pytest.fixture
def install(tmp_path):
    """Installs made-up frameworks, and backends for them; the folder where they are."""

    def make_packages(*names):
        for name in names:
            make_package(tmp_path, name)
            make_backend(tmp_path, name, requires=[name])
        return tmp_path

    return make_packages


@pytest.fixture
def restored_backend():
    """What the test does with ``set_backend`` is undone afterwards."""
    before = selection.get_selection()
    yield
    selection.set_selection(before)
