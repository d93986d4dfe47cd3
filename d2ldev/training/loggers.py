"""Callbacks that log the history to a file, or to a service for experiments.

Only rank 0 of several processes logs. A run that resumes writes its whole history to the file
again, so the file has each epoch once. After that each epoch is appended, in one write.
"""

from __future__ import annotations

import csv
import io
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from d2ldev.dependencies import import_optional
from d2ldev.distributed.spawning import find_sender
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.files.format.atomic import replace_file
from d2ldev.settings import peers as find_peers
from d2ldev.training.callbacks import NeedsHistory, history_refusal
from d2ldev.typing import Callback, History


class _Logger(NeedsHistory):
    """Log each epoch of the history."""

    # The history of the run in the log.
    _history: History | None = None

    def check_names(self, names: Collection[str]) -> None:
        """Check that the history has any numbers.

        Args:
            names: the names in the history of the run.

        Raises:
            UnsupportedValueError: if there are none.
        """
        if not names:
            fix = "leave out the fit_epoch, or log in it"
            raise history_refusal("log the history", names, fix)

    def on_epoch_end(self, _epoch: int, history: History) -> None:
        """Log the numbers of the epoch, if this is rank 0.

        Args:
            epoch: the number of the epoch, from 0.
            history: the history so far.
        """
        peers = find_peers()
        if peers is not None and peers.rank:
            return
        rows = [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]
        if history is self._history:
            self._add(len(rows) - 1, rows[-1])
        else:
            self._begin(rows)
            self._history = history

    @abstractmethod
    def _begin(self, rows: list[dict[str, float]]) -> None:
        """Log all epochs of a run, in the place of an older run."""

    @abstractmethod
    def _add(self, epoch: int, row: Mapping[str, float]) -> None:
        """Log another epoch."""


class _FileLogger(_Logger):
    """Write each epoch of the history.

    Args:
        path: the file or folder, as text.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._path!r})"


class CSVLogger(_FileLogger):
    """Write each epoch as a line of a CSV file: the number of the epoch, and its numbers.

    An existing file is replaced when the first epoch of a run ends.

    Args:
        path: the file. Its folder has to exist.

    Raises:
        UnsupportedValueError: if ``path`` is not the path of a file, or the folder does not exist.

    >>> X, y = np.zeros((8, 2), 'float32'), np.zeros((8, 1), 'float32')
    >>> trainer = d2ldev.Trainer(2, callbacks=CSVLogger('run.csv'))
    >>> history = trainer.fit(backend.mlp([2, 1]), [(X, y)])
    >>> from pathlib import Path
    >>> print(Path('run.csv').read_text())
    epoch,loss,lr
    0,0.0,0.01
    1,0.0,0.01
    <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text, fix = _text(path), "CSVLogger('run.csv')"
        if text is None or os.path.isdir(text) or not os.path.basename(text):
            problem = f"{describe(path)} is not the path of a file"
            raise UnsupportedValueError("log to a file", problem, fix)
        folder = os.path.dirname(text) or os.curdir
        if not os.path.isdir(folder):
            fix = f"os.makedirs({folder!r})"
            raise UnsupportedValueError("log to a file", f"{folder!r} is not a folder", fix)
        super().__init__(text)

    def _begin(self, rows: list[dict[str, float]]) -> None:
        lines: list[list[Any]] = [["epoch", *rows[0]]]
        lines += [[i, *row.values()] for i, row in enumerate(rows)]
        with replace_file(self._path) as new, open(new, "wb") as file:
            _write(file.fileno(), _csv(lines))

    def _add(self, epoch: int, row: Mapping[str, float]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            _write(descriptor, _csv([[epoch, *row.values()]]))
        finally:
            os.close(descriptor)


class TensorBoardLogger(_FileLogger):
    """Write each epoch for TensorBoard, as one scalar for each name.

    It needs the package ``tensorboard``, but not TensorFlow. Each run writes its own file, and
    TensorBoard shows this run in place of older ones in the folder.

    Args:
        folder: the folder of the run; it is created if it does not exist.

    Raises:
        UnsupportedValueError: if ``folder`` is not a path of a folder.
        PackageNotInstalledError: if ``tensorboard`` cannot be imported.

    >>> Trainer(10, callbacks=TensorBoardLogger('runs/first'))             # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        text = _text(folder)
        if not text or os.path.isfile(text):
            problem = f"{describe(folder)} is not a path of a folder"
            fix = "TensorBoardLogger('runs/first')"
            raise UnsupportedValueError("log for TensorBoard", problem, fix)
        for module in _WRITING:
            import_optional(module, "log for TensorBoard", install="pip install tensorboard")
        super().__init__(text)
        self._file = ""

    def _begin(self, rows: list[dict[str, float]]) -> None:
        os.makedirs(self._path, exist_ok=True)
        # TensorBoard looks for this pattern, and reads the files in the order of their names.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now}"
        self._file = os.path.join(self._path, name)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # START makes TensorBoard forget these steps of older files.
            events: list[dict[str, Any]] = [
                {"file_version": "brain.Event:2"},
                {"step": 0, "session_log": {"status": 1}},
            ]
            events += map(_event, range(len(rows)), rows)
            _write(descriptor, _records(events))
        finally:
            os.close(descriptor)

    def _add(self, epoch: int, row: Mapping[str, float]) -> None:
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND)
        try:
            _write(descriptor, _records([_event(epoch, row)]))
        finally:
            os.close(descriptor)


class RunLogger(_Logger):
    """Log each epoch to a run of a service, in the process that called ``fit``.

    The processes that ``fit`` starts for several GPUs of PyTorch do not have that run.
    """

    # What the processes that ``fit`` starts call the logger of this process.
    _name = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_name": self.name}

    @property
    def name(self) -> str:
        """The name of this object in the processes that ``fit`` starts."""
        return self._name or f"logger {id(self)}"

    def _begin(self, rows: list[dict[str, float]]) -> None:
        self._forward(0, rows)

    def _add(self, epoch: int, row: Mapping[str, float]) -> None:
        self._forward(epoch, [row])

    def _forward(self, first: int, rows: Sequence[Mapping[str, float]]) -> None:
        send = find_sender(self.name)
        if send is None:
            self.log_epochs(first, rows)
        else:
            send("log_epochs", first, rows)

    @abstractmethod
    def log_epochs(self, first: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Log epochs to the run; those that a resumed run has already are left out.

        Args:
            first: the number of the first epoch.
            rows: the numbers of each epoch.
        """


def _import_service(package: str) -> Any:
    """Return the package of a service from the user's environment."""
    return import_optional(package, f"log by {package}", install=f"pip install {package}")


def find_loggers_of_runs(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the callbacks that log in the process that called ``fit``, by their names."""
    return {each.name: each for each in callbacks if isinstance(each, RunLogger)}


class WandbLogger(RunLogger):
    """Log each epoch to a run of Weights & Biases: its number as ``epoch``, and its numbers.

    It needs the package ``wandb``. The run belongs to your program: ``run.finish()`` ends it, or
    the end of the program. A run that W&B resumes keeps the epochs that it has.

    Args:
        run: the run that ``wandb.init`` returned. None is the active run. Without one,
            ``wandb.init`` starts it when the first epoch ends.
        settings: the arguments of that ``wandb.init``, such as ``project``.

    Raises:
        UnsupportedValueError: for settings beside a run, which would have no effect.
        PackageNotInstalledError: if ``wandb`` cannot be imported.

    >>> Trainer(10, callbacks=WandbLogger(project='houses'))               # doctest: +SKIP
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        attempted, wandb = "log to Weights & Biases", _import_service("wandb")
        if run is not None and not callable(getattr(run, "log", None)):
            problem = f"{describe(run)} is not a run"
            raise UnsupportedValueError(
                attempted, problem, "WandbLogger(wandb.init(project='d2l'))"
            )
        active = wandb.run if run is None else run
        if active is not None and settings:
            names = ", ".join(f"{name}=" for name in settings)
            raise UnsupportedValueError(
                f"{attempted} with {names}",
                "a run has begun, and would ignore it",
                f"wandb.init({names}...) and WandbLogger(), or wandb.finish() before it",
            )
        self._run, self._settings = run, settings

    def __repr__(self) -> str:
        options = [] if self._run is None else [repr(self._run)]
        options += [f"{name}={value!r}" for name, value in self._settings.items()]
        return f"WandbLogger({', '.join(options)})"

    def __copy__(self) -> WandbLogger:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, _: Any) -> WandbLogger:
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        # Another process would write into the same run.
        return {**super().__getstate__(), "_run": None}

    def log_epochs(self, first: int, rows: Sequence[Mapping[str, float]]) -> None:
        wandb = _import_service("wandb")
        run = self._run or wandb.run or wandb.init(**self._settings)
        known = run.summary.get("epoch", -1) if run.resumed else -1
        *earlier, last = enumerate(rows, first)
        for epoch, row in [*(x for x in earlier if x[0] > known), last]:
            # Not as the step of W&B: the program may log more often.
            run.log({"epoch": epoch, **row})


class MLflowLogger(RunLogger):
    """Log each epoch to a run of MLflow, with the number of the epoch as the step.

    It needs the package ``mlflow``, and logs to where your program has pointed it. The run belongs
    to your program. A run that has earlier epochs already keeps them.

    Args:
        run_id: the id of a run. None is the active run. Without one, ``mlflow.start_run()`` starts
            it when the first epoch ends.

    Raises:
        PackageNotInstalledError: if ``mlflow`` cannot be imported.

    >>> with mlflow.start_run():                                           # doctest: +SKIP
    ...     Trainer(10, callbacks=MLflowLogger()).fit(net, data)
    """

    def __init__(self, run_id: str | None = None) -> None:
        _import_service("mlflow")
        if run_id is not None and not isinstance(run_id, str):
            problem = f"{describe(run_id)} is not the id of a run"
            fix = "MLflowLogger(run.info.run_id)"
            raise UnsupportedValueError("log to MLflow", problem, fix)
        self._run_id = run_id

    def __repr__(self) -> str:
        return f"MLflowLogger({'' if self._run_id is None else repr(self._run_id)})"

    def log_epochs(self, first: int, rows: Sequence[Mapping[str, float]]) -> None:
        mlflow, run_id = _import_service("mlflow"), self._run_id
        if run_id is None:
            run_id = (mlflow.active_run() or mlflow.start_run()).info.run_id
        known: set[int] = set()
        if len(rows) > 1:
            points = mlflow.MlflowClient().get_metric_history(run_id, next(iter(rows[0])))
            known = {point.step for point in points}
        *earlier, last = enumerate(rows, first)
        for epoch, row in [*(x for x in earlier if x[0] not in known), last]:
            mlflow.log_metrics(dict(row), step=epoch, run_id=run_id)


def _text(path: Any) -> str | None:
    try:
        return os.fsdecode(path)
    except (TypeError, ValueError):
        return None


def _write(descriptor: int, data: bytes) -> None:
    """Write in one piece: a process that is killed leaves whole lines."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _event(epoch: int, row: Mapping[str, float]) -> dict[str, Any]:
    values = [{"tag": name, "simple_value": value} for name, value in row.items()]
    return {"step": epoch, "summary": {"value": values}}


_WRITING = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
)


def _records(events: list[dict[str, Any]]) -> bytes:
    """Return events in the format of TensorBoard's files."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    writer = RecordWriter(file)
    for event in events:
        writer.write(Event(wall_time=time.time(), **event).SerializeToString())
    return file.getvalue()
