"""What is logged into files and to services: each epoch once, by the first process."""

import copy
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from launched import together
from pages import find_blocks

import d2ldev
from d2ldev import CSVLogger, PackageNotInstalledError, TensorBoardLogger, Trainer
from d2ldev.errors import UnsupportedValueError
from d2ldev.loggers import MLflowLogger, WandbLogger

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


def fit(path, epochs, *others, **options):
    backend = d2ldev.get_backend("reference")
    logger = path if isinstance(path, CSVLogger) else CSVLogger(path)
    trainer = Trainer(epochs, backend=backend, callbacks=[logger, *others])
    return trainer.fit(backend.mlp([2, 1], seed=0), [BATCH] * 2, [BATCH], lr=0.1, **options)


def expect(history):
    rows = zip(history["loss"], history["val_loss"], history["lr"], strict=True)
    return [
        ["epoch", "loss", "val_loss", "lr"],
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
    assert {len(line) for line in lines(path)} == {4}


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


# -- services -------------------------------------------------------------------------------------


class FakeRun:
    """A run of a service that records what it is given."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End it."""

    def __init__(self, **settings):
        self.settings, self.logged, self.summary = settings, [], {}
        self.resumed = settings.get("resume") is not None
        self.info = SimpleNamespace(run_id="the run")

    def log(self, numbers):
        self.logged.append(numbers)
        self.summary.update(numbers)


@pytest.fixture
def wandb(monkeypatch):
    """The public functions of ``wandb``, without a service."""
    module = ModuleType("wandb")
    module.run = None

    def init(**settings):
        module.run = FakeRun(**settings)
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    """The public functions of ``mlflow``, without a service."""
    module = ModuleType("mlflow")
    module.run, module.logged = None, []

    def start_run():
        module.run = FakeRun()
        return module.run

    def log_metrics(numbers, *, step, run_id):
        module.logged.append((run_id, step, numbers))

    def get_metric_history(run_id, name):
        found = [step for run, step, numbers in module.logged if run == run_id and name in numbers]
        return [SimpleNamespace(step=step) for step in found]

    module.start_run, module.active_run = start_run, lambda: module.run
    module.log_metrics = log_metrics
    module.MlflowClient = lambda: SimpleNamespace(get_metric_history=get_metric_history)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def fit_with(logger, epochs, *others, **options):
    backend = d2ldev.get_backend("reference")
    trainer = Trainer(epochs, backend=backend, callbacks=[logger, *others])
    return trainer.fit(backend.mlp([2, 1], seed=0), [BATCH] * 2, [BATCH], lr=0.1, **options)


def rows_of(history):
    return [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]


def test_a_run_of_wandb_gets_each_epoch_while_the_run_goes_on(wandb):
    seen = []
    logger = WandbLogger(project="houses", name="first")
    history = fit_with(logger, 2, lambda *_: seen.append(len(wandb.run.logged)))
    assert seen == [1, 2]
    assert wandb.run.settings == {"project": "houses", "name": "first"}
    assert wandb.run.logged == [{"epoch": i, **row} for i, row in enumerate(rows_of(history))]


@pytest.mark.parametrize("is_given", [False, True])
def test_the_users_run_of_wandb_is_used(wandb, is_given):
    run = wandb.init(project="houses")
    if is_given:
        wandb.run = None
    fit_with(WandbLogger(run) if is_given else WandbLogger(), 1)
    assert len(run.logged) == 1
    assert wandb.run is (None if is_given else run)


def cut_at(last):
    def cut(epoch, history):
        if epoch == last:
            raise RuntimeError

    return cut


def test_a_resumed_run_of_wandb_gets_no_epoch_twice_but_those_that_are_trained_again(
    wandb, tmp_path
):
    options = {"checkpoint": tmp_path / "run", "resume": True}
    with pytest.raises(RuntimeError):
        fit_with(WandbLogger(), 4, cut_at(2), **options)
    run = wandb.run
    run.resumed = True  # wandb.init(id=..., resume="must") in another process
    history = fit_with(WandbLogger(run), 4, **options)
    assert [row["epoch"] for row in run.logged] == [0, 1, 2, 2, 3]
    wandb.run = None
    assert len(fit_with(WandbLogger(), 5, **options)["loss"]) == 5
    # A new run gets the whole history.
    assert wandb.run.logged[:4] == [{"epoch": i, **row} for i, row in enumerate(rows_of(history))]


def test_settings_beside_an_active_run_of_wandb_are_refused(wandb):
    wandb.init()
    with pytest.raises(UnsupportedValueError, match="a run has begun, and would ignore it"):
        WandbLogger(project="houses")
    with pytest.raises(UnsupportedValueError, match="is not a run"):
        WandbLogger("houses")


def test_a_copy_of_a_logger_has_its_run(wandb):
    run = wandb.init()
    wandb.run = None
    for make in (copy.copy, copy.deepcopy):
        fit_with(make(WandbLogger(run)), 1)
    assert len(run.logged) == 2
    assert wandb.run is None


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_active_run_of_mlflow_gets_each_epoch(mlflow, is_begun):
    if is_begun:
        mlflow.start_run()
    history = fit_with(MLflowLogger(), 2)
    expected = [("the run", i, row) for i, row in enumerate(rows_of(history))]
    assert mlflow.logged == expected


def test_a_resumed_run_of_mlflow_gets_no_epoch_twice_but_those_that_are_trained_again(
    mlflow, tmp_path
):
    options = {"checkpoint": tmp_path / "run", "resume": True}
    with pytest.raises(RuntimeError):
        fit_with(MLflowLogger("mine"), 4, cut_at(2), **options)
    fit_with(MLflowLogger("mine"), 4, **options)
    assert [step for _, step, _ in mlflow.logged] == [0, 1, 2, 2, 3]
    assert {run for run, *_ in mlflow.logged} == {"mine"}
    with pytest.raises(UnsupportedValueError, match="is not the id of a run"):
        MLflowLogger(3)


@pytest.mark.parametrize(
    ("make", "package"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow")], ids=str
)
def test_without_the_package_of_a_service_the_line_that_installs_it_is_named(
    monkeypatch, make, package
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PackageNotInstalledError, match=f"pip install {package}"):
        make()


def test_the_first_of_several_processes_logs_to_a_service(mlflow):
    def body(rank):
        fit_with(MLflowLogger(f"run {rank}"), 1)
        return [run for run, *_ in mlflow.logged]

    assert [each.value for each in together(body)] == [["run 0"], []]


def test_the_programs_of_the_page_log_to_the_services(wandb, mlflow):
    page = Path(__file__).parents[3] / "docs" / "training.md"
    ((_, _, program),) = find_blocks(page, "fragment")
    backend = d2ldev.get_backend("reference")

    def make(epochs, **options):
        return Trainer(epochs, backend=backend, **options)

    exec(program, {"Trainer": make, "net": backend.mlp([2, 1]), "batches": [BATCH]})
    assert [len(wandb.run.logged), len(mlflow.logged)] == [10, 10]
