"""``d2ldev bench``: what it prints and writes, and how it fails."""

import json

import pytest
from command_line import run_command
from processes import make_backend

from d2ldev.bench.exercises import EXERCISES, Exercise
from d2ldev.bench.results import Result
from d2ldev.cli import bench
from d2ldev.cli.bench import Request

MACHINE = {
    "system": "L",
    "processor": "a chip",
    "cores": 3,
    "cards": ["a card"],
    "load": 0.5,
    "warning": "",
}


def squeeze(text):
    return " ".join(text.split())


# -- what is printed ------------------------------------------------------------------------------


def test_an_exercise_is_a_table():
    done = run_command("bench", "log", "--small", "--virtual-gpus", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nlog: What does it cost to log the norm of each product" in done.stdout
    assert "\nreference gpu:0 is virtual: the CPU computes for it\n" in done.stdout
    assert "100%" in done.stdout


def test_the_load_is_printed_and_a_loaded_machine_is_warned_of(monkeypatch, capsys):
    loaded = {**MACHINE, "load": 3.0, "warning": "It is loaded."}
    monkeypatch.setattr(bench, "describe_machine", lambda: loaded)
    assert bench.run(Request(("numpy",), ("reference",), is_small=True)) == 0
    printed = squeeze(capsys.readouterr().out)
    assert "Its load was 3 before." in printed
    assert "It is loaded." in printed


def test_a_row_without_figures_has_its_reason_below_the_table():
    done = run_command("bench", "two-gpus", "--small", "--virtual-gpus", "1")
    assert done.returncode == 0
    assert "one after the other: needs two GPUs: reference has 1 here" in squeeze(done.stdout)


def test_the_keys_of_the_document_are_stable():
    done = run_command("bench", "matmul", "--size", "16", "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["date", "versions", "machine", "backends"]
    (backend,) = document["backends"]
    assert list(backend) == ["name", "versions", "notes", "error", "results"]
    (result,) = backend["results"]
    assert list(result) == [*("exercise", "backend", "question", "unit", "rows", "error", "best")]
    row = result["rows"][0]
    assert list(row) == ["way", "device", "platform", "size", "figures", "note", "precision"]
    assert list(row["figures"]) == ["seconds", "low", "high", "rate"]


@pytest.mark.parametrize(
    ("options", "variable", "passed"),
    [
        ((), None, "highest"),
        ((), "medium", "medium"),
        (("--matmul-precision", "high"), None, "high"),
        (("--matmul-precision", "high"), "medium", "high"),
    ],
)
def test_every_backend_multiplies_in_the_requested_precision(
    monkeypatch, capsys, options, variable, passed
):
    if variable is not None:
        monkeypatch.setenv("D2LDEV_MATMUL_PRECISION", variable)
    asked = []

    def run(self, backend, size, precision):
        asked.append(precision)
        return Result(self.name, backend.name, self.question, self.unit)

    monkeypatch.setattr(Exercise, "run", run)
    precision = options[1] if options else None
    request = Request(("log",), ("reference",), matmul_precision=precision)
    assert bench.run(request) == 0
    assert asked == [passed]
    command = request.command("reference")
    assert command[command.index("--matmul-precision") + 1] == passed
    assert capsys.readouterr().err == ""


def test_the_precision_of_products_is_shown():
    done = run_command("bench", "log", "--small", "--matmul-precision", "high")
    assert "\nreference computes products in highest\n" in done.stdout  # it knows nothing else


def test_an_invalid_precision_is_refused_with_the_choices():
    done = run_command("bench", "log", "--small", "--matmul-precision", "float32")
    assert done.returncode == 2
    assert "unknown precision 'float32': use one of highest, high, medium" in squeeze(done.stderr)


def test_all_exercises_are_in_the_document():
    done = run_command("bench", "--all", "--small", "--json", D2LDEV_VIRTUAL_GPUS="0")
    results = json.loads(done.stdout)["backends"][0]["results"]
    assert [result["exercise"] for result in results] == list(EXERCISES)


def test_each_of_several_backends_has_a_process_of_its_own(tmp_path):
    make_backend(tmp_path)
    arguments = (
        "bench",
        "log",
        "--size",
        "20",
        "--json",
        "--backend",
        "reference",
        "--backend",
        "mine",
    )
    document = json.loads(run_command(*arguments, path=[tmp_path]).stdout)
    assert [backend["name"] for backend in document["backends"]] == ["reference", "mine"]
    assert [len(backend["results"]) for backend in document["backends"]] == [1, 1]


def test_a_backend_that_ends_its_process_hinders_no_other(tmp_path):
    make_backend(tmp_path, source="import os\nos._exit(3)")
    arguments = ("bench", "log", "--small", "--backend", "mine", "--backend", "reference")
    done = run_command(*arguments, path=[tmp_path])
    assert done.returncode == 1
    assert "error: measuring mine ended with status 3" in done.stderr
    assert "log: What does" in done.stdout


def test_an_exercise_that_failed_is_an_error_and_exit_status_1(monkeypatch, capsys):
    def run(self, backend, size, precision):
        return Result(self.name, backend.name, self.question, self.unit, error="cannot: no luck")

    monkeypatch.setattr(Exercise, "run", run)
    assert bench.run(Request(("log",), ("reference",))) == 1
    assert "error: reference, log: cannot: no luck" in capsys.readouterr().err


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name an exercise, or --all"),
        (["log", "--all"], "name an exercise, or --all"),
        (["lgo"], "unknown exercise 'lgo': use one of matmul"),
        (["--all", "--size", "3"], "--size needs one exercise"),
        (["log", "--small", "--size", "3"], "--size needs one exercise"),
        (["log", "--size", "0"], "equal to 1"),
        (["log", "--size", "ten"], "valid integer"),
        (["log", "--backend", "trch"], "known: torch, jax, tensorflow, mxnet, reference"),
    ],
)
def test_an_invalid_name_has_exit_status_2(arguments, words):
    done = run_command("bench", *arguments)
    assert done.returncode == 2
    assert words in squeeze(done.stderr.replace("│", ""))
    assert "Traceback" not in done.stderr


def test_a_backend_that_is_not_installed_is_an_error_with_its_fix():
    done = run_command("bench", "log", "--backend", "torch")
    assert done.returncode == 1
    assert "pip install" in done.stderr


def test_an_interruption_is_one_line_and_its_status(monkeypatch, capsys):
    def run(self, backend, size, precision):
        raise KeyboardInterrupt

    monkeypatch.setattr(Exercise, "run", run)
    assert bench.run(Request(("log",), ("reference",))) == 130
    said = "error: the measurement was interrupted\n"
    assert capsys.readouterr().err == said


# -- the plot ---------------------------------------------------------------------------------


def test_a_plot_has_a_line_for_each_device(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "products.svg"
    done = run_command("bench", "matmul", "--size", "32", "--plot", path, D2LDEV_VIRTUAL_GPUS="1")
    assert done.returncode == 0, done.stderr
    assert "32 x 32" in done.stdout
    assert f"wrote {path}" in done.stderr
    drawn = path.read_text()
    texts = ("reference cpu", "reference gpu:0, virtual", "seconds for a product")
    assert all(f"<!-- {text} -->" in drawn for text in texts)


@pytest.mark.parametrize(
    ("name", "problem"), [("a.xyz", "Matplotlib does not write"), ("no/a.png", "no folder")]
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_measurement(tmp_path, name, problem):
    pytest.importorskip("matplotlib")
    done = run_command("bench", "matmul", "--small", "--plot", tmp_path / name, columns=200)
    assert (done.returncode, done.stdout) == (1, "")
    assert problem in done.stderr


@pytest.mark.parametrize("exercise", ["log", "--all"])
def test_a_plot_needs_an_exercise_with_sizes(exercise):
    done = run_command("bench", exercise, "--small", "--plot", "a.png")
    assert done.returncode == 2
    assert "d2ldev bench matmul" in done.stderr
