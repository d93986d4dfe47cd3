"""The first hours of a backend's author: a module at a time, and one line for each cause."""

import inspect
import json
import pickle
from pathlib import Path

import pytest
from d2ldev_conformance import provision
from d2ldev_conformance.provision import MODULE_OF_KIND
from d2ldev_conformance.schema import read_report
from d2ldev_conformance.unbegun import find_unbegun_method
from processes import conform, make_backend

from d2ldev.framework import NotBegunError

ROOT = Path(__file__).parents[2]
SMALL = """
from d2ldev.framework import Framework
from mine_backend.devices import ReferenceDevices
from mine_backend.tensors import ReferenceTensors

class MyTensors(ReferenceTensors):
    pass

class MyFramework(Framework):
    interface = 1
    name = {name!r}
    distributions = ("array-api-strict",)

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.devices, self.tensors = ReferenceDevices(0), MyTensors()
"""
HEAD = "class MyFramework(Framework):"


@pytest.fixture
def small(tmp_path):
    """Install a backend that has devices and tensors only, in a package of its own.

    Its source may be changed: ``{old: new}``.
    """

    def make(changes=(), provision=""):
        source = SMALL
        for old, new in dict(changes).items():
            assert old in source
            source = source.replace(old, new)
        make_backend(tmp_path, source=source, requires=("array_api_strict",))
        package = tmp_path / "mine_backend"
        for module in ("devices", "tensors"):
            text = (
                Path(__file__).parents[2] / "backends" / "d2ldev_reference" / f"{module}.py"
            ).read_text("utf-8")
            text = text.replace("d2ldev_reference", "mine_backend")
            (package / f"{module}.py").write_text(text, "utf-8")
        (package / "provision.py").write_text(provision, "utf-8")
        return tmp_path

    return make


def only(*modules):
    return [f"--d2ldev-only={module}" for module in modules]


def lines_with(done, text):
    return [line for line in done.stdout.splitlines() if text in line]


def test_devices_are_tested_before_there_are_models(small):
    done = conform(small(), "mine", *only("devices"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "devices done, 1 of 7: next, tensors"
    assert lines_with(done, " 0 failed, 0 not begun, ")


def test_what_is_not_begun_is_one_line_with_its_method_and_page(small):
    done = conform(small(), "mine", *only("models"))
    assert done.returncode == 1
    told = "write Models.mlp (docs/write-a-backend.md#models)"
    (line,) = lines_with(done, "tests: write Models.mlp")
    assert line.endswith(told)
    assert lines_with(done, f"next, models: {told}")
    assert not lines_with(done, "Traceback") + lines_with(done, "NotBegunError")
    assert len(lines_with(done, "Models.mlp")) == 2


def test_what_is_not_begun_has_its_own_column_in_the_report(small):
    folder = small()
    out = f"--d2ldev-report={folder / 'out'}"
    done = conform(folder, "mine", *only("models"), "-k", "mlp", out)
    report = json.loads((folder / "out" / "conformance.json").read_text("utf-8"))
    (row,) = (row for row in report["requirements"] if row["requirement"] == "mlp.shape")
    assert row["outcome"] == "not begun"
    assert row["reasons"][0].startswith("write Models.mlp ")
    assert report["summary"]["not begun"] >= 1
    assert report["exit_status"] == done.returncode == 1
    page = (folder / "out" / "conformance.html").read_text("utf-8")
    assert "exit status 1" in page
    assert row["reasons"][0] in page


def test_a_d2ldev_without_a_commit_reports_the_one_it_is_given(small, monkeypatch):
    folder = small()
    monkeypatch.setenv("PATH", "")  # without git, a checkout knows as little as a wheel
    options = ("-k", "same_backend", f"--d2ldev-report={folder / 'out'}")
    conform(folder, "mine", *only("devices"), *options, "--d2ldev-commit=6fa62970-dirty")
    report = json.loads((folder / "out" / "conformance.json").read_text("utf-8"))
    assert report["commit"] == "6fa62970-dirty"


def test_a_run_that_tests_nothing_does_not_pass(small):
    cannot = f'{HEAD}\n    cannot = {{"mlp": "it has no layers"}}\n'
    done = conform(small({HEAD: cannot}), "mine", *only("models"), "-k", "test_mlp")
    assert done.returncode != 0
    assert lines_with(done, "nothing was tested")
    assert lines_with(done, " 0 failed, 0 not begun, ")


def test_a_module_of_which_nothing_passed_is_not_done(small):
    done = conform(small(), "mine", *only("devices,models"), "-k", "same_backend or maps_features")
    assert done.returncode == 1
    assert lines_with(done, "nothing passed in models")
    assert not lines_with(done, "nothing passed in devices")


@pytest.mark.parametrize("line", ["interface = 1", "super().__init__(virtual_gpus)"])
def test_a_warning_of_an_import_is_named_with_the_line_that_ignores_it(small, monkeypatch, line):
    warns = "__import__('warnings').warn('no ccache found', UserWarning)"
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    done = conform(small({line: f"{line}; {warns}"}), "mine", *only("devices"))
    assert done.returncode == 4
    assert "warns, and warnings are errors here: UserWarning: no ccache found" in done.stderr
    ignored = "warnings.filterwarnings('ignore', 'no ccache found') at the top of mine_backend"
    assert f"fix: {ignored}, or mend what warns" in done.stderr


def test_every_function_of_provision_has_a_module():
    functions = {
        name
        for name, value in vars(provision).items()
        if getattr(value, "__module__", "") == provision.__name__
        and inspect.isfunction(value)
        and list(inspect.signature(value).parameters) == ["backend"]
    }
    has_default = {"samples", "classifiers", "models_of_sequences"}
    assert {name for name in functions if not name.startswith("_")} == {
        *MODULE_OF_KIND
    } | has_default


@pytest.mark.parametrize("kind", sorted(MODULE_OF_KIND))
def test_the_guide_for_authors_has_each_kind_of_object_in_the_row_of_its_module(kind):
    text = (Path(__file__).parents[2] / "docs" / "set-up-of-the-suite.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{MODULE_OF_KIND[kind]}` |")]
    assert f"`{kind}`" in rows[-1]


@pytest.mark.parametrize("kind", sorted(MODULE_OF_KIND))
def test_no_kind_of_object_is_missing_in_silence(reference, monkeypatch, kind):
    monkeypatch.setattr("d2ldev_reference.provision.CANNOT", {})
    monkeypatch.delattr(f"d2ldev_reference.provision.{kind}", raising=False)
    with pytest.raises(NotBegunError) as caught:
        provision.check_provided(reference, kind)
    assert caught.value.method == f"provision.{kind}"


def test_a_call_of_the_framework_is_given_or_refused_with_a_reason(reference, monkeypatch):
    assert provision.take_own_call(reference, "ones")(None).shape == (2, 2)
    with pytest.raises(provision.NotProvidedError, match="draws no numbers"):
        provision.take_own_call(reference, "random")
    monkeypatch.setattr("d2ldev_reference.provision.own_tensors", lambda backend: {})
    with pytest.raises(NotBegunError, match="'ones'"):
        provision.take_own_call(reference, "ones")


def test_a_module_that_is_not_there_is_refused_with_those_that_are(small):
    done = conform(small(), "mine", *only("rooms"))
    assert done.returncode == 4
    names = "devices, tensors, models, files, strict, training, parallel"
    assert f"no such module: rooms; there are {names}" in done.stderr


def test_one_cause_of_many_failures_is_printed_once(small):
    broken = "    def device_of(self, x):\n        raise RuntimeError('it is broken')\n"
    folder = small({"    pass\n": broken})
    done = conform(folder, "mine", *only("tensors"), "-k", "a_tensor_is_made_where_it_is_wanted")
    assert done.returncode == 1
    assert lines_with(done, "E       RuntimeError: it is broken") == lines_with(done, "E  ")
    (line,) = lines_with(done, "failed: ")
    assert line.startswith("failed: create.on-the-device: ")
    assert lines_with(done, ", 9 failed of the same cause in ")


STOPPING = {
    "-x": ("raise RuntimeError('it is broken')", ["-x"], 1, "RuntimeError: it is broken"),
    "a worker dies": (
        "import os; os._exit(3)",
        ["-n", "1", "--max-worker-restart=0"],
        1,
        "crashed while running",
    ),
    "Ctrl-C": ("raise KeyboardInterrupt", [], 2, ""),
}


@pytest.mark.parametrize(
    ("body", "options", "status", "reason"), STOPPING.values(), ids=STOPPING.keys()
)
def test_what_a_run_did_not_come_to_is_not_run(small, body, options, status, reason):
    """It is neither failed nor passed, in the terminal and in the report."""
    if "-n" in options:
        pytest.importorskip("xdist")
    folder = small({"    pass\n": f"    def device_of(self, x):\n        {body}\n"})
    select = ["-k", "test_storage", f"--d2ldev-report={folder / 'out'}"]
    done = conform(folder, "mine", *only("tensors"), *select, *options)
    assert done.returncode == status, done.stdout
    report = read_report(folder / "out" / "conformance.json")
    counts = report["summary"]
    reasons = [row["reasons"] for row in report["requirements"] if row["outcome"] == "failed"]
    assert counts["failed"] == len(reasons) == bool(reason), done.stdout
    assert all(reason in text for each in reasons for text in each[:1])
    assert counts["not run"] > 5
    (line,) = lines_with(done, "not run: ")
    assert line == f"not run: {counts['not run']} requirements: the run ended before"
    assert lines_with(done, f" {counts['failed']} failed, 0 not begun, ")


def test_a_method_that_raises_not_implemented_is_not_begun(small):
    unwritten = "    def dtype_of(self, x):\n        raise NotImplementedError\n"
    folder = small({"    pass\n": unwritten})
    done = conform(folder, "mine", *only("tensors"), "-k", "dtype_of_a_tensor_is_taken")
    assert done.returncode != 0
    page = "(docs/write-a-backend.md#tensors)"
    assert lines_with(done, f"tests: write MyTensors.dtype_of {page}")


def raise_in(module, error):
    """Return an error that code of a module raises."""
    with pytest.raises(NotImplementedError) as caught:
        exec(f"raise {error}", {"__name__": module})
    return caught.value


def test_only_a_bare_error_of_the_backend_says_that_a_method_is_not_begun():
    error = raise_in("mine_backend.tensors", "NotImplementedError")
    assert find_unbegun_method(error, "mine_backend") == "<module>"
    assert find_unbegun_method(error, "mine") == ""
    error = raise_in("mine_backend.tensors", "NotImplementedError('arange of int4')")
    assert find_unbegun_method(error, "mine_backend") == ""


def test_a_method_is_found_behind_the_error_of_the_core():
    def translate():
        try:
            raise NotBegunError("Tensors.full")
        except NotBegunError as error:
            raise ValueError("translated") from error

    with pytest.raises(ValueError, match="translated") as caught:
        translate()
    assert find_unbegun_method(caught.value, "mine_backend") == "Tensors.full"


def test_the_error_of_what_is_not_begun_can_be_sent_to_another_process():
    error = pickle.loads(pickle.dumps(NotBegunError("Models.mlp", "make an MLP")))
    assert (error.method, error.attempted) == ("Models.mlp", "make an MLP")
    assert isinstance(error, NotImplementedError)


FROZEN = [*only("training"), "-k", "model_that_is_frozen"]


def test_a_function_that_provision_lacks_is_not_begun(small):
    done = conform(small(), "mine", *FROZEN)
    page = "(docs/set-up-of-the-suite.md)"
    assert lines_with(done, f"tests: write provision.untrainable_models {page}")
    assert lines_with(done, " 1 not begun, 0 known gap, 0 cannot, ")


def test_what_provision_cannot_give_is_declared_there(small):
    reason = "all of its numbers are trained"
    folder = small(provision=f"CANNOT = {{'untrainable_models': {reason!r}}}")
    done = conform(folder, "mine", *FROZEN)
    assert lines_with(done, reason)
    assert lines_with(done, " 0 not begun, 0 known gap, 1 cannot, ")
