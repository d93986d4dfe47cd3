"""The notebooks of ``d2ldev tour``, and the extension that runs them for the site."""

import asyncio
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from sphinx.errors import ExtensionError

from d2ldev.cli import tour

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "docs" / "_extensions"))

import tutorials  # noqa: E402

paths = pytest.mark.parametrize("path", tour.TUTORIALS, ids=lambda path: path.stem)


def code_cell(source, *tags):
    return {**tour.read_cells(f"```{{code-cell}}\n{source}\n```\n")[0], "metadata": {"tags": tags}}


def run(cells, folder, *frameworks):
    return asyncio.run(tutorials.run_everywhere(cells, folder, frameworks))


@paths
def test_jupytext_reads_the_same_cells(path):
    theirs = [
        (cell.cell_type, cell.source, cell.metadata.get("tags", []))
        for cell in jupytext.read(path).cells
    ]
    ours = tour.read_cells(path.read_text(encoding="utf-8"))
    assert theirs == [(cell["cell_type"], cell["source"], tour.tags_of(cell)) for cell in ours]


@paths
def test_a_notebook_is_valid(path):
    cells = tour.read_cells(path.read_text(encoding="utf-8"))
    nbformat.validate(tour.make_notebook(cells))


def test_each_framework_runs_the_cells_once_and_its_output_is_kept(tmp_path):
    cells = [code_cell("import d2ldev\nprint(1)\nd2ldev.backend.name")]
    expected = {"reference": ["```text\n1\n'reference'\n```"]}
    assert run(cells, tmp_path, "reference") == expected
    (kept,) = tmp_path.iterdir()
    kept.write_text('["kept"]', encoding="utf-8")
    assert run(cells, tmp_path, "reference") == {"reference": ["kept"]}
    assert run([code_cell("1")], tmp_path, "reference") == {"reference": ["```text\n1\n```"]}


def test_a_cell_that_fails_ends_the_build(tmp_path):
    with pytest.raises(ExtensionError, match=r"fails on reference:(.|\n)*ZeroDivisionError"):
        run([code_cell("1 / 0")], tmp_path, "reference")
    assert [*tmp_path.iterdir()] == []


def test_an_error_that_a_tag_announces_is_an_output(tmp_path):
    cells = [code_cell("1 / 0", "raises-exception")]
    outputs = {"reference": ["```text\nZeroDivisionError: division by zero\n```"]}
    assert run(cells, tmp_path, "reference") == outputs


def test_an_announced_error_that_does_not_come_ends_the_build(tmp_path):
    with pytest.raises(ExtensionError, match="no error comes from this cell:\n1 / 1"):
        run([code_cell("1 / 1", "raises-exception")], tmp_path, "reference")


def test_equal_outputs_have_no_tabs_and_different_ones_have_one_for_each_framework():
    cells = [*tour.read_cells("# Title\n"), *map(code_cell, "xyz")]
    outputs = {"torch": ["same", "1", ""], "jax": ["same", "2", ""]}
    assert tutorials.write_page(cells, outputs) == (
        "# Title\n\n```python\nx\n```\n\n::::{div} cell-outputs\nsame\n::::\n\n"
        "```python\ny\n```\n\n"
        ":::::{tab-set}\n:class: cell-outputs\n:sync-group: framework\n\n\n"
        "::::{tab-item} PyTorch\n:sync: torch\n\n1\n::::\n\n"
        "::::{tab-item} JAX\n:sync: jax\n\n2\n::::\n\n:::::\n\n"
        "```python\nz\n```\n"
    )


def test_code_that_has_a_fence_does_not_end_its_block():
    assert tutorials.fence("text", "a\n```\nb") == "````text\na\n```\nb\n````"


def test_without_a_framework_a_page_has_its_code():
    assert tutorials.write_page([code_cell("x")], {}) == "```python\nx\n```\n"


def test_a_framework_s_log_is_no_output():
    text = "1\nINFO:tensorflow:Reduce to CPU:1\n2\n"
    output = {"output_type": "stream", "name": "stdout", "text": text}
    cell = {**code_cell("fit()"), "outputs": [output]}
    assert tutorials.write_output(cell, "tensorflow") == "```text\n1\n2\n```"


def test_a_figure_is_part_of_the_page():
    data = {"image/png": "iVBOR\n", "text/plain": "<Figure size 1x1>"}
    output = {"output_type": "display_data", "data": data}
    image = '<img src="data:image/png;base64,iVBOR" alt="&lt;Figure size 1x1&gt;">'
    cell = {**code_cell("plot()"), "outputs": [output]}
    assert tutorials.write_output(cell, "torch") == f"```{{raw}} html\n{image}\n```"


def test_a_table_that_a_call_displays_is_html_and_a_value_is_text():
    data = {"text/html": "<table></table>", "text/plain": "table"}
    shown = {"output_type": "display_data", "data": data}
    value = {"output_type": "execute_result", "data": data}
    cell = {**code_cell("show(net)"), "outputs": [shown, value]}
    table = '<div class="pst-scrollable-table-container"><table></table></div>'
    assert tutorials.write_output(cell, "torch") == (
        f"```text\ntable\n```\n```{{raw}} html\n{table}\n```"
    )
