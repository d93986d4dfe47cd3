"""``d2ldev conformance``: from its arguments to pytest's command line, and pytest's status."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import run_command
from d2ldev_conformance import trials
from d2ldev_conformance.profiles import PROFILES
from d2ldev_conformance.schema import find_problems
from installs import find_extras
from reference_backend import ReferenceFramework

from d2ldev.cli.conformance import NO_TESTS, Request, command, list_runs, try_mutants
from d2ldev.registry import loading

SUITE = Path("suite")
START = [sys.executable, "-m", "pytest", str(SUITE), "--d2ldev-backend", "torch"]
SETTINGS = ["-p", "no:cacheprovider", "-c", str(SUITE / "pytest.ini"), "--rootdir", "suite"]


def make_command(**options):
    """Return the command line for a request about torch."""
    return command(Request("torch", **options), SUITE)


def test_a_name_alone_adds_no_options():
    assert make_command() == START + SETTINGS


def test_required_gpus_are_the_plugins_option():
    assert make_command(require_gpus=2) == [*START, "--d2ldev-require-gpus", "2", *SETTINGS]


def test_a_report_is_the_plugins_option_and_pytests():
    junit = ["--junitxml", str(Path("out") / "conformance.junit.xml")]
    assert make_command(report=Path("out")) == [*START, "--d2ldev-report", "out", *junit, *SETTINGS]


def test_a_profile_is_the_plugins_option():
    assert make_command(profile="quick") == [*START, "--d2ldev-profile", "quick", *SETTINGS]


def test_further_arguments_come_last_so_that_they_win():
    assert make_command(extra=("-p", "cacheprovider")) == [*START, *SETTINGS, "-p", "cacheprovider"]


def everywhere(**options):
    """Return the runs of the profile on the reference backend."""
    return list_runs(Request("reference", profile="everywhere", **options), PROFILES)


def test_everywhere_is_the_cpu_alone_and_two_virtual_gpus_and_real_ones(monkeypatch):
    monkeypatch.setattr(loading, "count_real_gpus", lambda name: 3)
    runs = everywhere(report=Path("out"))
    assert [(r.virtual_gpus, r.require_gpus) for r in runs] == [(0, 0), (2, 2), (None, 3)]
    names = ["cpu", "virtual-2", "machine"]
    assert [r.report for r in runs] == [Path("out") / name for name in names]


def test_without_real_gpus_everywhere_is_two_runs():
    assert [r.virtual_gpus for r in everywhere()] == [0, 2]


def test_a_backend_without_virtual_gpus_has_no_run_on_them(monkeypatch):
    monkeypatch.setattr(ReferenceFramework, "max_virtual_gpus", 0)
    assert [r.virtual_gpus for r in everywhere()] == [0]


def test_the_runs_everywhere_are_made_and_reported(tmp_path):
    done = run_command(
        *("conformance", "reference", "--profile", "everywhere", "--only", "devices"),
        *("--report", str(tmp_path / "report")),
        *("--", "-k", "there_is_one_cpu", f"--basetemp={tmp_path / 'inner'}"),
    )
    assert done.returncode == 0
    assert sorted(folder.name for folder in (tmp_path / "report").iterdir()) == ["cpu", "virtual-2"]


@pytest.mark.parametrize("option", ["--require-gpus", "--virtual-gpus"])
def test_a_negative_number_is_a_usage_error(option):
    assert run_command("conformance", "reference", option, "-1").returncode == 2


def test_a_name_has_to_be_given():
    assert run_command("conformance").returncode == 2


def test_a_file_is_refused_as_the_folder_of_a_report(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("conformance", "reference", "--report", str(tmp_path / "file"))
    assert done.returncode == 2


@pytest.mark.parametrize("module", ["pytest", "hypothesis"])
def test_without_the_suites_packages_the_install_line_is_shown(module):
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from d2ldev.cli.main import app; app(['conformance', 'reference'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert f"{module} is not installed\n  fix: pip install" in done.stderr
    assert find_extras(done.stderr) == ["test"]


def test_a_suite_that_passes_has_exit_status_0_and_leaves_its_report(tmp_path):
    arguments = ("conformance", "reference", "--virtual-gpus", "2", "--only", "tensors")
    extra = ("-q", "-k", "test_copying", f"--basetemp={tmp_path / 'temporary'}")
    done = run_command(*arguments, "--report", str(tmp_path / "out"), "--", *extra)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {"conformance.json", "conformance.junit.xml", "conformance.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    suites = ElementTree.parse(tmp_path / "out" / "conformance.junit.xml").getroot()
    assert int(suites[0].attrib["tests"]) > 0
    report = json.loads((tmp_path / "out" / "conformance.json").read_text(encoding="utf-8"))
    assert list(find_problems(report)) == []
    assert report["exit_status"] == 0


def test_kept_reports_are_merged_without_a_run(tmp_path):
    kept = Path(__file__).parents[3] / "conformance" / "results"
    reports = [str(kept / f"torch-{platform}.json") for platform in ("cpu", "virtual")]
    done = run_command("conformance", "--merge", *reports, "--report", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"matrix.json", "matrix.html"}
    matrix = json.loads((tmp_path / "out" / "matrix.json").read_text())
    assert [run["source"] for run in matrix["runs"]] == ["torch-cpu", "torch-virtual"]


def test_a_merge_prints_its_notes_without_control_characters(tmp_path):
    kept = Path(__file__).parents[3] / "conformance" / "results" / "torch-cpu.json"
    report = json.loads(kept.read_text(encoding="utf-8"))
    for name in ("a", "b"):
        report["commit"], report["suite"] = f"{name}\x1b[2J", name
        (tmp_path / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    done = run_command("conformance", "--merge", str(tmp_path), "--report", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    told = "The runs may be of different suites. d2ldev 0.1.0, interface 1, commit a?[2J"
    assert f"note: {told}" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_merge_needs_a_folder(tmp_path):
    done = run_command("conformance", "--merge", str(tmp_path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "fix: add --report DIR" in done.stderr


@pytest.mark.parametrize(
    "options",
    [["--virtual-gpus", "0"], ["--require-gpus", "0"], ["--profile", "quick"], ["--only", "files"]],
    ids=lambda options: options[0],
)
def test_a_merge_refuses_the_options_of_a_run(tmp_path, options):
    arguments = ("conformance", "--merge", str(tmp_path), "--report", str(tmp_path / "out"))
    done = run_command(*arguments, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"cannot merge reports with {options[0]}: --merge runs nothing" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_merge_names_the_report_that_is_missing(tmp_path):
    missing = str(tmp_path / "none.json")
    done = run_command("conformance", "--merge", missing, "--report", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "none.json: FileNotFoundError" in done.stderr
    assert not (tmp_path / "out").exists()


def write_kept(folder, **changes):
    """Write a kept report with one requirement that has another outcome, and return its path."""
    kept = Path(__file__).parents[3] / "conformance" / "results" / "torch-cpu.json"
    report = json.loads(kept.read_text(encoding="utf-8"))
    row = next(row for row in report["requirements"] if row["outcome"] == "passed")
    for outcome, count in (("passed", -1), ("failed", 1)) if changes else ():
        report["summary"][outcome] += count
    row.update(changes)
    path = folder / f"{'new' if changes else 'old'}.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    return str(path)


def test_a_comparison_lists_what_changed_and_fails_if_that_is_worse(tmp_path):
    old = write_kept(tmp_path)
    new = write_kept(tmp_path, outcome="failed", tests={"failed": 1})
    for places, status, told in (
        ([old, old], 0, "as before"),
        ([old, new], 1, "began to fail"),
        ([new, old], 0, "began to pass"),
    ):
        done = run_command("conformance", "--compare", *places)
        assert done.returncode == status, done.stdout + done.stderr
        assert told in done.stdout


@pytest.mark.parametrize("names", [["old"], ["old", "old", "old"]])
def test_a_comparison_takes_the_old_and_the_new(tmp_path, names):
    done = run_command("conformance", "--compare", *(write_kept(tmp_path) for _ in names))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{len(names)} given" in done.stderr
    assert "fix: d2ldev conformance --compare OLD NEW" in done.stderr


@pytest.mark.parametrize(
    "options",
    [["--virtual-gpus", "0"], ["--only", "files"], ["--report", "out"], ["--merge"]],
    ids=lambda options: options[0],
)
def test_a_comparison_refuses_the_options_of_others(tmp_path, options):
    old = write_kept(tmp_path)
    done = run_command("conformance", "--compare", old, old, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"cannot compare reports with {options[0]}: --compare runs and writes" in done.stderr


def test_a_comparison_names_the_report_that_is_missing(tmp_path):
    missing = str(tmp_path / "none.json")
    done = run_command("conformance", "--compare", write_kept(tmp_path), missing)
    assert done.returncode == 1
    assert "none.json: FileNotFoundError" in done.stderr


def test_too_few_gpus_are_pytests_usage_error():
    done = run_command("conformance", "reference", "--virtual-gpus", "0", "--require-gpus", "1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "1 GPUs are required" in done.stderr


def test_nightly_tests_alone_are_a_usage_error_without_their_profile():
    done = run_command("conformance", "reference", "--only", "parallel", "--", "-m", "nightly")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "all of it takes minutes, add --profile nightly" in done.stderr


def test_a_profile_runs_once_for_each_number_of_virtual_gpus(monkeypatch):
    monkeypatch.setattr(ReferenceFramework, "max_virtual_gpus", 4)
    request = Request("reference", profile="default", report=Path("out"))
    runs = list_runs(request, PROFILES)
    assert [(r.virtual_gpus, r.require_gpus) for r in runs] == [(None, None), (2, 2), (4, 4)]
    assert [r.report for r in runs] == [
        Path("out/machine"),
        Path("out/virtual-2"),
        Path("out/virtual-4"),
    ]


def test_a_profile_asks_a_backend_for_no_more_gpus_than_it_makes(monkeypatch):
    for name in PROFILES:
        runs = list_runs(Request("reference", profile=name), PROFILES)
        assert {run.virtual_gpus for run in runs} <= {None, 0, 2}
        assert len(runs) == len(set(runs))
    monkeypatch.setattr(ReferenceFramework, "max_virtual_gpus", 0)
    (run,) = list_runs(Request("reference", profile="quick"), PROFILES)
    assert run.virtual_gpus is None


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_with_a_number_of_virtual_gpus_is_one_run(name):
    request = Request("torch", profile=name, virtual_gpus=4)
    assert list_runs(request, PROFILES) == [request]


def test_a_misspelt_profile_is_a_usage_error_that_lists_the_choices():
    done = run_command("conformance", "reference", "--profile", "quik")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert all(name in done.stderr for name in PROFILES)


def test_a_profile_needs_tests_in_one_of_its_runs():
    # On virtual GPUs killed runs end as on the CPU: the second run has none of them.
    selected = ("--only", "training", "--", "--collect-only", "-q", "-k", "test_killed_runs")
    done = run_command("conformance", "reference", "--profile", "default", *selected)
    assert done.returncode == 0


def test_a_profile_runs_each_of_its_processes():
    nothing = ("--only", "devices", "--", "--collect-only", "-q", "-k", "no_such_test")
    done = run_command("conformance", "reference", "--profile", "default", *nothing)
    assert done.stdout.count("The conformance suite on reference") == 2
    assert done.returncode == 5


@pytest.mark.parametrize(("virtual_gpus", "status"), [("0", 5), ("2", 0)])
def test_the_nightly_profile_runs_nightly_tests_where_there_are_gpus(virtual_gpus, status):
    done = run_command(
        *("conformance", "reference", "--virtual-gpus", virtual_gpus, "--profile", "nightly"),
        *("--only", "parallel", "--", "--collect-only", "-q", "-m", "nightly"),
    )
    assert done.returncode == status, done.stdout + done.stderr


def test_an_unwritable_report_is_reported_before_the_tests_run(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("conformance", "reference", "--report", str(tmp_path / "file" / "out"))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "cannot write the report" in done.stderr
    assert "passed" not in done.stdout


def test_an_empty_name_is_not_a_backend():
    done = run_command("conformance", "")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "cannot use the backend ''" in done.stderr


@pytest.mark.parametrize(
    ("real", "variable", "given", "number"),
    [(0, "", None, 2), (2, "", None, None), (0, "1", None, None), (2, "", 2, 2)],
)
def test_mutants_get_virtual_gpus_only_where_nothing_gives_others(
    monkeypatch, real, variable, given, number
):
    requests = []

    def keep(start, *_):
        requests.append(start.args[0])
        return []

    monkeypatch.setattr(trials, "try_mutants", keep)
    monkeypatch.setattr(loading, "count_real_gpus", lambda name: real)
    monkeypatch.setenv("D2LDEV_VIRTUAL_GPUS", variable)
    assert try_mutants(Request("reference", virtual_gpus=given), []) == NO_TESTS
    assert [request.virtual_gpus for request in requests] == [number]
