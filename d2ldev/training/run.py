"""``Run``: the progress of one ``fit``, and its checkpoint.

A run that is killed and resumed gives the same parameters as a run without a break. The checkpoint
holds the model, the optimizer, and what is frozen. It also holds the states of random
numbers and of the order of the batches. ``backend.load`` reads the file.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from d2ldev._backend import Backend, framework_of
from d2ldev.contract import Learner
from d2ldev.device import Device
from d2ldev.distributed.random_states import check_random_states, random_states
from d2ldev.errors import (
    CheckpointError,
    D2LDevError,
    UnsupportedValueError,
    quote,
    text_of,
)
from d2ldev.files.format.container import check_files
from d2ldev.files.load import Checkpoint, open_checkpoint
from d2ldev.files.load_into import prepare
from d2ldev.files.save import save
from d2ldev.files.structure import Outline
from d2ldev.history import History
from d2ldev.operations.arguments import as_path, length_of, whole_number
from d2ldev.options import Mode
from d2ldev.training.callbacks import check_states, find_sign, history_refusal
from d2ldev.training.feed import Feed
from d2ldev.training.log import DeviceLog
from d2ldev.training.order import Order
from d2ldev.training.rates import RATE, find_rate
from d2ldev.training.team import Team

_FORMAT = "d2ldev training state 10"


class Saving(NamedTuple):
    """Where to save the state of a run, and when.

    Args:
        checkpoint: the file; None saves nothing.
        checkpoint_every: also save after so many steps within an epoch; None does not.
        best: another file, for the state after the best epoch; None saves none.
        monitor: the number of the history that is best in it. None is the loss of ``val_data``, or
            else of the training.
        mode: whether the number should fall or rise; None is known for a loss.
    """

    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    best: str | os.PathLike[str] | None = None
    monitor: str | None = None
    mode: Mode | None = None

    def check(self) -> Saving:
        """Return it with an ``int`` of Python.

        Raises:
            UnsupportedValueError: for an invalid value, or values that contradict each other.
            PackageNotInstalledError: if a package to write files is missing.
        """
        attempted, every = "save the state of a run", self.checkpoint_every
        if self.checkpoint is not None or self.best is not None:
            check_files(attempted)
        if self.best is None and (self.monitor is not None or self.mode is not None):
            fix = "fit(..., best='best.safetensors')"
            raise UnsupportedValueError(attempted, "no file for the best epoch is named", fix)
        files = {"best": self.best, "checkpoint": self.checkpoint}
        paths = [as_path(x, f"save_{name}") for name, x in files.items() if x is not None]
        if self.best is not None:
            self.find_sign()
            if len(set(map(os.path.abspath, paths))) < len(paths):
                raise UnsupportedValueError(
                    f"save both the last and the best state of a run to {quote(paths[0])}",
                    "one would replace the other",
                    "fit(..., checkpoint='run.safetensors', best='best.safetensors')",
                )
        if self.checkpoint is None and every is not None:
            fix = "fit(..., checkpoint='run.safetensors')"
            raise UnsupportedValueError(attempted, "no checkpoint is named", fix)
        if every is None:
            return self
        every = whole_number(
            "save", "checkpoint_every", every, least=1, fix="checkpoint_every=1000"
        )
        return self._replace(checkpoint_every=min(every, sys.maxsize))  # for ``islice``

    def find_sign(self) -> int:
        """Return 1 if the monitored number should fall, and -1 if it should rise."""
        monitor: Any = "loss" if self.monitor is None else self.monitor
        return find_sign("keep the best epoch", monitor, self.mode, "fit(..., ")

    def check_names(self, names: Collection[str]) -> None:
        """Check that a history with these names has the monitored number.

        Raises:
            UnsupportedValueError: if it has not.
        """
        if self.monitor is not None and self.monitor not in names:
            fix = f"fit(..., monitor={next(iter(names))!r})"
            raise history_refusal(f"keep the epoch with the best {self.monitor!r}", names, fix)


# Settings of ``Trainer``, not of ``fit``.
_TRAINER_SETTINGS = ("gradient_clip_val", "accumulate_grad_batches", "precision")


class Run:
    """The progress of a run, and its checkpoint.

    Args:
        backend: the backend of the learner.
        learner: the learner of the model.
        data: the batches to train on; ``Order`` says which kinds have a state.
        names: the names of the numbers in the history.
        callbacks: the trainer's callbacks; the state holds those with ``state_dict``.
        saving: where to save the state, and when.
        team: the processes that train; the first one saves the state.

    Attributes:
        epoch, step: how many epochs and steps are done.
        history: name -> one number for each epoch.
    """

    def __init__(
        self,
        backend: Backend,
        learner: Learner,
        data: Any,
        names: Collection[str],
        callbacks: Sequence[Any],
        saving: Saving,
        team: Team,
    ) -> None:
        self.epoch = self.step = 0
        self.history = History({name: [] for name in names})
        self._backend, self._framework = backend, framework_of(backend)
        self._learner = learner
        self._data = data
        self._callbacks = [each for each in callbacks if hasattr(each, "state_dict")]
        self._saving = saving
        self._team = team
        self._path, self._best_path = (
            None if path is None else Path(as_path(path, "save"))
            for path in (saving.checkpoint, saving.best)
        )
        # The first epoch whose number counts for the best one.
        self._first_compared = 0
        # The states of the random numbers and of the data at the beginning of the epoch.
        self._epoch_start: dict[str, Any] = {}
        self._position: _Position | None = None
        # Whether to save the state as soon as no gradients wait for a step.
        self._is_due = False

    def record(self, numbers: dict[str, float]) -> None:
        """Append the numbers of an epoch, and the learning rate, to the history."""
        if RATE in self.history:
            rate = find_rate(self._framework, self._learner)
            numbers = {**numbers, RATE: math.nan if rate is None else rate}
        for name, value in numbers.items():
            self.history[name].append(value)
        self.epoch += 1

    def save(self, device: Device) -> None:
        """Save the state before the first epoch, and after each ``on_epoch_end``.

        So a file that cannot be written is an error before the first epoch. The state holds the
        changes of a hook, such as a frozen layer.

        Args:
            device: the device of the model.
        """
        paths = [] if self._path is None else [self._path]
        if self._best_path is not None and self._is_best():
            paths.insert(0, self._best_path)  # a killed run then makes the epoch again
        if paths:
            self._is_due = False
            self._mark_epoch(device)
        for path in paths:
            self._write(path, None)

    def save_within_epoch(self, batches: int, log: DeviceLog, device: Device) -> None:
        """Save the state within an epoch, if ``checkpoint_every`` batches are done.

        Args:
            batches: how many batches of the epoch are done. The others are not drawn yet.
            log: the log of the epoch.
            device: the device of the model.
        """
        every = self._saving.checkpoint_every
        self._is_due |= every is not None and self.step % every == 0
        # A file does not hold gradients that wait for a step of the optimizer.
        if self._path is not None and self._is_due and not self._learner.pending:
            self._is_due = False
            # A run that resumes from the file would not hear of them.
            self._learner.check_labels()
            position = {
                "batches": batches,
                "log": self._team.log_state(log),
                **random_states(self._framework, device),
            }
            self._write(self._path, position)

    @property
    def is_within_epoch(self) -> bool:
        """Whether the run resumes within an epoch."""
        return self._position is not None

    def count_to_draw(self) -> Callable[[], int] | None:
        """Return a function that counts the steps to the next ``save_within_epoch``, or None.

        The loop draws no batch after that step too early. A run that resumes there would draw it
        again, from other random numbers. None is for a run that does not save within an epoch.
        """
        every = self._saving.checkpoint_every
        if every is None:
            return None
        return lambda: 1 if self._is_due else every - self.step % every

    def resume_epoch(self, batches: Iterator[Any], log: DeviceLog) -> int:
        """Resume within an epoch: draw and skip the batches that are done.

        Args:
            batches: the batches of the whole epoch.
            log: the log of the epoch; it gets the numbers so far.

        Returns:
            How many batches are done; 0 for a run that does not resume within an epoch.

        Raises:
            CheckpointError: if the epoch has fewer batches.
        """
        position, self._position = self._position, None
        if position is None:
            return 0
        for _ in range(position.batches):
            if next(batches, position) is position:
                raise self._length_refusal(position.batches)
        if self._team.is_first:  # the log has the sums of all processes
            log.load_state_dict(position.log.state_dict())
        position.set_random_states()
        return position.batches

    def _length_refusal(self, batches: int) -> CheckpointError:
        return CheckpointError(
            f"resume from {self._path}",
            f"{batches} batches of the epoch were done, and the data has fewer",
            "resume with the data that the run began with",
        )

    def _is_best(self) -> bool:
        """Return whether no epoch was as good as this one; also before the first epoch."""
        if not self.epoch:
            return True
        name = self._saving.monitor or ("val_loss" if "val_loss" in self.history else "loss")
        *before, now = self.history[name][self._first_compared :]
        if math.isnan(now) and name == "val_loss" and self._learner.settings.methods is not None:
            raise UnsupportedValueError(
                "keep the best epoch",
                "its val_loss is NaN",
                "return the loss from validation_step, or fit(..., monitor='loss')",
            )
        sign = self._saving.find_sign()
        values = [sign * value for value in before if not math.isnan(value)]
        return sign * now < min(values, default=math.inf)

    def save_to(self, path: Path, device: Device) -> None:
        """Save the current state to a file.

        Args:
            path: the file.
            device: the device of the model.
        """
        self._mark_epoch(device)
        self._write(path, None)

    def _mark_epoch(self, device: Device) -> None:
        """Keep the states of the random numbers and of the data between two epochs."""
        self._epoch_start = {
            "random": self._framework.training.random_state(device),
            "data": Order(self._data).state(),
        }

    def save_after_error_to(self, path: Path, device: Device) -> None:
        """Save the state of this process after an error; the first process may be lost.

        Args:
            path, device: see ``save_to``.
        """
        self._team = Team()
        self.save_to(path, device)

    def _write(self, path: Path, position: dict[str, Any] | None) -> None:
        components = self._learner.sync()
        if not self._team.is_first:
            return
        state = {
            "format": _FORMAT,
            "run": {
                "epoch": self.epoch,
                "step": self.step,
                "history": self.history,
                "settings": self._settings(),
                "modes": self._learner.modes(),
                "callbacks": [each.state_dict() for each in self._callbacks],
                "within": position,
                **self._epoch_start,
            },
            # Without a model that is not built: the random numbers make its initial values.
            "components": components if self._learner.is_built else None,
        }
        save(self._framework, state, path)

    def resume(
        self,
        device: Device,
        feed: Feed,
        *,
        is_from_processes: bool = False,
    ) -> None:
        """Restore the state of the checkpoint; without a checkpoint, save the first one.

        Args:
            device: the device of the model.
            feed: the way to the inputs of the first batch, for a model that is not built.
            is_from_processes: whether processes of ``fit`` wrote the file. The model then gets its
                parameters even if the rest of the file raises.

        Raises:
            CheckpointError: if the file is broken, or belongs to another kind of run. The model,
                the optimizer and the data do not change, but a lazy model gets its shapes.
        """
        if self._path is None:
            raise CheckpointError(
                "resume a run", "no checkpoint is named", "fit(..., checkpoint='run.safetensors')"
            )
        # ``Path.exists`` raises for a locked folder.
        exists = os.path.exists(self._path)
        if not self._team.broadcast_from_first("whether there is a checkpoint", exists):
            self.save(device)
            return
        attempted = f"resume from {self._path}"
        with open_checkpoint(self._framework, str(self._path), attempted) as checkpoint:
            self._resume(checkpoint, device, feed, is_from_processes=is_from_processes)
        if self._best_path is not None:
            exists = os.path.exists(self._best_path)
            if not self._team.broadcast_from_first("whether there is a best epoch", exists):
                self._first_compared = self.epoch

    def _resume(
        self,
        checkpoint: Checkpoint,
        device: Device,
        feed: Feed,
        *,
        is_from_processes: bool,
    ) -> None:
        children = self._children(checkpoint)
        if is_from_processes:
            self._load_components(checkpoint, children["components"], feed)
        run = checkpoint.read_node(children["run"])
        if not _is_whole(run):
            raise _file_refusal(checkpoint)
        self._check_settings(run["settings"])
        self._check_names(run["history"].keys())
        load_components = _change_nothing
        if not is_from_processes:
            load_components = self._prepare_components(checkpoint, children["components"], feed)
        learner, training = self._learner, self._framework.training
        order = Order(self._data)
        restore_old_order = order.check(order.state())
        with _refuse_errors(checkpoint, "the run refuses its state"):
            set_modes = learner.check_modes(run["modes"])
            set_random_state = training.check_random_state(run["random"], device)
            position = self._check_position(checkpoint, run["within"], device)
            restore_callbacks = check_states(self._callbacks, run["callbacks"])
            restore_order = order.check(run["data"])
        with _refuse_errors(checkpoint, "the data refuses its state"):
            restore_order()
        try:
            restore_callbacks()
        except CheckpointError:
            restore_old_order()
            raise
        load_components()
        set_modes()
        # Last, because a new loader may draw from the framework's random numbers.
        set_random_state()
        self.epoch, self.step, self.history = run["epoch"], run["step"], History(run["history"])
        self._epoch_start = {"random": run["random"], "data": run["data"]}
        self._position = position

    def _check_position(
        self, checkpoint: Checkpoint, saved: Any, device: Device
    ) -> _Position | None:
        if saved is None:
            return None
        if length_of(self._data, saved["batches"]) < saved["batches"]:
            raise self._length_refusal(saved["batches"])
        log = DeviceLog(self._backend, values=False)
        try:
            log.load_state_dict(saved["log"])
        except CheckpointError as error:
            raise _file_refusal(checkpoint) from error
        if not log.last().keys() <= self.history.keys():
            raise _file_refusal(checkpoint)
        set_random_states = check_random_states(self._framework, saved, device)
        return _Position(saved["batches"], log, set_random_states)

    def _children(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return the entries of the file of a run."""
        outline = checkpoint.outline
        children = outline.children() if isinstance(outline, Outline) else {}
        version = children.get("format")
        kind = _FORMAT.rstrip("0123456789")
        if version != _FORMAT and isinstance(version, str) and version.startswith(kind):
            raise CheckpointError(
                checkpoint.attempted,
                f"another version of d2ldev wrote {quote(version)}, and this one reads {_FORMAT}",
                "resume with that version, or begin another run in another file",
            )
        if children.keys() != {"format", "run", "components"} or version != _FORMAT:
            raise _file_refusal(checkpoint)
        return children

    def _prepare_components(
        self, checkpoint: Checkpoint, outline: Any, feed: Feed
    ) -> Callable[[], None]:
        """Return a function that loads the model and the optimizer.

        A lazy model gets its shapes before.

        Args:
            checkpoint: the file.
            outline: the entry of the model and the optimizer; None for a model without tensors.
            feed: see ``resume``.
        """
        learner = self._learner
        if outline is None:
            if learner.is_built:
                raise CheckpointError(
                    checkpoint.attempted,
                    "the file is from before the first batch, and has no variables of the model; "
                    "this model has some already",
                    "create the model again, and do not call it before fit",
                )
            return _change_nothing
        if not learner.is_built:
            # A new batch draws random numbers, and begins an epoch.
            restore_order = Order(self._data).check(Order(self._data).state())
            try:
                learner.build(feed.first_inputs(self._data))
            finally:
                restore_order()
        load, _ = prepare(self._framework, checkpoint, learner.sync(), outline)
        return lambda: learner.replace(load())

    def _load_components(self, checkpoint: Checkpoint, outline: Any, feed: Feed) -> None:
        """Load the model and the optimizer, or the model alone if the optimizer raises."""
        try:
            self._prepare_components(checkpoint, outline, feed)()
        except Exception:
            components, model = self._learner.sync(), outline and outline.children()["model"]
            if model is not None:
                load, _ = prepare(self._framework, checkpoint, components["model"], model)
                self._learner.replace({**components, "model": load()})
                self._learner.sync()
            raise

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the training, with None for an object of the user's."""
        settings = self._learner.settings
        has_loss = isinstance(settings.loss, str) and settings.methods is None
        is_named = isinstance(settings.optimizer, str)
        return {
            "loss": settings.loss if has_loss else None,
            "optimizer": settings.optimizer if is_named else None,
            "lr": settings.lr if is_named else None,
            **{name: getattr(settings, name) for name in _TRAINER_SETTINGS},
        }

    def _check_settings(self, saved: dict[str, Any]) -> None:
        # Frameworks differ: some would resume with the new learning rate, others with the old.
        now = self._settings()
        different = [name for name in now if now[name] != saved[name]]
        if different:
            raise CheckpointError(
                f"resume from {self._path} with {_describe_settings(now, different)}",
                f"the run began with {_describe_settings(saved, different)}",
                _find_fix(saved, different),
            )

    def _check_names(self, saved: Collection[str]) -> None:
        now = self.history.keys()
        if now != set(saved):
            raise CheckpointError(
                f"resume from {self._path} and measure {', '.join(now)}",
                f"the run measured {', '.join(quote(name)[1:-1] for name in saved)[:1000]}",
                "use the metrics of the run, and val_data if it had any",
            )


def _change_nothing() -> None:
    """Change nothing."""


def _file_refusal(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        checkpoint.attempted,
        "the file does not hold the state of a training run",
        "name a file of fit(..., checkpoint=...), or another file for a new run",
    )


@contextmanager
def _refuse_errors(checkpoint: Checkpoint, problem: str) -> Iterator[None]:
    """Turn any error in a block that reads the file's states into a ``CheckpointError``."""
    try:
        yield
    except D2LDevError:
        raise
    except Exception as error:
        raise CheckpointError(
            checkpoint.attempted,
            f"{problem}: {text_of(error)[:1000]}",
            "resume with the model, the loader and the callbacks that the run began with",
        ) from error


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_whole(run: Any) -> bool:
    """Return whether an entry has all values of ``_write``, of their types."""
    types: dict[str, Any] = dict.fromkeys(("history", "settings", "data"), dict)
    types |= {"epoch": int, "step": int, "callbacks": list, "within": (dict, NoneType)}
    types |= {"modes": object, "random": object}
    if not isinstance(run, dict) or run.keys() != types.keys():
        return False
    if not all(isinstance(run[name], kind) for name, kind in types.items()):
        return False
    history, settings, within = run["history"], run["settings"], run["within"]
    return (
        _is_count(run["epoch"])
        and _is_count(run["step"])
        and (within is None or _is_whole_position(within, run["step"]))
        and settings.keys() == {"loss", "optimizer", "lr", *_TRAINER_SETTINGS}
        and all(isinstance(value, (str, int, float, NoneType)) for value in settings.values())
        and all(isinstance(name, str) for name in history)
        and all(isinstance(column, list) for column in history.values())
        and all(len(column) == run["epoch"] for column in history.values())
        and all(isinstance(value, float) for column in history.values() for value in column)
    )


def _is_whole_position(position: dict[str, Any], step: int) -> bool:
    has_keys = position.keys() == {"batches", "log", "random", "host"}
    return has_keys and _is_count(position["batches"]) and position["batches"] <= step


class _Position(NamedTuple):
    """The position of a run within an epoch.

    Args:
        batches: how many batches of the epoch are done.
        log: the numbers so far.
        set_random_states: a function that restores the random numbers after these batches.
    """

    batches: int
    log: DeviceLog
    set_random_states: Callable[[], None]


def _describe_settings(settings: dict[str, Any], names: list[str]) -> str:
    return ", ".join(
        f"{name} of the user's own" if settings[name] is None else f"{name}={quote(settings[name])}"
        for name in names
    )


def _find_fix(saved: dict[str, Any], names: list[str]) -> str:
    if any(saved[name] is None for name in names):
        return "use the same settings again, or another file for a new run"
    owner = "Trainer(max_epochs" if set(names) <= set(_TRAINER_SETTINGS) else "fit(..."
    return f"{owner}, {_describe_settings(saved, names)})"
