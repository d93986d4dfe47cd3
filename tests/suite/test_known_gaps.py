"""The known gaps, which the package of a backend declares in ``known_gaps.toml``."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from d2ldev_conformance.known_gaps import check_cases, read_known_gaps
from d2ldev_conformance.provision import check_declared, composites, list_provided
from processes import conform, extend_path, make_backend

import d2ldev
from d2ldev.framework.testing import framework_of

# A backend that counts from 1: it breaks one requirement.
OFF_BY_ONE = """
from d2ldev_reference import ReferenceFramework
from d2ldev_reference.tensors import ReferenceTensors

class MyTensors(ReferenceTensors):
    def arange(self, start, stop, step, dtype, native):
        return super().arange(start, stop, step, dtype, native) + (1 if {is_wrong} else 0)

class MyFramework(ReferenceFramework):
    name = {name!r}

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.tensors = MyTensors()
"""
REQUIREMENT = "create.arange"
GAP = f"""
[[gap]]
requirement = "{REQUIREMENT}"
case = "arguments0"
reason = "it counts from 1"
link = "https://example.org/issues/1"
"""


def run_suite(folder, *, is_wrong, gaps):
    """Run one requirement on the backend "mine" with a file of gaps; the finished process."""
    make_backend(folder, source=OFF_BY_ONE.replace("{is_wrong}", str(is_wrong)))
    (folder / "mine_backend" / "known_gaps.toml").write_text(gaps, encoding="utf-8")
    options = ("--d2ldev-requirement", REQUIREMENT, "-k", "cpu and arguments0", "-rx")
    return subprocess.run(
        [sys.executable, "-m", "d2ldev", "conformance", "mine", "--", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": extend_path([folder]), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_declared_gap_is_not_a_failure(tmp_path):
    done = run_suite(tmp_path, is_wrong=True, gaps=GAP)
    assert done.returncode == 0, done.stdout
    assert f"known gap: {REQUIREMENT}: ['it counts from 1 (https://example.org/" in done.stdout


def test_a_gap_that_has_closed_fails(tmp_path):
    done = run_suite(tmp_path, is_wrong=False, gaps=GAP)
    assert done.returncode == 1
    told = f"known gap {REQUIREMENT} is closed: remove its entry from known_gaps.toml; it was: it "
    assert told in done.stdout
    assert "XPASS" not in done.stdout


@pytest.fixture
def make_framework(tmp_path, monkeypatch):
    """Makes a framework whose package has a file of gaps."""

    def make(gaps):
        make_backend(tmp_path, source=OFF_BY_ONE.replace("{is_wrong}", "True"))
        (tmp_path / "mine_backend" / "known_gaps.toml").write_text(gaps, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("mine_backend", "mine_backend.wiring"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        framework = importlib.import_module("mine_backend.wiring").MyFramework()
        monkeypatch.setitem(sys.modules, "mine_backend", sys.modules["mine_backend"])
        return framework

    return make


@pytest.mark.parametrize(
    ("requirement", "case", "platforms", "is_covered"),
    [
        (REQUIREMENT, "test_it[cpu-arguments0]", {"cpu"}, True),
        (REQUIREMENT, "test_it[cpu-arguments1]", {"cpu"}, False),
        ("create.full", "test_it[cpu-arguments0]", {"cpu"}, False),
    ],
)
def test_a_gap_covers_its_own_cases(make_framework, requirement, case, platforms, is_covered):
    (gap,) = read_known_gaps(make_framework(GAP))
    assert gap.covers(requirement, case, platforms) is is_covered
    on_cuda = gap._replace(platform="cuda")
    assert not on_cuda.covers(requirement, case, platforms)
    assert on_cuda.covers(requirement, case, {"cpu", "cuda"}) is is_covered


def test_a_package_without_the_file_has_no_gaps(reference):
    assert read_known_gaps(framework_of(reference)) == []


@pytest.mark.parametrize(
    ("gaps", "problem"),
    [
        (GAP.replace("reason", "why"), "unexpected keyword argument 'why'"),
        ("[[gap]", "known_gaps.toml cannot be read: "),
        (GAP.replace("[[gap]]", "[[gaps]]"), "known_gaps.toml has gaps, and the name of a row is"),
        (
            GAP.replace(REQUIREMENT, "create.arrange"),
            "has 'create.arrange', the id of no requirement; the nearest is create.arange",
        ),
        (
            GAP.replace(REQUIREMENT, "strict.no-such-id"),
            "has 'strict.no-such-id', the id of no requirement; the nearest is strict.",
        ),
    ],
    ids=["a field that there is not", "no TOML", "another table", "a misspelt id", "another id"],
)
def test_an_unreadable_file_is_reported(make_framework, gaps, problem):
    with pytest.raises(pytest.UsageError, match=re.escape(problem)):
        read_known_gaps(make_framework(gaps))


NAMES = {REQUIREMENT: ["test_it[cpu-arguments0]", "test_it[gpu0-arguments0]"]}


@pytest.mark.parametrize("case", ["", "arguments0", "cpu-arguments0", "gpu1", "[gpu1-arg"])
def test_a_case_of_a_test_is_one(make_framework, case):
    """How many GPUs there are decides which of them a test takes."""
    (gap,) = read_known_gaps(make_framework(GAP))
    check_cases([gap._replace(case=case)], NAMES, {"cpu"})


@pytest.mark.parametrize("case", ["arguments7", "float33"])
def test_a_case_of_no_test_is_refused(make_framework, case):
    (gap,) = read_known_gaps(make_framework(GAP))
    told = f"the case '{case}' of {REQUIREMENT}, which is in the name of no test of it: test_it["
    with pytest.raises(pytest.UsageError, match=re.escape(told)):
        check_cases([gap._replace(case=case)], NAMES, {"cpu"})
    check_cases([gap._replace(case=case)], {}, {"cpu"})  # --only another module
    check_cases([gap._replace(case=case, platform="cuda")], NAMES, {"cpu"})


def test_an_unknown_id_and_a_wrong_case_end_a_run_of_another_module(tmp_path):
    """Nothing of the requirement is collected there."""
    make_backend(tmp_path, source=OFF_BY_ONE.replace("{is_wrong}", "False"))
    file = tmp_path / "mine_backend" / "known_gaps.toml"
    ends = {
        ("devices", GAP.replace(REQUIREMENT, "create.arrange")): "the nearest is create.arange",
        (
            "tensors",
            GAP.replace("arguments0", "arguments7"),
        ): "has the case 'arguments7' of ",
    }
    for (module, gaps), told in ends.items():
        file.write_text(gaps, encoding="utf-8")
        done = conform(tmp_path, "mine", f"--d2ldev-only={module}", "--co", "-q")
        assert done.returncode == 4
        assert told in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("create.arrange", "no such requirement: create.arrange; the nearest is create.arange"),
        (REQUIREMENT, f"--d2ldev-only leaves out the requirement {REQUIREMENT}"),
    ],
)
def test_a_requirement_that_is_not_collected_is_refused_with_the_reason(tmp_path, asked, told):
    options = ("--d2ldev-only=devices", f"--d2ldev-requirement={asked}", "--co", "-q")
    done = conform(tmp_path, "reference", *options)
    assert done.returncode == 4
    assert told in done.stderr


PROVISIONS = {
    "CANNOT = {'composits': 'it has none'}": "CANNOT in provision has 'composits', which the suite "
    "does not ask for; the nearest is 'composites'",
    "import json\njson.loads('{')": "mine_backend.provision fails to import: JSONDecodeError: ",
}


@pytest.mark.parametrize(("source", "told"), PROVISIONS.items(), ids=["a name", "an import"])
def test_what_is_wrong_in_a_provision_is_told_in_one_line(make_framework, tmp_path, source, told):
    framework = make_framework("")
    sys.modules.pop("mine_backend.provision", None)
    file = tmp_path / "mine_backend" / "provision.py"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(pytest.UsageError, match=re.escape(told)) as caught:
        check_declared(framework)
    if "import" in told:
        assert str(caught.value).endswith(f" ({file}:2)")


def test_a_function_of_a_provision_that_fails_is_told_with_its_line(make_framework, tmp_path):
    framework = make_framework("")
    sys.modules.pop("mine_backend.provision", None)
    file = tmp_path / "mine_backend" / "provision.py"
    file.write_text("def composites(backend):\n    return len(0)\n", encoding="utf-8")
    told = (
        "provision.composites of mine_backend fails: TypeError: object of type 'int' has no len()"
    )
    with pytest.raises(pytest.Collector.CollectError) as caught:
        list_provided(d2ldev.Backend(framework), composites)
    assert str(caught.value) == f"{told} ({file}:2)"
