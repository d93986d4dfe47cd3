"""What a notebook shows, in a real kernel: one line of progress, tables, the plot, errors."""

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient
from processes import extend_path

CELLS = {
    "module": """
%%writefile slow.py
import time

class Slow(list):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.04)
            yield batch
""",
    "setup": """
import time
import numpy as np
import d2ldev

class Slow(list):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.04)
            yield batch

batch = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
backend = d2ldev.get_backend("reference")
net = backend.mlp([2, 3, 1])
trainer = d2ldev.Trainer(3, backend=backend, enable_progress_bar=True)
""",
    "fit": "history = trainer.fit(net, Slow([batch] * 15), [batch], metrics=())",
    "history": "history",
    "plot": "ax = history.plot()",
    "figures": "import matplotlib.pyplot as plt; print(plt.get_fignums())",
    "summary": "backend.summarize(net)",
    "placement": "backend.placement(net)",
    "error": "trainer.fit(object(), [batch])",
    "callback": """
def stop(epoch, history):
    backend.ones(2, device="gpu:9")

d2ldev.Trainer(1, backend=backend, callbacks=[stop]).fit(net, [batch], metrics=())
""",
    "two GPUs": """
from slow import Slow
d2ldev.virtual_gpus(2)
torch = d2ldev.get_backend("torch")
trainer = d2ldev.Trainer(2, num_gpus=2, backend=torch, enable_progress_bar=True)
trainer.fit(torch.mlp([2, 1]), Slow([batch] * 15), metrics=());
""",
    "all frames": """
get_ipython().InteractiveTB.skip_hidden = False
trainer.fit(object(), [batch])
""",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each cell."""
    folder = str(tmp_path_factory.mktemp("notebook"))
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environment = os.environ | {"PYTHONPATH": extend_path([])}
    environment.pop("PYTHONSAFEPATH", None)  # a user's kernel imports from the notebook's folder
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, timeout=120, allow_errors=True, resources=resources)
    client.execute(env=environment)
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def test_progress_is_one_line_that_is_replaced(outputs):
    (line,) = outputs["fit"]
    assert line["output_type"] == "display_data"
    assert line["data"]["text/plain"].startswith("epoch 3/3: loss ")
    assert "val_loss" in line["data"]["text/plain"]
    assert "examples/s" in line["data"]["text/plain"]
    assert '<progress value="3" max="3">' in line["data"]["text/html"]


def test_the_progress_of_processes_is_one_line_too(outputs):
    (line,) = outputs["two GPUs"]
    assert line["output_type"] == "display_data", line
    assert line["data"]["text/plain"].startswith("epoch 2/2: loss ")
    assert '<progress value="2" max="2">' in line["data"]["text/html"]


def test_a_history_is_a_table(outputs):
    (shown,) = outputs["history"]
    assert shown["data"]["text/html"].count("<tr>") == 4
    assert shown["data"]["text/plain"].startswith("{'loss': [")


def test_a_plot_is_shown_once_and_closed(outputs):
    kinds = [each["data"].keys() for each in outputs["plot"]]
    assert [("image/png" in each) for each in kinds] == [True]
    assert outputs["figures"][0]["text"] == "[]\n"


def test_a_summary_is_a_table(outputs):
    (shown,) = outputs["summary"]
    assert shown["data"]["text/html"].count("<tr>") == 4


def test_a_placement_is_a_table(outputs):
    (shown,) = outputs["placement"]
    assert "4 on cpu" in shown["data"]["text/html"]


def list_frames(cell):
    """Return the frames of the error that a cell shows: a name of a file, "cell" or "hidden"."""
    (error,) = (each for each in cell if each["output_type"] == "error")
    plain = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))
    pattern = r"^(?:(Cell) In|File .*?([\w.]+):\d+|.*(hidden) \d+ frame)"
    return ["".join(found).lower() for found in re.findall(pattern, plain, re.MULTILINE)]


def test_an_error_shows_the_cell_and_the_last_frame(outputs):
    assert list_frames(outputs["error"]) == ["cell", "hidden", "inventory.py"]


def test_an_error_in_a_callback_shows_the_user_s_frames(outputs):
    shown = list_frames(outputs["callback"])
    assert shown == ["cell", "hidden", "cell", "hidden", "devices.py"]


def test_all_frames_of_an_error_are_shown_on_demand(outputs):
    shown = list_frames(outputs["all frames"])
    assert len(shown) > 5
    assert shown[:2] == ["cell", "trainer.py"]
    assert "hidden" not in shown
