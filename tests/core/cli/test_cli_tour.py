"""``d2ldev tour``: the cells of the tutorials, how they run and are shown, and their notebooks."""

import ast
import json
import re
import sys

import pytest
from command_line import run_command
from processes import run_python
from reference_backend import ReferenceFramework
from rich.console import Console

from d2ldev import settings
from d2ldev.cli.tour import TUTORIALS, _choose_virtual_gpus, read_cells, run_cell, tags_of, walk
from d2ldev.registry import loading
from d2ldev.registry import selection as registry

CELLS = {path.stem: read_cells(path.read_text("utf-8")) for path in TUTORIALS}
CODE = [cell for cells in CELLS.values() for cell in cells if cell["cell_type"] == "code"]


def code_cell(source, *tags):
    options = f":tags: {json.dumps(tags)}\n\n" if tags else ""
    return f"```{{code-cell}}\n{options}{source}\n```\n"


@pytest.fixture(scope="module")
def tour():
    """``d2ldev tour`` on two virtual GPUs, in 100 columns."""
    return run_command("tour", columns=100)


@pytest.fixture
def execute(reference, capsys):
    """Run a cell of code; return whether it did what its tags say, and what it printed."""

    def run(source, *tags, namespace=None):
        (cell,) = read_cells(code_cell(source, *tags))
        done = run_cell(cell, {} if namespace is None else namespace, reference)
        return done, capsys.readouterr().out

    return run


@pytest.fixture
def walked(reference, capsys):
    """Return the exit status and the text of a walk through some cells."""

    def run(text):
        cells = [read_cells(text)]
        status = walk(cells, reference, Console(width=100), ["nothing is installed"])
        return status, capsys.readouterr().out

    return run


# -- reading cells ----------------------------------------------------------------------------


def test_text_and_code_are_distinguished():
    text = f"# Title\n\nWords.\n\n{code_cell('x = 1' + chr(10) * 2 + 'x')}\nMore.\n"
    assert [(cell["cell_type"], cell["source"]) for cell in read_cells(text)] == [
        ("markdown", "# Title\n\nWords."),
        ("code", "x = 1\n\nx"),
        ("markdown", "More."),
    ]


def test_a_line_of_three_pluses_separates_texts():
    assert [cell["source"] for cell in read_cells("One.\n\n+++\n\nTwo.\n")] == ["One.", "Two."]


def test_tags_are_read():
    (cell,) = read_cells(
        '```{code-cell} ipython3\n:tags: ["gpus=2", "X[0]@d2l.gpu(1)"]\n\nx\n```\n'
    )
    assert cell["metadata"]["tags"] == ["gpus=2", "X[0]@d2l.gpu(1)"]
    assert cell["source"] == "x"


def test_the_front_matter_is_left_out():
    text = f"---\nkernelspec:\n  name: python3\n---\n\n{code_cell('x')}"
    assert [cell["source"] for cell in read_cells(text)] == ["x"]


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
    status, text = walked(code_cell("1 / 0") + code_cell("'the next'"))
    assert status == 1
    assert "FAILED ZeroDivisionError: division by zero" in text
    assert "\n'the next'\n" in text.split("FAILED")[1]
    assert "\nnote: nothing is installed\n1 cells ran on reference." in text
    assert "1 cells failed." in text


def test_a_cell_that_needs_more_gpus_is_shown_and_not_run(walked):
    status, text = walked(code_cell("1 / 0", "gpus=3"))
    assert status == 0
    assert "1 / 0" in text
    assert "needs 3 GPUs: reference has 2 here" in text
    assert "1 cells were left out" in text


def test_text_has_the_width_of_the_terminal(walked):
    _, text = walked(f"{'word ' * 100}\n")
    assert max(map(len, text.splitlines())) <= 100


# -- the notebooks ----------------------------------------------------------------------------

EXECUTE = """
import contextlib, io, json, pathlib
namespace = {"__name__": "__main__"}
printed = io.StringIO()
ran = raised = 0
with contextlib.redirect_stdout(printed):
    for cell in json.loads(pathlib.Path(NAME).read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            try:
                exec(cell["source"], namespace)
            except Exception:
                assert "raises-exception" in cell["metadata"]["tags"]
                raised += 1
            else:
                assert "raises-exception" not in cell["metadata"].get("tags", [])
                ran += 1
show([ran, raised])
"""
"""The cells in order, as a notebook runs them."""


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    """A new folder with the notebooks."""
    folder = tmp_path_factory.mktemp("notebooks") / "new"
    done = run_command("tour", "--notebook", str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def read_notebook(folder, name):
    return json.loads((folder / f"{name}.ipynb").read_text("utf-8"))


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_of_a_notebook_runs_without_any_variable(name, handout):
    program = EXECUTE.replace("NAME", repr(f"{name}.ipynb"))
    ((ran, raised),) = run_python(program, folder=handout)
    code = [cell for cell in CELLS[name] if cell["cell_type"] == "code"]
    assert raised == sum("raises-exception" in tags_of(cell) for cell in code)
    assert ran + raised == len(code) + 1  # the first one chooses the framework


@pytest.mark.parametrize("name", CELLS)
def test_a_notebook_has_the_cells_of_its_source_after_the_choice_of_a_framework(name, handout):
    choice, *cells = read_notebook(handout, name)["cells"]
    assert all(each.pop("id") == f"cell-{i}" for i, each in enumerate(cells, 1))
    assert cells == CELLS[name]
    assert choice["source"].splitlines()[-2:] == [
        "d2ldev.virtual_gpus(2)  # remove this line on a machine with GPUs",
        'd2ldev.set_backend("reference")',
    ]


def test_a_notebook_makes_the_virtual_gpus_of_the_tour(tmp_path):
    run_command("tour", "--notebook", str(tmp_path), D2LDEV_VIRTUAL_GPUS="1")
    assert "virtual_gpus(1)" in read_notebook(tmp_path, "gpus")["cells"][0]["source"]


def test_a_notebook_makes_no_virtual_gpus_if_the_tour_has_none(tmp_path):
    run_command("tour", "--notebook", str(tmp_path), D2LDEV_VIRTUAL_GPUS="0")
    assert "virtual_gpus" not in read_notebook(tmp_path, "gpus")["cells"][0]["source"]


def test_a_notebook_has_the_keys_of_nbformat_4_5(handout):
    document = read_notebook(handout, "gpus")
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    keys = {"markdown": {"cell_type", "id", "metadata", "source"}}
    keys["code"] = keys["markdown"] | {"execution_count", "outputs"}
    assert all(set(cell) == keys[cell["cell_type"]] for cell in document["cells"])


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("tour", "--notebook", str(tmp_path / "file" / "new"))
    said = f"error: cannot write notebooks into {tmp_path}/file/new: Not a directory\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_file_of_the_same_name_stays_and_no_other_is_written(tmp_path):
    last = tmp_path / f"{TUTORIALS[-1].stem}.ipynb"
    last.write_text("my notes", encoding="utf-8")
    done = run_command("tour", "--notebook", str(tmp_path))
    problem = f"{last.name} is there already; fix: name another folder"
    said = f"error: cannot write notebooks into {tmp_path}: {problem}\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert [path.name for path in tmp_path.iterdir()] == [last.name]
    assert last.read_text(encoding="utf-8") == "my notes"


# -- the tutorials -----------------------------------------------------------------------------


def test_the_tutorials_have_the_sections_of_the_book():
    titles = [
        line.lstrip("# ")
        for cells in CELLS.values()
        for cell in cells
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
        "13.5.1 Splitting the Problem",
        "13.5.2 Data Parallelism",
        "13.5.3 A Toy Network",
        "13.5.4 Data Synchronization",
        "13.5.5 Distributing Data",
        "13.5.6 Training",
        "13.5.7 Summary",
        "13.5.8 Exercises",
        "13.6 Concise Implementation for Multiple GPUs",
        "13.6.1 A Toy Network",
        "13.6.2 Network Initialization",
        "13.6.3 Training",
        "13.6.4 Summary",
        "13.6.5 Exercises",
    ]


def test_the_tutorials_import_no_framework():
    imported = set()
    for cell in CODE:
        for node in ast.walk(ast.parse(cell["source"])):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    assert imported - sys.stdlib_module_names == {"d2ldev", "numpy"}


def test_a_cell_that_prints_where_its_result_is_claims_it():
    says = [cell for cell in CODE if re.search(r'"on"| on \{', cell["source"])]
    assert len(says) > 4
    unclaimed = [cell["source"] for cell in says if "@" not in "".join(tags_of(cell))]
    assert unclaimed == []


def test_every_tag_is_one_that_is_known():
    tags = [tag for cell in CODE for tag in tags_of(cell)]
    assert len(tags) > 20
    for tag in tags:
        assert re.fullmatch(r"gpus=\d|raises-exception|[^@ ]+@[^@ ]+", tag)


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
    left_out = sum("gpus=2" in tags_of(cell) for cell in CODE)
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
