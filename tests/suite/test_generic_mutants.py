"""``d2ldev conformance NAME --mutants``: mistakes in any backend, and what catches them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.mutants import MUTANTS
from d2ldev_conformance.trial import FILE, NONE
from d2ldev_conformance.trials import OUTCOMES, format_verdicts, try_mutants, write_verdicts
from processes import run_python
from reference_backend import ReferenceFramework

from d2ldev import Backend
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework.testing import MODULES, framework_of

SEED = MUTANTS["tensors.seed-does-nothing"]


def test_there_are_a_dozen_mutants_and_some_of_each_area():
    assert 12 <= len(MUTANTS) <= 21
    assert list(dict.fromkeys(mutant.area for mutant in MUTANTS.values())) == list(MODULES)


def test_each_mutant_is_about_a_method_and_requirements_that_exist():
    known = {explanation.id for explanation in list_explanations()}
    framework = ReferenceFramework(2)
    for mutant in MUTANTS.values():
        assert mutant.likely
        assert set(mutant.likely) <= known
        assert callable(getattr(getattr(framework, mutant.area), mutant.method))


def test_a_mutant_is_in_one_framework_alone():
    broken, sound = (Backend(ReferenceFramework(2)) for _ in range(2))
    SEED.apply(framework_of(broken))
    for backend, is_same in ((sound, True), (broken, False)):
        found = []
        for _ in range(2):
            backend.seed(3)
            found.append(backend.to_numpy(backend.rand(8)).tolist())
        assert (found[0] == found[1]) is is_same


def test_what_a_framework_cannot_be_wrong_in_does_not_apply():
    alone, two = ReferenceFramework(0), ReferenceFramework(2)
    of_gpus = MUTANTS["devices.native-swaps-two"]
    assert "needs 2 GPUs, and there are 0" in of_gpus.find_obstacle(alone)
    assert of_gpus.find_obstacle(two) == ""
    assert "no Devices.is_idle of its own" in MUTANTS[
        "devices.is_idle-is-always-true"
    ].find_obstacle(two)
    two.cannot = {"dlpack": "it keeps no memory"}
    assert "it keeps no memory" in MUTANTS["tensors.from_data-shares-memory"].find_obstacle(two)


class Suite:
    """In the place of the suite: what it says of a mutant, without a process.

    Args:
        outcomes: requirement -> outcome without a mutant; passed by default.
        failures: mutant -> what its process notes; None for a process that leaves nothing.
        statuses: mutant -> the exit status of its process; 1 by default.
    """

    def __init__(self, outcomes=None, failures=None, statuses=None):
        self.outcomes, self.failures, self.statuses = outcomes or {}, failures or {}, statuses or {}
        self.runs = []

    def __call__(self, options, folder, limit):
        folder.mkdir(parents=True)
        (folder / "printed.txt").write_text("collected\nSegmentation fault\n\n")
        given = [option.partition("=") for option in options]
        wanted = [value for name, _, value in given if name == "--d2ldev-requirement"]
        (name,) = (value for option, _, value in given if option == "--d2ldev-mutant")
        self.runs.append((name, wanted))
        rows = [self.row(each, self.outcomes.get(each, "passed")) for each in wanted]
        (folder / "conformance.json").write_text(json.dumps({"requirements": rows}))
        note = {"obstacles": dict.fromkeys(MUTANTS, ""), "failure": self.failures.get(name, {})}
        if note["failure"] is not None:
            (folder / FILE).write_text(json.dumps(note))
        return self.statuses.get(name, 0 if name == NONE else 1)

    @staticmethod
    def row(requirement, outcome):
        return {
            "requirement": requirement,
            "module": "tensors",
            "outcome": outcome,
            "tests": {outcome: 1},
            "reasons": [] if outcome == "passed" else [f"it is {outcome}"],
        }


def fail(requirement, is_own=False):
    return {"requirement": requirement, "problem": "AssertionError: 1 != 2", "is_own": is_own}


def judge(suite):
    """Return mutant -> verdict for the mutants of tensors."""
    found = try_mutants(suite, ["tensors"], lambda verdict: None)
    return {verdict.mutant.name: verdict for verdict in found}


def test_a_requirement_that_fails_has_caught_a_mutant():
    verdict = judge(Suite(failures={SEED.name: fail("create.seeds-everything")}))[SEED.name]
    assert verdict.outcome == "caught"
    assert verdict.requirement == "create.seeds-everything"
    assert verdict.reason == "AssertionError: 1 != 2"


def test_a_mutant_that_nothing_catches_has_run_in_all_areas():
    suite = Suite(statuses={SEED.name: 0})
    assert judge(suite)[SEED.name].outcome == "not caught"
    assert [name for name, _ in suite.runs].count(SEED.name) == 2


def test_a_mutant_whose_requirements_are_skipped_is_not_tried_and_is_counted():
    suite = Suite(outcomes={"create.seeds-everything": "skipped"})
    verdict = judge(suite)[SEED.name]
    assert (verdict.outcome, verdict.reason) == ("not tried here", "it is skipped")
    assert format_verdicts([verdict], 60)[-1].startswith(
        "0 of 1 mutants that apply are caught, 1 not"
    )
    assert SEED.name not in [name for name, _ in suite.runs]


def test_a_mutant_that_itself_fails_is_not_taken_for_one_that_was_caught():
    verdict = judge(Suite(failures={SEED.name: fail("copy.to-moves", is_own=True)}))[SEED.name]
    assert verdict.outcome == "not judged"
    assert "the mutant itself fails here: AssertionError" in verdict.reason


@pytest.mark.parametrize(
    ("status", "told"),
    [(-11, "exit status -11: Segmentation fault"), (None, "no end after 1800 seconds")],
)
def test_a_process_that_crashes_or_hangs_judges_nothing(status, told):
    suite = Suite(failures={SEED.name: None}, statuses={SEED.name: status})
    verdict = judge(suite)[SEED.name]
    assert verdict.outcome == "not judged"
    assert told in verdict.reason


def test_why_a_run_cannot_begin_is_told_without_its_fix():
    def start(options, folder, limit):
        folder.mkdir(parents=True)
        printed = "ERROR: cannot find 3 GPUs: there are 2\n  fix: ask for 2\n"
        (folder / "printed.txt").write_text(printed)
        return 4

    with pytest.raises(UnsupportedValueError, match=r"status 4: ERROR: cannot find 3 GPUs"):
        judge(start)


@pytest.mark.parametrize("options", [[], ["--virtual-gpus", "2"]])
def test_an_unknown_backend_is_named_with_any_number_of_gpus(tmp_path, options):
    done = run_command(*options, folder=tmp_path, name="nonesuch")
    assert done.returncode == 2
    assert "nonesuch" in done.stderr


def test_without_a_green_run_nothing_is_tried():
    suite = Suite(outcomes={"create.seeds-everything": "failed"})
    with pytest.raises(UnsupportedValueError, match=r"fails create\.seeds-everything"):
        judge(suite)
    assert [name for name, _ in suite.runs] == [NONE]


def test_what_caught_a_mutant_has_to_pass_without_one():
    suite = Suite({"create.shapes": "failed"}, {SEED.name: fail("create.shapes")})
    verdict = judge(suite)[SEED.name]
    assert verdict.outcome == "not judged"
    assert verdict.reason == "create.shapes fails without the mutant, too"


def test_an_area_that_is_none_is_refused_as_in_a_run(tmp_path):
    done = run_command("--only", "tensor", folder=tmp_path)
    assert done.returncode == 4
    assert "no such module: tensor; there are devices, tensors" in done.stderr


def test_the_table_says_what_is_wrong_and_what_caught_it(tmp_path):
    suite = Suite(failures={SEED.name: fail("create.seeds-everything")})
    verdicts = list(judge(suite).values())
    lines = format_verdicts(verdicts, 90)
    assert lines[-1] == "1 of 5 mutants that apply are caught, in 1.5 minutes"
    at = next(number for number, line in enumerate(lines) if line.startswith(SEED.name))
    assert "create.seeds-everything" in lines[at]
    assert [line.strip() for line in lines[at + 1 : at + 3]] == [
        SEED.fault,
        "AssertionError: 1 != 2",
    ]
    write_verdicts("reference", verdicts, tmp_path)
    rows = json.loads((tmp_path / "mutants.json").read_text())["mutants"]
    assert [row["mutant"] for row in rows] == [verdict.mutant.name for verdict in verdicts]
    assert {row["outcome"] for row in rows} <= {*OUTCOMES}


def run_command(*options, folder, name="reference", **variables):
    command = [sys.executable, "-m", "d2ldev", "conformance", name, "--mutants", *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
    )


def test_the_suite_catches_a_mutant_of_the_reference_backend(tmp_path):
    done = run_command("--only", "strict", "--report", str(tmp_path / "out"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 mutants that apply are caught" in done.stdout
    (row,) = json.loads((tmp_path / "out" / "mutants.json").read_text())["mutants"]
    assert (row["outcome"], row["requirement"]) == ("caught", "strict.leaves-nothing-patched")


def test_the_users_number_of_gpus_stays_and_a_run_that_tries_nothing_says_so(tmp_path):
    done = run_command("--only", "parallel", folder=tmp_path, D2LDEV_VIRTUAL_GPUS="0")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "0 of 1 mutants that apply are caught, 1 not tried here" in done.stdout


@pytest.mark.parametrize("option", [["--profile", "quick"], ["--require-gpus", "1"], ["--merge"]])
def test_options_that_mutants_do_not_take_are_refused(tmp_path, option):
    done = run_command(*option, folder=tmp_path)
    assert done.returncode == 4
    assert "fix: leave out" in done.stderr


def list_processes(folder):
    """Return the command lines of the processes that use a folder, but for ``ps`` itself."""
    listed = subprocess.run(["ps", "-wwAo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if f"--basetemp={folder}" in line]


def wait_until(is_true):
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_processes_of_mutants_too(tmp_path, number):
    command = [sys.executable, "-m", "d2ldev", "conformance", "reference", "--mutants"]
    variables = {**os.environ, "TMPDIR": str(tmp_path), "D2LDEV_VIRTUAL_GPUS": "2"}
    options = {"env": variables, "cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options, stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: list_processes(tmp_path))
            process.send_signal(number)
            printed, told = process.communicate(timeout=60)
        finally:
            process.terminate()
    assert process.returncode not in (0, -number)
    assert "not judged" not in printed
    assert "Traceback" not in told
    assert list_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("--report", str(tmp_path / "file" / "out"), folder=tmp_path)
    assert done.returncode == 4
    assert "error: cannot write the report" in done.stderr


@pytest.mark.parametrize(
    ("change", "method"),
    [
        # What swaps layers cannot swap the function that ends a block.
        ("files.layers-swaps-two", "strict.refuse_mixing"),
        # Then the suite cannot list the dtypes to test, which are no method.
        ("tensors.seed-does-nothing", "tensors.dtype_names"),
    ],
)
def test_an_error_of_the_mutant_itself_is_told_apart(tmp_path, change, method):
    code = f"""
        from dataclasses import replace
        from pathlib import Path
        import d2ldev_conformance, pytest
        from d2ldev_conformance.mutants import MUTANTS

        mutant = replace(MUTANTS[{change!r}], name="{method}-breaks")
        MUTANTS[mutant.name] = mutant
        suite = Path(d2ldev_conformance.__file__).parent
        arguments = ["--d2ldev-backend=reference", "--d2ldev-mutant", mutant.name, "-qx"]
        arguments += ["--basetemp={tmp_path / "inner"}", "--d2ldev-only={method.partition(".")[0]}"]
        arguments += ["--d2ldev-report={tmp_path}"]
        pytest.main([str(suite), *arguments, "-c", str(suite / "pytest.ini"), "-pno:cacheprovider"])
        show(0)
    """
    run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "2"}, folder=tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["failure"]["is_own"]
