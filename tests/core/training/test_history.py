"""``History``: a dict with the numbers of a run, which draws itself and keeps its type."""

import copy
import json
import pickle
import sys

import numpy as np
import pytest
from installs import find_extras
from processes import run_python

import d2ldev
from d2ldev import PackageNotInstalledError, Trainer
from d2ldev.results import History

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
NUMBERS = {"loss": [2.0, 1.0], "val_loss": [2.5, 1.5], "accuracy": [0.25, 0.75]}


@pytest.fixture
def fit(reference):
    def fit_epochs(epochs, **options):
        trainer = Trainer(epochs, backend=reference)
        history = trainer.fit(reference.mlp([2, 1]), [BATCH], [BATCH], **options)
        assert history is trainer.history
        return history

    return fit_epochs


def test_fit_returns_a_history_that_equals_a_dict(fit):
    history = fit(2)
    assert type(history) is History
    assert history == {name: list(values) for name, values in history.items()}
    assert history.keys() == {"loss", "val_loss", "lr"}


def test_callbacks_get_a_history(reference):
    seen = []
    trainer = Trainer(1, backend=reference, callbacks=lambda epoch, history: seen.append(history))
    trainer.fit(reference.mlp([2, 1]), [BATCH])
    assert [type(each) for each in seen] == [History]


def test_a_resumed_run_returns_a_history_of_all_epochs(fit, tmp_path):
    first = fit(1, checkpoint=tmp_path / "run")
    history = fit(3, checkpoint=tmp_path / "run", resume=True)
    assert type(history) is History
    assert history["loss"][:1] == first["loss"]
    assert len(history["loss"]) == 3


def test_a_trainer_that_is_pickled_keeps_the_type_of_its_history(reference):
    trainer = Trainer(1, backend=reference)
    trainer.fit(reference.mlp([2, 1]), [BATCH])
    sent = pickle.loads(pickle.dumps(trainer))
    assert (type(sent.history), sent.history) == (History, trainer.history)


@pytest.mark.parametrize(
    "send",
    [copy.copy, copy.deepcopy, *(lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in (2, 5))],
)
def test_a_copy_is_a_history(send):
    history = History(NUMBERS)
    assert (type(send(history)), send(history)) == (History, NUMBERS)


def test_json_and_files_hold_it_as_a_dict(reference, tmp_path):
    history = History(NUMBERS)
    assert json.loads(json.dumps(history)) == NUMBERS
    reference.save(history, tmp_path / "history")
    loaded = reference.load(tmp_path / "history")
    assert (type(loaded), loaded) == (dict, NUMBERS)
    assert History(loaded) == history


def test_the_table_of_a_notebook_has_the_epochs_and_the_escaped_names():
    text = History({"<loss>": [2.0, 0.123456]})._repr_html_()
    assert "&lt;loss&gt;" in text
    assert "<loss>" not in text
    assert text.count("<tr>") == 3
    assert "0.1235" in text


def test_the_table_has_all_epochs_of_columns_of_different_lengths():
    text = History(loss=[2.0, 1.0, 0.5], val_loss=[3.0])._repr_html_()
    assert text.count("<tr>") == 4
    assert ">0.5</td>" in text


# -- drawing -----------------------------------------------------------------------------------


def test_plot_draws_each_number_by_epoch_and_returns_the_axes():
    pytest.importorskip("matplotlib")
    axes = History({**NUMBERS, "lr": [0.1] * 3}).plot()  # the rate would be a line at 0
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert drawn == {
        name: [[number, value] for number, value in enumerate(values, 1)]
        for name, values in NUMBERS.items()
    }
    assert axes.get_xlabel() == "epoch"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(NUMBERS)


def test_plot_draws_on_the_axes_that_are_given():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    assert History(NUMBERS).plot(axes) is axes
    assert len(axes.get_lines()) == len(NUMBERS)


def test_a_history_without_numbers_is_drawn_as_empty_axes():
    pytest.importorskip("matplotlib")
    axes = History().plot()
    assert len(axes.get_lines()) == 0
    assert axes.get_legend() is None


PLOT = """
import sys
import matplotlib
from d2ldev.results import History

def list_settings():
    # Past its own ``items``, which would choose a backend.
    return dict(dict.items(matplotlib.rcParams))

before = list_settings()
history = History(loss=[2.0, 1.0])
history.plot().figure.savefig("loss.png")
show("matplotlib.pyplot" in sys.modules)
show([name for name, value in list_settings().items() if before[name] != value])
import matplotlib.pyplot as plt
history.plot()
show(plt.get_fignums())
"""


def test_plot_works_without_a_display_and_changes_nothing_of_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    environment = {"DISPLAY": "", "MPLCONFIGDIR": str(tmp_path)}
    found = run_python(PLOT, environment=environment, folder=tmp_path)
    assert found == [False, [], []]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.ticker", None)
    with pytest.raises(PackageNotInstalledError, match="plot a history") as caught:
        History(NUMBERS).plot()
    assert find_extras(caught.value.fix) == ["plots"]


def test_it_is_the_type_that_users_annotate_with():
    assert d2ldev.typing.History is History
