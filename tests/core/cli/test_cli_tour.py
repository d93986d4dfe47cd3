"""``d2ldev tour``: the notebook's cells, the chapter in them, and how they are shown."""

import ast
import io
import re
import sys

import pytest
from command_line import run_command
from d2ldev_reference import ReferenceFramework
from rich.console import Console

from d2ldev import settings
from d2ldev.cli.cells import Cell, Outcome, read_cells, run_cell
from d2ldev.cli.tour import CHAPTER, CODE_WIDTH, Tour, _stand_ins
from d2ldev.registry import loading
from d2ldev.registry import selection as registry

CELLS = read_cells(CHAPTER.read_text("utf-8"))
CODE = [cell for cell in CELLS if not cell.markdown]


@pytest.fixture(scope="module")
def tour():
    """``d2ldev tour`` on two virtual GPUs, in 100 columns."""
    return run_command("tour", columns=100)


def walked(reference, *cells, width=100):
    """Return the exit status and the text of a walk through some cells."""
    console = Console(file=io.StringIO(), width=width)
    status = Tour(console, reference, []).walk(list(cells))
    return status, console.file.getvalue()


# -- reading cells ----------------------------------------------------------------------------


def test_text_and_code_are_told_apart():
    text = "# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1\n\nx\n"
    assert read_cells(text) == [Cell("# Title\n\nWords.", markdown=True), Cell("x = 1\n\nx")]


def test_marks_are_read():
    assert read_cells("# %% gpus=2 raises=1\nx\n") == [Cell("x", gpus=2, raises=True)]


def test_claims_are_read():
    claims = (("X", "d2l.gpu(1)"), ("two[0]", "place"))
    cell = Cell("x", gpus=2, claims=claims)
    assert read_cells("# %% gpus=2 X@d2l.gpu(1) two[0]@place\nx\n") == [cell]


def test_what_stands_before_the_first_cell_is_left_out():
    assert read_cells("# for the editor\n\n# %%\nx\n") == [Cell("x")]


@pytest.mark.parametrize(
    "marker", ["# %% gpu=2", "# %% gpus", "# %% [md]", "# %%raises=1", "# %% x@"]
)
def test_a_misspelt_marker_is_an_error(marker):
    with pytest.raises(ValueError, match="cell"):
        read_cells(f"{marker}\nx\n")


# -- running cells ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("print('a')\n1 + 1", "a\n2"),
        ("'text'", "'text'"),
        ("x = 1", ""),
        ("None", ""),
        ("# nothing but words", ""),
    ],
)
def test_a_cell_gives_what_it_prints_and_its_last_expression(source, output):
    outcome = run_cell(Cell(source), {})
    assert (outcome.output, outcome.failed) == (output, False)


def test_cells_share_one_namespace():
    namespace = {}
    run_cell(Cell("def f(): return y\ny = 2"), namespace)
    assert run_cell(Cell("f()"), namespace).output == "2"


def test_an_error_is_a_failure_and_keeps_what_was_printed():
    outcome = run_cell(Cell("print('before')\n1 / 0"), {})
    assert outcome.failed
    assert outcome.output == "before\nZeroDivisionError: division by zero"


def test_a_syntax_error_is_a_failure():
    assert run_cell(Cell("x ="), {}).failed


def claiming(claimed, what="x"):
    """Run a cell whose tensor is on the first GPU."""
    source = "from d2ldev import gpu, backend\nx = backend.ones(2, device=gpu(0))\nf'on {gpu(1)}'"
    return run_cell(Cell(source, claims=((what, claimed),)), {})


def test_a_claim_that_holds_changes_nothing():
    assert claiming("gpu(0)") == Outcome("'on gpu:1'")


def test_a_cell_that_claims_a_device_that_its_result_is_not_on_fails():
    outcome = claiming("gpu(1)")
    assert outcome.failed
    assert "DeviceMismatchError: cannot show x as on gpu:1: it is on gpu:0" in outcome.output


def test_a_claim_about_several_tensors_is_about_all_of_them():
    assert claiming("gpu(0)", "[x, backend.ones(1)]").failed


def test_a_claim_about_no_tensor_fails():
    assert claiming("gpu(0)", "[]").failed


def test_a_claim_about_a_name_that_is_not_there_fails():
    outcome = claiming("gpu(0)", "y")
    assert outcome.failed
    assert "NameError" in outcome.output


def test_an_error_that_was_announced_is_no_failure():
    outcome = run_cell(Cell("1 / 0", raises=True), {})
    assert not outcome.failed
    assert outcome.output == "ZeroDivisionError: division by zero"


def test_an_announced_error_that_does_not_come_is_a_failure():
    assert run_cell(Cell("1 / 1", raises=True), {}).failed


# -- walking ----------------------------------------------------------------------------------


def test_after_a_failure_the_tour_goes_on_and_counts_it(reference):
    status, text = walked(reference, Cell("1 / 0"), Cell("'the next'"))
    assert status == 1
    assert "FAILED ZeroDivisionError: division by zero" in text
    assert "'the next'" in text.split("FAILED")[1].split("│")[1]
    assert "1 cell ran on reference." in text
    assert "1 cell failed." in text


def test_a_claim_that_does_not_hold_fails_the_tour(reference):
    source = "from d2ldev import backend, gpu\nx = backend.ones(2)"
    status, text = walked(reference, Cell(source, claims=(("x", "gpu(0)"),)))
    assert status == 1
    assert "1 cell failed." in text


def test_a_cell_that_needs_more_gpus_is_shown_and_not_run(reference):
    status, text = walked(reference, Cell("1 / 0", gpus=3))
    assert status == 0
    assert "1 / 0" in text
    assert "needs 3 GPUs: reference has 2 here" in text
    assert "1 cell left out" in text


def test_a_warning_of_d2ldev_is_a_friendly_line(reference):
    console = Console(file=io.StringIO(), width=100)
    Tour(console, reference, ["nothing is installed"]).walk([])
    assert "note: nothing is installed" in console.file.getvalue()


def test_a_wide_terminal_has_the_output_beside_the_code(reference):
    _, text = walked(reference, Cell("6 * 7"), width=80)
    (line,) = [line for line in text.splitlines() if "6 * 7" in line]
    assert "42" in line


def test_a_narrow_terminal_has_the_output_below_the_code(reference):
    _, text = walked(reference, Cell("6 * 7"), width=79)
    (line,) = [line for line in text.splitlines() if "6 * 7" in line]
    assert "42" not in line
    assert "42" in text.split("6 * 7")[1]


# -- the chapter ------------------------------------------------------------------------------


def test_the_chapter_has_the_sections_of_the_book():
    titles = [
        line.lstrip("# ")
        for cell in CELLS
        if cell.markdown
        for line in cell.source.splitlines()
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
    says = [cell for cell in CODE if re.search(r'"on"| on \{', cell.source)]
    assert len(says) == 4
    assert all(cell.claims for cell in says)


def test_the_longest_line_of_code_has_room_in_its_column():
    assert max(len(line) for cell in CODE for line in cell.source.splitlines()) == CODE_WIDTH


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
    assert _stand_ins() == 2


def test_nothing_stands_in_for_a_real_gpu(monkeypatch):
    monkeypatch.setattr(loading, "count_real_gpus", lambda name: 1)
    monkeypatch.setattr(registry, "is_loaded", lambda name: False)
    monkeypatch.setenv(settings.BACKEND, "reference")
    assert _stand_ins() is None


def test_a_backend_without_virtual_gpus_is_shown_as_it_is(monkeypatch):
    monkeypatch.setattr(ReferenceFramework, "max_virtual_gpus", 0)
    monkeypatch.setattr(registry, "is_loaded", lambda name: False)
    monkeypatch.setenv(settings.BACKEND, "reference")
    assert _stand_ins() is None


def test_without_a_gpu_the_cells_for_two_are_left_out_and_the_rest_runs():
    done = run_command("tour", D2LDEV_VIRTUAL_GPUS="0")
    left_out = sum(cell.gpus > 0 for cell in CODE)
    assert done.returncode == 0
    assert f"{len(CODE) - left_out} cells ran on reference." in done.stdout
    assert f"{left_out} cells left out, for want of GPUs: reference has 0 here" in done.stdout
    assert "d2ldev tour --virtual-gpus 2" in done.stdout


def test_with_one_gpu_every_other_cell_runs():
    assert run_command("tour", D2LDEV_VIRTUAL_GPUS="1").returncode == 0


def test_the_option_for_virtual_gpus_goes_before_the_variable():
    done = run_command("tour", "--virtual-gpus", "2", D2LDEV_VIRTUAL_GPUS="0")
    assert f"{len(CODE)} cells ran on reference." in done.stdout


def test_no_line_is_wider_than_a_wide_terminal(tour):
    assert max(map(len, tour.stdout.splitlines())) <= 100


def test_no_line_is_wider_than_a_narrow_terminal():
    assert max(map(len, run_command("tour", columns=60).stdout.splitlines())) <= 60


def test_without_a_framework_a_friendly_line_says_so():
    done = run_command("tour", columns=200, D2LDEV_BACKEND=None)
    assert done.stdout.startswith("note: none of torch, jax, tensorflow, mxnet is installed")
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
