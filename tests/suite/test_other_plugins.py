"""The suite runs in other people's environments: beside other plugins, where there is no driver.

Warnings are errors only if they come from d2ldev or from the backend under test.
"""

import pytest
from d2ldev_conformance.plugin import package_of, warning_filters
from processes import conform, extend_path, make_backend, make_distribution, make_package

from d2ldev.framework.testing import framework_of

# It warns wherever a plugin may, has ``monkeypatch`` made before the fixtures of the suite, and
# takes the tests in another order.
BUSYBODY = """
import warnings
import pytest

def warn_of(place):
    warnings.warn(f"the busybody warns of {place}", UserWarning, stacklevel=1)
    warnings.warn(pytest.PytestWarning(f"the busybody warns of {place}"), stacklevel=1)

def pytest_configure(config):
    warn_of("configuring")

def pytest_collection_modifyitems(items):
    items.reverse()
    warn_of("collecting")

def pytest_runtest_setup(item):
    warn_of("a test")
    where = str(item.path), 1, "d2ldev_conformance.suite.training.test_device_log"
    warnings.warn_explicit("pytest warns of a test of the suite", pytest.PytestWarning, *where)

def pytest_sessionfinish():
    warn_of("finishing")

def pytest_terminal_summary():
    warn_of("the summary")

def pytest_unconfigure():
    warn_of("ending")

@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setenv("BUSYBODY", "is here")
"""
BACKEND = """
import threading
import warnings

from d2ldev import errors
from d2ldev.operations import nvml
from d2ldev_reference import ReferenceFramework
from d2ldev_reference.devices import ReferenceDevices

nvml.DRIVER = "libcuda-is-not-here.so"

def warn_by_itself():
    warnings.warn("of its own", DeprecationWarning, stacklevel=1)

def warn_as_d2ldev():
    errors.warn("of ours", errors.MemoryPolicyWarning)

def fail_in_a_thread():
    thread = threading.Thread(target=int, args=("no number",))
    thread.start()
    thread.join()

class MyDevices(ReferenceDevices):
    def platform(self, device):
        warnings.warn("of its caller", DeprecationWarning, stacklevel=2)
        return super().platform(device)

    def count(self):
        nvml.warn_without_driver("mine")
        return super().count()

class MyFramework(ReferenceFramework):
    name = {name!r}

    def __init__(self, virtual_gpus=0):
        super().__init__(virtual_gpus)
        self.devices = MyDevices(virtual_gpus)
"""
WARNED_OF = """
import warnings

import d2ldev
from d2ldev import backend
from mine_backend import wiring

def test_by_itself():
    wiring.warn_by_itself()

def test_as_d2ldev():
    wiring.warn_as_d2ldev()

def test_in_a_thread():
    wiring.fail_in_a_thread()

def test_of_its_caller_in_d2ldev():
    backend.platform("cpu")

def test_of_the_framework():
    warnings.warn_explicit("old", DeprecationWarning, "a.py", 1, "array_api_strict.linalg")
"""


def test_the_suite_passes_beside_a_plugin_that_warns_patches_and_reorders(tmp_path):
    make_package(tmp_path, "busybody", BUSYBODY)
    make_distribution(tmp_path, "busybody", {"busybody": "busybody"}, group="pytest11")
    # Its tests replace methods of the backend by ``monkeypatch``.
    done = conform(tmp_path, "reference", "--d2ldev-requirement=log.one-transfer", "-n", "2")
    assert "busybody" in done.stdout, "the plugin was not loaded"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 requirements: 1 passed" in done.stdout


def test_the_settings_of_the_tests_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "tests").mkdir()
    for folder in (tmp_path, tmp_path / "tests"):
        (folder / "conftest.py").write_text("import no_such_module")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = conform(tmp_path, "reference", "--d2ldev-requirement=log.means")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_warning_of_d2ldev_or_of_the_backend_fails_a_test(pytester, monkeypatch):
    folder = make_backend(pytester.path / "installed", "mine", source=BACKEND)
    monkeypatch.setenv("PYTHONPATH", extend_path([folder]))
    pytester.makepyfile(WARNED_OF)
    result = pytester.runpytest_subprocess("--d2ldev-backend", "mine", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=4, passed=1, warnings=1)


def test_a_missing_driver_gives_one_warning(tmp_path):
    make_backend(tmp_path, "mine", source=BACKEND)
    done = conform(tmp_path, "mine", "--d2ldev-requirement=log.means", "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("no NVIDIA driver here") == 1


@pytest.mark.parametrize(
    ("module", "outcome"),
    [
        ("d2ldev", "failed"),
        ("d2ldev.operations.moving", "failed"),
        ("d2ldev_torch.devices", "failed"),
        ("d2ldev_conformance.suite.conftest", "failed"),
        ("mine.backend", "failed"),
        ("mine.backend.devices", "failed"),
        ("mine.other", "passed"),
        ("mine", "passed"),
        ("d2ldevices", "passed"),
        ("torch.jit", "passed"),
        ("pytest_benchmark.plugin", "passed"),
    ],
)
def test_the_module_of_a_warning_says_whether_it_is_an_error(pytester, module, outcome):
    lines = "\n    ".join(warning_filters("mine.backend"))
    pytester.makeini(f"[pytest]\nfilterwarnings =\n    {lines}\n")
    pytester.makepyfile(
        f"""
        import warnings

        def test_it():
            warnings.warn_explicit("deprecated", DeprecationWarning, "a.py", 1, {module!r})
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(**{outcome: 1}, warnings=int(outcome == "passed"))


def test_the_package_of_a_backend_is_the_one_that_its_class_is_made_in(reference):
    assert package_of(type(framework_of(reference))) == "d2ldev_reference"
