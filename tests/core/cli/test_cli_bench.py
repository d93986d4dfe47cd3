"""``d2ldev bench``: what it prints and writes, and how it fails."""

import errno
import json
import os

import pytest
from command_line import run_command
from processes import make_backend, make_package, run_python

from d2ldev.bench import page
from d2ldev.bench.conclusions import OF_SMALL
from d2ldev.bench.exercises import EXERCISES, Exercise
from d2ldev.bench.results import Figures, Result, Row
from d2ldev.cli import bench
from d2ldev.cli.bench import Request

DOCUMENT = {
    "date": "2026-01-01",
    "versions": {"d2ldev": "1"},
    "machine": {
        "system": "L",
        "processor": "a <chip>",
        "cores": 3,
        "cards": ["a card"],
        "load": 0.5,
        "warning": "",
    },
    "comparisons": {"matmul": "a & b are the same."},
    "backends": [
        {"name": name, "versions": {name: "2"}, "threads": threads, "notes": [], "error": None}
        for name, threads in (("a", 4), ("b", None))
    ],
}
RESULTS = [
    Result(
        exercise,
        backend,
        "How <fast>?",
        "MB/s",
        [
            Row("one", "cpu", "cpu", size, Figures(2e-3, 1e-3, 3e-3, 500.0)),
            Row("two", "gpu:0", "virtual", size, note="needs luck"),
        ],
        "It is & was.",
    )
    for exercise, size in (("matmul", 16), ("log", None))
    for backend in ("a", "b")
]


def squeezed(text):
    return " ".join(text.split())


# -- what is printed ------------------------------------------------------------------------------


def test_an_exercise_is_a_table_and_a_conclusion():
    done = run_command("bench", "log", "--small", "--virtual-gpus", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "reference, log: What does it cost to log the norm of each product" in done.stdout
    assert "a DeviceLog" in done.stdout
    assert "Nothing follows from --small" in squeezed(done.stdout)


def test_of_a_size_that_is_not_small_something_is_concluded():
    done = run_command("bench", "log", "--size", "20", "--virtual-gpus", "1")
    assert "nothing about a GPU follows from what is virtual" in squeezed(done.stdout)


def test_nothing_is_concluded_from_small_sizes():
    done = run_command(
        *("bench", "matmul", "--small", "--json", "--backend", "reference"),
        *("--backend", "reference"),
    )
    document = json.loads(done.stdout)
    assert document["comparisons"] == {}
    for backend in document["backends"]:
        for result in backend["results"]:
            assert result["rows"]
            assert result["conclusion"] == OF_SMALL


def test_the_threads_and_the_load_are_printed_and_a_loaded_machine_is_warned_of(
    monkeypatch, capsys
):
    loaded = {**DOCUMENT["machine"], "load": 3.0, "warning": "It is loaded."}
    monkeypatch.setattr(bench, "machine", lambda: loaded)
    assert bench.run(Request(("numpy",), ("reference",), is_small=True)) == 0
    printed = squeezed(capsys.readouterr().out)
    assert "Its load was 3 before." in printed
    assert "It is loaded." in printed
    assert "reference does not say with how many threads it computes on the CPU" in printed


def test_a_row_without_figures_has_its_reason_below_the_table():
    done = run_command("bench", "two-gpus", "--small", "--virtual-gpus", "1")
    assert done.returncode == 0
    assert "one after the other: needs two GPUs: reference has 1 here" in squeezed(done.stdout)


def test_the_keys_of_the_document_are_stable():
    done = run_command("bench", "matmul", "--size", "16", "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["date", "versions", "machine", "backends", "comparisons"]
    (backend,) = document["backends"]
    assert list(backend) == ["name", "versions", "threads", "notes", "error", "results"]
    (result,) = backend["results"]
    assert list(result) == [
        *("exercise", "backend", "question", "unit", "rows", "conclusion", "error", "best")
    ]
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
def test_every_backend_multiplies_in_what_was_asked_for(
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


def test_a_row_says_what_products_were_computed_in():
    done = run_command("bench", "log", "--small", "--matmul-precision", "high")
    assert "products" in done.stdout
    assert done.stdout.count("highest") == 3 * 3  # the reference knows nothing else


def test_a_precision_that_is_none_is_refused_with_those_there_are():
    done = run_command("bench", "log", "--small", "--matmul-precision", "float32")
    assert done.returncode == 2
    assert "no precision 'float32': there are highest, high, medium" in squeezed(done.stderr)


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
    assert document["comparisons"]["log"].startswith(
        "At its best on cpu with products in 'highest', "
    )


def test_a_backend_that_ends_its_process_hinders_no_other(tmp_path):
    make_backend(tmp_path, source="import os\nos._exit(3)")
    arguments = ("bench", "log", "--small", "--backend", "mine", "--backend", "reference")
    done = run_command(*arguments, path=[tmp_path])
    assert done.returncode == 1
    assert "error: measuring mine ended with status 3" in done.stderr
    assert "reference, log" in done.stdout


def test_an_exercise_that_failed_is_an_error_and_exit_status_1(monkeypatch, capsys):
    def run(self, backend, size, precision):
        return Result(self.name, backend.name, self.question, self.unit, error="cannot: no luck")

    monkeypatch.setattr(Exercise, "run", run)
    assert bench.run(Request(("log",), ("reference",))) == 1
    assert "error: cannot: no luck" in capsys.readouterr().err


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say which exercise, or --all"),
        (["log", "--all"], "say which exercise, or --all"),
        (["lgo"], "no exercise 'lgo': there are matmul"),
        (["--all", "--size", "3"], "--size is of one exercise"),
        (["log", "--small", "--size", "3"], "--size is of one exercise"),
        (["log", "--size", "0"], "equal to 1"),
        (["log", "--size", "ten"], "valid integer"),
        (["log", "--backend", "trch"], "known: torch, jax, tensorflow, mxnet, reference"),
    ],
)
def test_what_is_misspelt_has_exit_status_2(arguments, words):
    done = run_command("bench", *arguments)
    assert done.returncode == 2
    assert words in squeezed(done.stderr.replace("│", ""))
    assert "Traceback" not in done.stderr


def test_a_backend_that_is_not_installed_is_an_error_with_its_fix():
    done = run_command("bench", "log", "--backend", "torch")
    assert done.returncode == 1
    assert "pip install" in done.stderr


def test_without_matplotlib_nothing_is_measured_for_a_page(tmp_path):
    make_package(tmp_path, "matplotlib", "raise ImportError('no wheels')")
    done = run_command("bench", "log", "--out", str(tmp_path / "out"), path=[tmp_path])
    assert done.stderr == (
        "error: cannot draw what was measured: matplotlib cannot be imported: no wheels\n"
        "  fix: pip install 'd2ldev[plots]', or leave out --out\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("bench", "log", "--out", str(tmp_path / "file" / "out"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write the results into {tmp_path}/file/out: Not a directory" in done.stderr


def test_a_full_disk_is_an_error_with_the_folder(monkeypatch, capsys, tmp_path):
    def fail(folder, document, results):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page, "write", fail)
    assert bench.run(Request(("log",), ("reference",), is_small=True, out=tmp_path)) == 1
    said = f"error: cannot write the results into {tmp_path}: No space left on device"
    assert said in capsys.readouterr().err


def test_an_interruption_is_one_line_and_its_status(monkeypatch, capsys):
    def run(self, backend, size, precision):
        raise KeyboardInterrupt

    monkeypatch.setattr(Exercise, "run", run)
    assert bench.run(Request(("log",), ("reference",))) == 130
    said = "error: cannot go on measuring: interrupted, and nothing was written\n"
    assert capsys.readouterr().err == said


def test_the_command_line_imports_no_matplotlib():
    code = "import sys, d2ldev.cli.main\nshow('matplotlib' in sys.modules)"
    assert run_python(code) == [False]


# -- what is written ------------------------------------------------------------------------------


def test_the_page_the_plots_and_the_figures_are_written(tmp_path):
    done = run_command("bench", "matmul", "--size", "32", "--out", str(tmp_path / "new" / "out"))
    assert done.returncode == 0
    folder = tmp_path / "new" / "out"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("index.html", "matmul.png", "matmul.svg", "results.json")
    ]
    document = json.loads((folder / "results.json").read_text())
    assert document["backends"][0]["results"][0]["exercise"] == "matmul"
    assert (folder / "matmul.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "matmul.svg").read_bytes()


def test_the_page_needs_no_network(tmp_path):
    page.write(tmp_path, DOCUMENT, RESULTS)
    text = (tmp_path / "index.html").read_text()
    assert text.count('src="data:image/svg+xml;base64,') == 2
    assert text.count("src=") == 2
    assert "://" not in text
    assert "href" not in text


def test_the_page_has_each_backend_of_each_exercise_and_escapes_what_they_say(tmp_path):
    page.write(tmp_path, DOCUMENT, RESULTS)
    text = (tmp_path / "index.html").read_text()
    assert text.count("<h2>") == 2
    assert text.count("<h3>a</h3>") == text.count("<h3>b</h3>") == 2
    assert "How &lt;fast&gt;?" in text
    assert text.count("<p>It is &amp; was.</p>") == 4
    assert "<p>gpu:0 (virtual), two: needs luck</p>" in text
    assert "<td>2 ms (1 to 3)</td><td>500</td><td>100%</td>" in text


def test_the_page_compares_the_backends_in_a_sentence(tmp_path):
    page.write(tmp_path, DOCUMENT, RESULTS)
    assert (tmp_path / "index.html").read_text().count("<p>a &amp; b are the same.</p>") == 1


def test_the_page_says_what_was_measured_on(tmp_path):
    page.write(tmp_path, DOCUMENT, RESULTS)
    text = (tmp_path / "index.html").read_text()
    said = "<p>Measured on 3 cores of a &lt;chip&gt;, a card. Its load was 0.5 before.</p>"
    assert said in text
    assert "<li>a computes with 4 threads on the CPU</li>" in text
    assert "<li>b does not say with how many threads it computes on the CPU</li>" in text
    assert 'class="error"' not in text


def test_the_page_warns_of_a_machine_that_others_use(tmp_path):
    machine = {**DOCUMENT["machine"], "warning": "It is <loaded>."}
    page.write(tmp_path, {**DOCUMENT, "machine": machine}, RESULTS)
    text = (tmp_path / "index.html").read_text()
    assert '<p class="error">It is &lt;loaded&gt;.</p>' in text


def test_the_page_has_the_warnings_of_each_backend(tmp_path):
    first, second = DOCUMENT["backends"]
    document = {**DOCUMENT, "backends": [{**first, "notes": ["The GPU is <slow>."]}, second]}
    page.write(tmp_path, document, RESULTS)
    assert "<li>The GPU is &lt;slow&gt;.</li>" in (tmp_path / "index.html").read_text()


def test_the_page_says_which_backend_could_not_be_used(tmp_path):
    document = {**DOCUMENT, "backends": [{**DOCUMENT["backends"][0], "error": "it is <gone>"}]}
    page.write(tmp_path, document, [])
    assert "it is &lt;gone&gt;" in (tmp_path / "index.html").read_text()


def test_a_plot_has_a_line_for_each_device_of_each_backend():
    drawn = page.plot(RESULTS[:2], "svg").decode()
    assert "<!-- a, cpu -->" in drawn
    assert "<!-- b, cpu -->" in drawn
    assert "virtual" not in drawn


def test_the_axis_of_a_plot_has_the_sizes_and_the_legend_is_not_on_the_title():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    rows = [Row("", "cpu", "cpu", size, Figures(1.0, 1.0, 1.0, size)) for size in (16, 64, 256)]
    long = "How fast are products of matrices on each device, and from which size on?" * 2
    figure = page.figure_of([Result("matmul", name, long, "GFLOP/s", rows) for name in "abcdefgh"])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "64", "256"]
    assert list(axes.get_xticks(minor=True)) == []
    (legend,) = figure.legends
    (title,) = [each for each in figure.texts if each.get_text() == long]
    boxes = [each.get_window_extent() for each in (legend, title, axes)]
    assert not boxes[0].overlaps(boxes[1])
    assert not boxes[0].overlaps(boxes[2])
    width, _ = canvas.get_width_height()
    assert all(0 <= box.x0 < box.x1 <= width for box in boxes)


def test_without_any_figures_there_is_no_plot():
    assert page.plot([Result("log", "a", "", "", [Row("way", "cpu", "cpu")])], "svg") == b""
