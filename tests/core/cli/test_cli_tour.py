"""``d2ldev tour``: the chapter's cells, how they are run and shown, and the notebook of them."""

import ast
import json
import re
import sys

import pytest
from command_line import run_command
from d2ldev_reference import ReferenceFramework
from processes import run_python
from rich.console import Console

from d2ldev import settings
from d2ldev.cli.tour import CHAPTER, _choose_virtual_gpus, read_cells, run_cell, walk
from d2ldev.registry import loading
from d2ldev.registry import selection as registry

CELLS = read_cells(CHAPTER.read_text("utf-8"))
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def tour():
    """``d2ldev tour`` on two virtual GPUs, in 100 columns."""
    return run_command("tour", columns=100)


@pytest.fixture
def execute(reference, capsys):
    """Run a cell of code; return whether it did what its tags say, and what it printed."""

    def run(source, *tags, namespace=None):
        (cell,) = read_cells(f"# %% {' '.join(tags)}\n{source}\n")
        done = run_cell(cell, {} if namespace is None else namespace, reference)
        return done, capsys.readouterr().out

    return run


@pytest.fixture
def walked(reference, capsys):
    """Return the exit status and the text of a walk through some cells."""

    def run(text):
        status = walk(read_cells(text), reference, Console(width=100), ["nothing is installed"])
        return status, capsys.readouterr().out

    return run


# -- reading cells ----------------------------------------------------------------------------


def test_text_and_code_are_distinguished():
    text = "# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1\n\nx\n"
    assert [(cell["cell_type"], cell["source"]) for cell in read_cells(text)] == [
        ("markdown", "# Title\n\nWords."),
        ("code", "x = 1\n\nx"),
    ]


def test_tags_are_read():
    (cell,) = read_cells("# %% gpus=2 X@d2l.gpu(1) raises-exception\nx\n")
    assert cell["metadata"]["tags"] == ["gpus=2", "X@d2l.gpu(1)", "raises-exception"]


def test_lines_before_the_first_cell_are_left_out():
    assert [cell["source"] for cell in read_cells("# for the editor\n\n# %%\nx\n")] == ["x"]


# -- running cells ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("print('a')\n1 + 1", "a\n2\n"),
        ("1 + 1\n'text'", "'text'\n"),
        ("x = 1", ""),
        ("None", ""),
    ],
)
def test_a_cell_prints_the_value_of_its_last_line(execute, source, output):
    assert execute(source) == (True, output)


def test_cells_share_one_namespace(execute):
    namespace = {}
    execute("def f(): return y\ny = 2", namespace=namespace)
    assert execute("f()", namespace=namespace) == (True, "2\n")


def test_an_error_is_a_failure_and_keeps_the_output(execute):
    failure = "before\nFAILED ZeroDivisionError: division by zero\n"
    assert execute("print('before')\n1 / 0") == (False, failure)


def test_a_syntax_error_is_a_failure(execute):
    assert execute("x =")[0] is False


ON_GPU_0 = "from d2ldev import gpu, backend\nx = backend.ones(2, device=gpu(0))"


def test_a_claim_that_holds_changes_nothing(execute):
    assert execute(ON_GPU_0, "x@gpu(0)") == (True, "")


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ("x@gpu(1)", "x should be on gpu:1, and is on gpu:0"),
        ("[x,backend.ones(1)]@gpu(0)", "should be on gpu:0, and is on"),
        ("[]@gpu(0)", "[] should be on gpu:0, and is on no device"),
        ("y@gpu(0)", "NameError"),
    ],
)
def test_a_claim_that_does_not_hold_is_a_failure(execute, claim, words):
    done, output = execute(ON_GPU_0, "x@gpu(0)", claim)
    assert not done
    assert output.startswith("FAILED ")
    assert words in output


def test_an_error_that_was_announced_is_not_a_failure(execute):
    printed = "ZeroDivisionError: division by zero\n"
    assert execute("1 / 0", "raises-exception") == (True, printed)


def test_an_announced_error_that_does_not_come_is_a_failure(execute):
    done, output = execute("1 / 1", "raises-exception")
    assert not done
    assert "FAILED no error was raised" in output


# -- walking ----------------------------------------------------------------------------------


def test_after_a_failure_the_tour_goes_on_and_counts_it(walked):
    status, text = walked("# %%\n1 / 0\n# %%\n'the next'\n")
    assert status == 1
    assert "FAILED ZeroDivisionError: division by zero" in text
    assert "\n'the next'\n" in text.split("FAILED")[1]
    assert "\nnote: nothing is installed\n1 cells ran on reference." in text
    assert "1 cells failed." in text


def test_a_cell_that_needs_more_gpus_is_shown_and_not_run(walked):
    status, text = walked("# %% gpus=3\n1 / 0\n")
    assert status == 0
    assert "1 / 0" in text
    assert "needs 3 GPUs: reference has 2 here" in text
    assert "1 cells were left out" in text


def test_text_has_the_width_of_the_terminal(walked):
    _, text = walked(f"# %% [markdown]\n# {'word ' * 100}\n")
    assert max(map(len, text.splitlines())) <= 100


# -- the notebook -----------------------------------------------------------------------------

EXECUTE = """
import contextlib, io, json, pathlib
namespace = {"__name__": "__main__"}
printed = io.StringIO()
ran = raised = 0
with contextlib.redirect_stdout(printed):
    for cell in json.loads(pathlib.Path("tour.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            try:
                exec(cell["source"], namespace)
            except Exception:
                assert "raises-exception" in cell["metadata"]["tags"]
                raised += 1
            else:
                assert "raises-exception" not in cell["metadata"]["tags"]
                ran += 1
show([ran, raised, printed.getvalue().splitlines()[-1]])
"""
"""The cells in order, as a notebook runs them."""


def test_every_cell_of_the_notebook_runs(tmp_path):
    folder = tmp_path / "new"
    done = run_command("tour", "--notebook", str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    environment = {"D2LDEV_BACKEND": "reference"}
    ((ran, raised, last),) = run_python(EXECUTE, environment=environment, folder=folder)
    assert raised == sum("raises-exception" in cell["metadata"]["tags"] for cell in CODE) == 4
    assert ran + raised == len(CODE) + 1  # the first one makes the virtual GPUs
    assert re.fullmatch(r"one \d\.\d+  two \d\.\d+", last)


def test_the_notebook_makes_virtual_gpus_only_where_the_tour_does(tmp_path):
    run_command("tour", "--notebook", str(tmp_path), D2LDEV_VIRTUAL_GPUS="2")
    document = json.loads((tmp_path / "tour.ipynb").read_text("utf-8"))
    assert document["cells"] == CELLS


def test_a_notebook_has_the_keys_of_nbformat_4(tmp_path):
    run_command("tour", "--notebook", str(tmp_path))
    document = json.loads((tmp_path / "tour.ipynb").read_text("utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 4)
    keys = {"markdown": {"cell_type", "metadata", "source"}}
    keys["code"] = keys["markdown"] | {"execution_count", "outputs"}
    assert all(set(cell) == keys[cell["cell_type"]] for cell in document["cells"])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("tour", "--notebook", str(tmp_path / "file" / "new"))
    said = f"error: cannot write a notebook into {tmp_path}/file/new: Not a directory\n"
    assert (done.returncode, done.stderr) == (1, said)


# -- the chapter ------------------------------------------------------------------------------


def test_the_chapter_has_the_sections_of_the_book():
    titles = [
        line.lstrip("# ")
        for cell in CELLS
        if cell["cell_type"] == "markdown"
        for line in cell["source"].splitlines()
        if line.startswith("#")
    ]
    assert titles == [
        "6.7 GPUs",
        "6.7.1 Computing Devices",
        "6.7.2 Tensors and GPUs",
        "6.7.2.1 Storage on the GPU",
        "6.7.2.2 Copying",
        "6.7.2.3 Side Notes",
        "6.7.3 Neural Networks and GPUs",
        "6.7.4 Summary",
        "6.7.5 Exercises",
        "A training run",
        "13.5 Training on Multiple GPUs",
        "13.6 Concise Implementation for Multiple GPUs",
    ]


def test_the_chapter_imports_no_framework():
    imported = set()
    for node in ast.walk(ast.parse(CHAPTER.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert imported - sys.stdlib_module_names == {"d2ldev", "numpy"}


def test_a_cell_that_prints_where_its_result_is_claims_it():
    says = [cell for cell in CODE if re.search(r'"on"| on \{', cell["source"])]
    assert len(says) == 4
    assert all("@" in "".join(cell["metadata"]["tags"]) for cell in says)


def test_every_tag_of_the_chapter_is_one_that_is_known():
    tags = [tag for cell in CODE for tag in cell["metadata"]["tags"]]
    assert len(tags) > 20
    for tag in tags:
        assert re.fullmatch(r"gpus=\d|raises-exception|[^@]+@[^@]+", tag)


def test_with_two_gpus_every_cell_runs(tour):
    assert tour.returncode == 0
    assert f"{len(CODE)} cells ran on reference." in tour.stdout
    assert "left out" not in tour.stdout


def test_with_two_gpus_mixing_them_is_the_error_that_is_shown(tour):
    assert "DeviceMismatchError: cannot" in tour.stdout


def test_two_virtual_gpus_stand_in_for_those_of_a_machine_without_any(monkeypatch):
    monkeypatch.setattr(loading, "count_real_gpus", lambda name: 0)
    monkeypatch.setattr(registry, "is_loaded", lambda name: False)
    monkeypatch.setenv(settings.BACKEND, "reference")
    assert _choose_virtual_gpus() == 2


def test_nothing_stands_in_for_a_real_gpu(monkeypatch):
    monkeypatch.setattr(loading, "count_real_gpus", lambda name: 1)
    monkeypatch.setattr(registry, "is_loaded", lambda name: False)
    monkeypatch.setenv(settings.BACKEND, "reference")
    assert _choose_virtual_gpus() is None


def test_a_backend_without_virtual_gpus_is_shown_as_it_is(monkeypatch):
    monkeypatch.setattr(ReferenceFramework, "max_virtual_gpus", 0)
    monkeypatch.setattr(registry, "is_loaded", lambda name: False)
    monkeypatch.setenv(settings.BACKEND, "reference")
    assert _choose_virtual_gpus() is None


def test_without_a_gpu_the_cells_for_two_are_left_out_and_the_rest_runs():
    done = run_command("tour", D2LDEV_VIRTUAL_GPUS="0")
    left_out = sum("gpus=2" in cell["metadata"]["tags"] for cell in CODE)
    assert done.returncode == 0
    assert f"{len(CODE) - left_out} cells ran on reference." in done.stdout
    assert (
        f"{left_out} cells were left out, which need more GPUs: reference has 0 here" in done.stdout
    )
    assert "d2ldev tour --virtual-gpus 2" in done.stdout


def test_with_one_gpu_every_other_cell_runs():
    assert run_command("tour", D2LDEV_VIRTUAL_GPUS="1").returncode == 0


def test_the_option_for_virtual_gpus_goes_before_the_variable():
    done = run_command("tour", "--virtual-gpus", "2", D2LDEV_VIRTUAL_GPUS="0")
    assert f"{len(CODE)} cells ran on reference." in done.stdout


def test_without_a_framework_a_friendly_line_says_so():
    done = run_command("tour", columns=200, D2LDEV_BACKEND=None)
    assert "\nnote: none of torch, jax, tensorflow, mxnet is installed" in done.stdout
    assert done.stderr == ""


def test_a_misspelt_backend_is_explained_and_has_exit_status_2():
    done = run_command("tour", D2LDEV_BACKEND="refrence")
    assert done.returncode == 2
    assert "did you mean 'reference'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_virtual_gpus_than_the_backend_can_make_have_exit_status_1():
    done = run_command("tour", "--virtual-gpus", "3")
    assert done.returncode == 1
    assert "error: cannot make 3 virtual GPUs: the reference backend can make 2" in done.stderr


@pytest.mark.parametrize("number", ["-1", "9", "two"])
def test_a_number_of_virtual_gpus_that_cannot_be_is_a_usage_error(number):
    assert run_command("tour", "--virtual-gpus", number).returncode == 2
