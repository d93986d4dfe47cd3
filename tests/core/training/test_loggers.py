"""What is logged into files: each epoch once, in whole lines, by the first process."""

import os
import signal
import sys

import numpy as np
import pytest
from launched import together

import d2ldev
from d2ldev import CSVLogger, PackageNotInstalledError, TensorBoardLogger, Trainer
from d2ldev.errors import UnsupportedValueError

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


def fit(path, epochs, *others, **options):
    backend = d2ldev.get_backend("reference")
    logger = path if isinstance(path, CSVLogger) else CSVLogger(path)
    trainer = Trainer(epochs, backend=backend, callbacks=[logger, *others])
    return trainer.fit(backend.mlp([2, 1], seed=0), [BATCH] * 2, [BATCH], lr=0.1, **options)


def expect(history):
    rows = zip(history["loss"], history["val_loss"], strict=True)
    return [
        ["epoch", "loss", "val_loss"],
        *([str(i), *map(str, row)] for i, row in enumerate(rows)),
    ]


def lines(path):
    text = path.read_text()
    assert text.endswith("\n")
    return [line.split(",") for line in text.splitlines()]


def test_each_epoch_is_a_line_while_the_run_goes_on(tmp_path):
    path, seen = tmp_path / "run.csv", []
    history = fit(path, 3, lambda epoch, history: seen.append(len(lines(path))))
    assert seen == [2, 3, 4]
    assert lines(path) == expect(history)


def test_nan_is_written(tmp_path):
    logger = CSVLogger(tmp_path / "run.csv")
    logger.on_epoch_end(0, {"loss": [float("nan")]})
    assert lines(tmp_path / "run.csv") == [["epoch", "loss"], ["0", "nan"]]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_resumed_run_repeats_no_line(tmp_path, is_same):
    path, checkpoint = tmp_path / "run.csv", tmp_path / "run"

    def fail(epoch, history):
        if epoch == 2:
            raise RuntimeError

    logger = CSVLogger(path)
    with pytest.raises(RuntimeError):
        fit(logger, 4, fail, checkpoint=checkpoint)
    assert len(lines(path)) == 4  # of three epochs, the last of which is in no checkpoint
    history = fit(logger if is_same else path, 4, checkpoint=checkpoint, resume=True)
    assert lines(path) == expect(history)


def test_another_run_takes_its_place(tmp_path):
    logger = CSVLogger(tmp_path / "run.csv")
    fit(logger, 3)
    history = fit(logger, 2)
    assert lines(tmp_path / "run.csv") == expect(history)


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path):
    path = tmp_path / "run.csv"

    def kill(epoch, history):
        if epoch == 30:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            fit(path, 100, kill)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [line[0] for line in lines(path)] == ["epoch", *map(str, range(31))]
    assert {len(line) for line in lines(path)} == {3}


def test_the_first_of_several_processes_writes(tmp_path):
    def body(rank):
        path = tmp_path / f"{rank}.csv"
        history = fit(path, 2)
        return history, path.exists() and lines(path)

    first, second = (each.value for each in together(body))
    assert first == (second[0], expect(first[0]))
    assert second[1] is False


@pytest.mark.parametrize("path", [3, None, "", "nowhere/run.csv", "."])
def test_an_invalid_path_of_a_file_is_refused_at_once(path):
    with pytest.raises(UnsupportedValueError, match="log to a file"):
        CSVLogger(path)


def test_a_history_of_nothing_is_refused_before_the_run(reference, tmp_path):
    class Own(Trainer):
        def fit_epoch(self):
            raise AssertionError

    trainer = Own(1, backend=reference, callbacks=CSVLogger(tmp_path / "run.csv"))
    with pytest.raises(UnsupportedValueError, match="fit_epoch is your own"):
        trainer.fit(reference.mlp([2, 1]), [BATCH])


def test_without_tensorboard_the_line_that_installs_it_is_named(monkeypatch, tmp_path):
    for name in ("tensorboard", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackageNotInstalledError, match="pip install tensorboard"):
        TensorBoardLogger(tmp_path)


@pytest.mark.parametrize("folder", [3, None, ""])
def test_an_invalid_path_of_a_folder_is_refused_at_once(folder):
    with pytest.raises(UnsupportedValueError, match="log for TensorBoard"):
        TensorBoardLogger(folder)
