"""``pytest --d2ldev-leaks`` on the tests of a small library that was not written for it."""

import json
import os
import shutil
from importlib.metadata import entry_points

import forking
import pytest
from pages import ROOT, run_page
from processes import extend_path

LIBRARY = """
import torch

def leak(x):
    made = torch.ones(3)
    return x + made

def good(x):
    return x + torch.ones_like(x)

def read(x):
    return x.cpu().numpy()

def make_shift():
    shift = torch.ones(3)
    return lambda x: x + shift

def make_weights(x):
    return torch.ones(len(x))

class Weights:
    def __init__(self, x):
        self.made = torch.ones(len(x))

CACHE = []

def use_cache(x):
    if not CACHE:
        CACHE.append(torch.ones(len(x)))
    return x * CACHE[0]

"""
TESTS = """
import numpy as np
import pytest
import torch
import library
from helper import make

GLOBAL = torch.ones(3)
SHIFT = library.make_shift()

@pytest.fixture
def x():
    return torch.ones(3)

@pytest.fixture(scope="module")
def shared():
    return torch.ones(3)

def test_leak(x):
    np.testing.assert_allclose(library.leak(x), 2)

def test_leak_again(shared):
    assert library.leak(shared).shape == (3,)

@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3)]], ids=["tensor", "list"])
def test_parameter(value):
    assert library.good(*value if isinstance(value, list) else [value]).device.type == "vgpu"

def test_global():
    assert library.good(GLOBAL).device.type == "vgpu"

def test_closure(x):
    assert SHIFT(x).sum() == 6

def test_good(x, shared):
    assert np.sum(library.read(library.good(x + shared + make()))) == 12

@pytest.mark.d2ldev_allow_leaks("library.leak")
def test_allowed(x):
    library.leak(x)

@pytest.mark.d2ldev_allow_leaks
def test_all_allowed(x):
    library.leak(x)

@pytest.mark.d2ldev_skip_leaks
def test_left_out():
    assert library.leak(torch.ones(3)).device.type == "cpu"

def test_without_tensors():
    assert True

def test_broken(x):
    assert library.good(x).sum() == 7

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

def test_both(d2ldev_backend, d2ldev_device):
    made = d2ldev_backend.ones(3, device=d2ldev_device)
    assert d2ldev_backend.device_of(made + made) is d2ldev_device

@pytest.mark.parametrize(argnames=["d2ldev_device"], argvalues=[["gpu:0"]], indirect=True)
def test_given_device(d2ldev_device):
    assert str(d2ldev_device) == "gpu:0"
"""
OTHER_FORMS = """
import asyncio
import unittest

import torch
import library

class TestPlain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = torch.ones(3)

    def setUp(self):
        self.x = torch.ones(3)

    def test_shared(self):
        library.leak(self.shared)

    def test_own(self):
        with self.subTest():
            library.leak(self.x)

class TestTask(unittest.IsolatedAsyncioTestCase):
    async def test_task(self):
        await asyncio.sleep(0)
        library.leak(torch.ones(3))

class TestSetup:
    def setup_method(self):
        self.x = torch.ones(3)

    def test_setup(self):
        library.leak(self.x)

def test_run():
    async def leak():
        return library.leak(torch.ones(3))

    asyncio.run(leak())
"""
OF_FILES = """
import io
import torch

def test_file():
    x, file = torch.ones(3), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert (torch.load(file) + x).sum() == 6
"""
OF_FIXTURES = """
import pytest
import torch
import library

X = torch.ones(3)
OPTION = {"x": X}

@pytest.fixture(scope="module")
def shared():
    return library.Weights(X)

@pytest.fixture
def weights():
    return library.make_weights(OPTION["x"])

def test_shared(shared):
    assert (shared.made + X).sum() == 6

def test_own(weights):
    assert (weights + X).sum() == 6

def test_given(weights):
    library.good(weights)

def test_cached():
    library.use_cache(X)

def test_cached_again():
    library.use_cache(X)
"""
# A wheel announces the plugin; a checkout that was installed before there was one does not.
_NAMED = {point.name for point in entry_points(group="pytest11")}
PLUGIN = [] if "d2ldev_leaks" in _NAMED else ["-p", "d2ldev.leaks.plugin"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "library.py").write_text(LIBRARY)
    (folder / "helper.py").write_text("import torch\n\ndef make():\n    return torch.ones(3)\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_library.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nd2ldev_leaks_tests = helper.py\n")
    return folder


def run(project, *options):
    """Run the tests of the project; the status, and what was written."""
    variables = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    variables |= {"PYTHONPATH": extend_path([project]), "D2LDEV_BACKEND": "torch"}
    variables["CUDA_VISIBLE_DEVICES"] = ""  # the tests count on a machine without a GPU
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *options]
    done = forking.run(("torch", "hypothesis"), arguments, cwd=project, env=variables)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcomes(project):
    """The same run in one process, and in two of pytest-xdist."""

    def end(*options):
        file = project / f"leaks{len(options)}.json"
        status, text = run(project, "--d2ldev-leaks", f"--d2ldev-leaks-json={file}", *options)
        return status, text, json.loads(file.read_text())

    return {"one-process": end(), "xdist": end("-n", "2")}


@pytest.fixture(params=["one-process", "xdist"])
def outcome(request, outcomes):
    return outcomes[request.param]


def test_processes_side_by_side_give_the_same_report(outcomes):
    alone, beside = (
        (status, text.partition("= d2ldev leaks")[2].partition("= short test summary")[0], data)
        for status, text, data in outcomes.values()
    )
    assert len(alone[1].splitlines()) > 2
    assert beside == alone


def test_tests_fail_with_the_line_of_the_library(outcome):
    status, text, _ = outcome
    sentence = "library.py:5 creates on the CPU a tensor that meets one on gpu:1 in add at"
    assert status == 1
    assert f"   2 tests,     2 x  {sentence} library.py:6" in text


def test_the_file_has_the_outcome_of_each_test_and_line(outcome):
    _, text, data = outcome
    ends = {name.partition("::")[2]: end for name, end in data["tests"].items()}
    others = [name for name in ends if name.startswith("test_both") and "torch" not in name]
    assert {name: end for name, end in ends.items() if name not in others} == {
        "test_leak": "leaking",
        "test_leak_again": "leaking",
        "test_parameter[tensor]": "passed",
        "test_parameter[list]": "passed",
        "test_global": "passed",
        "test_closure": "passed",
        "test_good": "passed",
        "test_allowed": "passed",
        "test_all_allowed": "passed",
        "test_without_tensors": "without inputs",
        "test_broken": "failed",
        "test_skipped": "skipped",
        "test_both[torch-gpu:0]": "passed",
        "test_both[torch-gpu:1]": "passed",
        "test_given_device[gpu:0]": "without inputs",
    }
    leak, read = data["lines"]
    assert (data["version"], data["device"], data["backend"]) == (1, "gpu:1", "torch")
    assert {key: leak[key] for key in ("kind", "file", "line", "function", "action", "count")} == {
        "kind": "mix",
        "file": "library.py",
        "line": 5,
        "function": "library.leak",
        "action": "creates",
        "count": 2,
    }
    assert (leak["device"], leak["expected"], leak["operation"]) == ("cpu", "gpu:1", "add")
    assert [name.partition("::")[2] for name in sorted(leak["tests"])] == [
        "test_leak",
        "test_leak_again",
    ]
    assert (read["kind"], read["line"]) == ("read", 12)
    assert "1 more at 1 line" in text


def test_options_allow_lines_and_choose_the_kinds_that_fail(project):
    tests = "tests/test_library.py::test_leak"
    assert run(project, "--d2ldev-leaks", "--d2ldev-leaks-allow", "library.py:5", tests)[0] == 0
    assert run(project, "--d2ldev-leaks", "--d2ldev-leaks-fail", "result,move", tests)[0] == 0
    status, text = run(project, "--d2ldev-leaks", "--d2ldev-leaks-fail", "mox", tests)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "no such kind: mox; the kinds are mix, result, move, refusal, read" in text


def test_a_baseline_accepts_the_leaks_of_its_first_run(project, tmp_path):
    file = tmp_path / "leaks" / "baseline.json"
    options = ["--d2ldev-leaks", f"--d2ldev-leaks-baseline={file}"]
    tests = "tests/test_library.py::test_leak"
    status, text = run(project, *options, tests)
    assert status == 0
    assert f"1 leak is written to {file}" in text
    (leak,) = json.loads(file.read_text())["leaks"]
    assert (leak["kind"], leak["function"]) == ("mix", "library.leak")
    assert leak["source"] == "made = torch.ones(3)"
    moved = tmp_path / "moved"  # its lines have other numbers
    shutil.copytree(project, moved)
    (moved / "library.py").write_text(LIBRARY.replace("import torch", "import torch\n"))
    status, text = run(moved, *options, tests)
    assert status == 0
    assert f"1 leak is accepted by {file}" in text
    (moved / "library.py").write_text(LIBRARY.replace("torch.ones(3)", "torch.zeros(3)"))
    status, text = run(moved, *options, tests)
    assert status == 1
    file.write_text("[]")
    status, text = run(project, *options, tests)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "cannot read leaks from" in text


def test_without_the_option_tests_run_as_ever(project):
    status, text = run(project, "-rs", "-k", "leak or left_out or without or torch")
    assert status == 0
    assert "d2ldev leaks" not in text
    assert "7 passed, 2 skipped" in text
    assert "torch has no gpu:1 here; D2LDEV_VIRTUAL_GPUS=2 makes it" in text


def test_a_framework_that_cannot_is_named_once(project):
    status, text = run(project, "--d2ldev-leaks", "--d2ldev-leaks-backend", "reference")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert text.count("cannot find leaks of gpu:1") == 1


def test_tests_of_other_forms_are_followed(project):
    (project / "tests" / "other_forms.py").write_text(OTHER_FORMS)
    report = project / "other_forms.json"
    run(project, "--d2ldev-leaks", f"--d2ldev-leaks-json={report}", "tests/other_forms.py")
    outcomes = json.loads(report.read_text())["tests"]
    assert len(outcomes) == 5
    assert set(outcomes.values()) == {"leaking"}


def test_a_test_that_reads_its_own_file_passes(project):
    (project / "tests" / "of_files.py").write_text(OF_FILES)
    report = project / "of_files.json"
    run(project, "--d2ldev-leaks", f"--d2ldev-leaks-json={report}", "tests/of_files.py")
    assert [*json.loads(report.read_text())["tests"].values()] == ["passed"]


def test_a_leak_of_a_fixture_or_of_an_earlier_test_is_found_where_it_is_used(project):
    (project / "tests" / "of_fixtures.py").write_text(OF_FIXTURES)
    report = project / "of_fixtures.json"
    run(project, "--d2ldev-leaks", f"--d2ldev-leaks-json={report}", "tests/of_fixtures.py")
    data = json.loads(report.read_text())
    ends = {name.partition("::")[2]: end for name, end in data["tests"].items()}
    assert ends.pop("test_given") == "passed"  # nothing met it
    assert set(ends.values()) == {"leaking"}
    found = {(leak["kind"], leak["line"], len(leak["tests"])) for leak in data["lines"]}
    assert found == {("result", 19, 1), ("result", 23, 1), ("mix", 29, 2)}


def test_the_marks_and_fixtures_of_the_page_do_what_it_says(tmp_path):
    run_page(ROOT / "docs" / "leaks.md", "torch", tmp_path)
    status, text = run(tmp_path, "--d2ldev-leaks", "-k", "not everywhere or torch")
    assert status == 0, text
    assert "= 5 passed" in text
