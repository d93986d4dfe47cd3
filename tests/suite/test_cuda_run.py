"""The run on a machine with a GPU: what becomes of its steps, tried without one."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / "ci" / "cuda" / "run.py"
PATIENT = """
import time
try:
    time.sleep(600)
finally:
    open("report", "w").close()
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(600)
"""
# A child that its parent does not wait for.
PARENT = """
import subprocess, sys
late = "import time; time.sleep(1); open('late', 'w').close()"
subprocess.Popen([sys.executable, "-c", late])
"""


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(PROGRAM))


@pytest.fixture
def step(program):
    def build(name, code, **options):
        return program["Step"](name, ("-c", code), **options)

    return build


@pytest.fixture
def run(program, tmp_path):
    """Return what runs steps within some seconds, each in its way, and gives their statuses."""

    def build(way, steps, seconds=60.0, *arguments):
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        run = program["Run"](tmp_path, variables, program["Clock"](seconds))
        getattr(run, way)(steps, *arguments)
        return {each.name: each.status for each in run.outcomes}

    return build


def test_a_step_passes_or_fails_by_its_exit_status(run, step):
    steps = [step("good", "pass"), step("bad", "raise SystemExit(3)")]
    assert run("in_turn", steps) == {"good": "passed", "bad": "failed"}


def test_the_output_of_a_step_is_kept(run, step, tmp_path):
    run("in_turn", [step("loud", "print(1); raise ValueError(2)")])
    assert (tmp_path / "loud.txt").read_text().startswith("1\n")
    assert "ValueError: 2" in (tmp_path / "loud.txt").read_text()


def test_a_step_that_takes_too_long_is_interrupted_and_may_write_its_report(run, step, tmp_path):
    assert run("in_turn", [step("slow", PATIENT, seconds=1.0)]) == {"slow": "cut short"}
    assert (tmp_path / "report").exists()


def test_steps_at_the_same_time_share_what_is_left(run, step):
    steps = [step("slow", PATIENT), step("also-slow", PATIENT), step("quick", "pass")]
    began = time.monotonic()
    found = run("together", steps, 4.0, 0.5)
    assert time.monotonic() - began < 300  # each would sleep longer
    assert found == {"slow": "cut short", "also-slow": "cut short", "quick": "passed"}


def test_steps_that_do_not_end_when_they_are_interrupted_are_waited_for_together(
    run, step, program, monkeypatch
):
    monkeypatch.setitem(program["Run"].together.__globals__, "_GRACE", 10.0)
    steps = [step(f"stubborn-{number}", STUBBORN) for number in range(3)]
    began = time.monotonic()
    assert set(run("together", steps, 2.0, 1.0).values()) == {"cut short"}
    assert time.monotonic() - began < 30  # one after the other they would take 32


def test_steps_at_the_same_time_have_their_own_seconds(run, step, tmp_path):
    sleeps = [step(f"for-{n}", f"import time; time.sleep({n})") for n in (3, 1, 2)]
    run("together", sleeps, 60.0, 1.0)
    rows = [line.split() for line in (tmp_path / "summary.txt").read_text().splitlines()]
    found = {row[-1]: float(row[1]) for row in rows}
    assert found["for-1"] < found["for-2"] < found["for-3"]


def test_a_step_that_finds_no_time_is_left_out_by_name(run, step, tmp_path):
    assert run("in_turn", [step("late", "pass")], 1.0) == {"late": "left out"}
    assert (tmp_path / "summary.txt").read_text().split() == ["left", "out", "0.0", "s", "late"]


def test_what_a_step_has_started_ends_with_it(run, step, tmp_path):
    run("in_turn", [step("parent", PARENT)])
    time.sleep(1.5)
    assert not (tmp_path / "late").exists()


def test_steps_at_the_same_time_have_one_thread_each(run, step, tmp_path):
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    run("together", [step("threads", code)], 60.0, 1.0)
    assert (tmp_path / "threads.txt").read_text() == "1\n"


def test_every_file_that_a_step_names_is_there(program, tmp_path):
    steps = [
        *program["steps_together"](program["FRAMEWORKS"], tmp_path, 16),
        *program["steps_alone"](program["FRAMEWORKS"], tmp_path),
    ]
    named = {word for step in steps for word in step.command if word.startswith(str(ROOT))}
    assert len(named) > 6
    assert [path for path in named if not Path(path).exists()] == []


def test_the_wheels_are_packed_with_their_commit(tmp_path, monkeypatch):
    work, programs = tmp_path / "work", tmp_path / "programs"
    (work / "ci" / "cuda").mkdir(parents=True)
    shutil.copy(PROGRAM.with_name("pack"), work / "ci" / "cuda")
    programs.mkdir()
    (programs / "python3").symlink_to("/bin/true")  # there may be no network
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    subprocess.run(["git", "-C", str(work), "add", "."], check=True)
    subprocess.run(["git", "-C", str(work), *identity, "commit", "-qm", "Begin"], check=True)
    show = ["git", "-C", str(work), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
    pack, note = work / "ci" / "cuda" / "pack", work / "ci" / "cuda" / "wheels" / "commit.txt"
    subprocess.run([str(pack)], check=True)
    assert note.read_text().strip() == commit
    with pack.open("a") as program:
        program.write("# another line\n")
    subprocess.run([str(pack)], check=True)
    assert note.read_text().strip() == f"{commit}-dirty"


def test_the_suites_are_told_the_commit_of_the_wheels(program, tmp_path):
    (tmp_path / "commit.txt").write_text("6fa62970-dirty\n")
    commit = program["read_commit"](tmp_path)
    steps = program["steps_together"](["torch"], tmp_path, 16, commit)
    (suite,) = (step for step in steps if step.name == "suite-torch")
    assert suite.command[-2:] == ("--d2ldev-commit", "6fa62970-dirty")


def test_wheels_without_a_note_have_no_commit(program, tmp_path):
    steps = program["steps_together"](["torch"], tmp_path, 16, program["read_commit"](tmp_path))
    assert "--d2ldev-commit" not in next(iter(steps)).command


def test_the_step_that_fills_the_card_selects_a_test(program, tmp_path):
    (step,) = (x for x in program["steps_alone"](["reference"], tmp_path) if "full-card" in x.name)
    found = subprocess.run(
        [sys.executable, *step.command, "--collect-only"],
        env={**os.environ, "D2LDEV_VIRTUAL_GPUS": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "test_real_gpus.py" in found.stdout


def test_a_machine_without_a_gpu_is_refused(tmp_path):
    command = [sys.executable, str(PROGRAM), "--out", str(tmp_path / "out")]
    variables = {**os.environ, "PATH": ""}
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "nvidia-smi finds no GPU here" in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_in_the_background_lets_its_steps_be_interrupted(program, tmp_path, monkeypatch):
    # A shell that puts it there has it ignore Ctrl-C, which its steps would take over.
    options = ["--out", str(tmp_path / "out"), "--without-gpu", "--only", "nothing"]
    monkeypatch.setattr(sys, "argv", ["run", *options, "--wheels", str(tmp_path)])
    monkeypatch.setenv("PATH", "")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program["main"]()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_ends_with_its_reports_and_a_summary(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(PROGRAM), "--out", str(out), "--without-gpu"]
    command += ["--backend", "reference", "--only", "doctor", "--wheels", str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PATH": ""}, capture_output=True, check=True)
    lines = (out / "summary.txt").read_text().splitlines()
    assert lines[0] == "cards: none"
    assert lines[1] == "not run: torch, jax, tensorflow"
    assert lines[2].split()[-1] == "doctor"
    assert "reference" in (out / "doctor.txt").read_text()
