"""Callbacks that write the history to a file, as a table or for TensorBoard.

Only rank 0 of several processes writes. A run that resumes writes its whole history again, so the
file has each epoch once. After that each epoch is appended, in one write.
"""

from __future__ import annotations

import csv
import io
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from d2ldev.dependencies import import_optional
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.files.format.atomic import replace_file
from d2ldev.settings import peers as find_peers
from d2ldev.training.callbacks import NeedsHistory, history_refusal
from d2ldev.typing import History


class _Logger(NeedsHistory):
    """Write each epoch of the history.

    Args:
        path: the file or folder, as text.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # The history of the run in the file.
        self._history: History | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._path!r})"

    def check_names(self, names: Collection[str]) -> None:
        """Check that the history has any numbers.

        Args:
            names: the names in the history of the run.

        Raises:
            UnsupportedValueError: if there are none.
        """
        if not names:
            fix = "leave out the fit_epoch, or write to a file in it"
            raise history_refusal("log the history", names, fix)

    def on_epoch_end(self, _epoch: int, history: History) -> None:
        """Write the numbers of the epoch, if this is rank 0.

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
        """Write all epochs of a run, and replace an older run."""

    @abstractmethod
    def _add(self, epoch: int, row: Mapping[str, float]) -> None:
        """Append an epoch."""


class CSVLogger(_Logger):
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
    epoch,loss
    0,0.0
    1,0.0
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


class TensorBoardLogger(_Logger):
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
