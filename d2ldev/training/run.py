"""One run of ``fit``: how far it is, and the checkpoint from which it can go on.

A run that was killed and resumed gives the same parameters as one that was not. ``backend.save``
writes its file, and ``backend.load`` reads it: the model, the optimizer, what is frozen,
random numbers, and the state of the batches' order.
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
from d2ldev.areas import Learner
from d2ldev.device import Device
from d2ldev.errors import (
    CheckpointError,
    D2LDevError,
    UnsupportedValueError,
    describe,
    quote,
    text_of,
)
from d2ldev.files.format.container import check_files
from d2ldev.files.load import Checkpoint, open_checkpoint
from d2ldev.files.load_into import prepare
from d2ldev.files.save import save
from d2ldev.files.structure import Outline
from d2ldev.operations.arguments import as_path, length_of, whole_number
from d2ldev.options import KEEPS, Keep, nearest, problem_of
from d2ldev.training.callbacks import check_states
from d2ldev.training.log import DeviceLog
from d2ldev.training.order import Order, check_random_states, random_states
from d2ldev.training.team import SingleProcess, Team

_FORMAT = "d2ldev training state 8"


class Saving(NamedTuple):
    """Where the state of a run is kept, and when.

    Args:
        checkpoint: the file; None keeps nothing.
        checkpoint_every: number of steps after which it is saved within an epoch, too; None is
            never.
        keep: ``'last'``, or ``'best'`` for the state after the epoch with the least loss only.
    """

    checkpoint: Any = None
    checkpoint_every: int | None = None
    keep: Keep = "last"

    def check(self) -> Saving:
        """Return it with Python's own number.

        Raises:
            UnsupportedValueError: if it is contradictory.
            PackageNotInstalledError: if no file can be written here.
        """
        attempted, every = "save the state of a run", self.checkpoint_every
        if self.checkpoint is not None:
            check_files(attempted)
        if problem := problem_of(self.keep, KEEPS):
            attempted = f"{attempted} with keep={describe(self.keep)}"
            fix = f"keep={nearest(self.keep, KEEPS) or 'best'!r}"
            raise UnsupportedValueError(attempted, problem, fix)
        if self.checkpoint is None and (every is not None or self.keep == "best"):
            fix = "fit(..., checkpoint='run.safetensors')"
            raise UnsupportedValueError(attempted, "no checkpoint is named", fix)
        if every is None:
            return self
        if self.keep == "best":
            raise UnsupportedValueError(
                attempted,
                "within an epoch nobody knows whether it is the best",
                "keep='best', or checkpoint_every=..., in two runs",
            )
        every = whole_number(
            "save", "checkpoint_every", every, least=1, fix="checkpoint_every=1000"
        )
        return self._replace(checkpoint_every=min(every, sys.maxsize))  # as ``islice`` takes it


# The settings that are arguments of ``Trainer``, and not of ``fit``.
_OF_THE_TRAINER = ("gradient_clip_val", "accumulate_grad_batches", "precision")


class Run:
    """The progress of a run.

    Args:
        backend: of the learner.
        learner: what is trained.
        data: what it is trained on, of any kind that ``Order`` takes.
        names: of the numbers that the history has for each epoch.
        callbacks: of which those with ``state_dict`` are in the state.
        saving: where and when the state is kept.
        team: the processes that train, of which the first one keeps it.

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
        self.history: dict[str, list[float]] = {name: [] for name in names}
        self._backend, self._framework = backend, framework_of(backend)
        self._learner = learner
        self._data = data
        self._callbacks = [each for each in callbacks if hasattr(each, "state_dict")]
        self._saving = saving
        self._team: Team = team
        path = saving.checkpoint
        self._path = None if path is None else Path(as_path(path, "save"))
        # How the random numbers and the data were at the beginning of the epoch.
        self._begun: dict[str, Any] = {}
        self._within: _Within | None = None
        # Whether the state is to be saved as soon as no gradients wait for a step.
        self._is_due = False

    def record(self, found: dict[str, float]) -> None:
        """Note the numbers of an epoch that is done."""
        for name, value in found.items():
            self.history[name].append(value)
        self.epoch += 1

    def save(self, device: Device) -> None:
        """Save the state before the first epoch, and after each ``on_epoch_end``.

        So a file that cannot be written is an error before an epoch is computed for nothing, and
        what a hook has done, such as freezing a layer, is in the state.

        Args:
            device: where the model is.
        """
        if self._path is not None and self._is_kept():
            self._is_due = False
            self.hand_over(self._path, device)

    def save_within(self, batches: int, log: DeviceLog, device: Device) -> None:
        """Save the state within an epoch, if it is time for it.

        Args:
            batches: how many of the epoch are done; the others were not drawn yet.
            log: of the epoch.
            device: where the model is.
        """
        every = self._saving.checkpoint_every
        self._is_due |= every is not None and self.step % every == 0
        # Gradients that wait for a step of the optimizer are in no file.
        if self._path is not None and self._is_due and not self._learner.pending:
            self._is_due = False
            within = {
                "batches": batches,
                "log": self._team.log_state(log),
                **random_states(self._framework, device),
            }
            self._write(self._path, within)

    @property
    def is_within(self) -> bool:
        """Whether the run goes on within an epoch."""
        return self._within is not None

    def count_to_draw(self) -> Callable[[], int] | None:
        """Return a function that counts the steps until ``save_within`` saves.

        No more batches are drawn ahead: a run that goes on from there draws them again, from other
        random numbers. None if it never saves within an epoch.
        """
        every = self._saving.checkpoint_every
        if every is None:
            return None
        return lambda: 1 if self._is_due else every - self.step % every

    def go_on_within(self, batches: Iterator[Any], log: DeviceLog) -> int:
        """Go on within an epoch: draw the batches that are done again, and leave them out.

        Args:
            batches: of the whole epoch.
            log: of the epoch; gets the numbers so far.

        Returns:
            How many are done.

        Raises:
            CheckpointError: if there are fewer batches.
        """
        within, self._within = self._within, None
        if within is None:
            return 0
        for _ in range(within.batches):
            if next(batches, within) is within:
                raise self._length_refusal(within.batches)
        if self._team.is_first:  # of all processes, of which each adds what is its own
            log.load_state_dict(within.log.state_dict())
        within.set_random_states()
        return within.batches

    def _length_refusal(self, batches: int) -> CheckpointError:
        return CheckpointError(
            f"resume from {self._path}",
            f"{batches} batches of the epoch were done, and the data has fewer",
            "resume with the data that the run began with",
        )

    def _is_kept(self) -> bool:
        if self._saving.keep == "last" or not self.epoch:
            return True
        name = "val_loss" if "val_loss" in self.history else "loss"
        *before, now = self.history[name]
        if math.isnan(now) and name == "val_loss" and self._learner.settings.methods is not None:
            raise UnsupportedValueError(
                "keep the best epoch",
                "its val_loss is no number",
                "return the loss from validation_step, or keep='last'",
            )
        return now < min((value for value in before if not math.isnan(value)), default=math.inf)

    def hand_over(self, path: Path, device: Device) -> None:
        """Save the state as it is now, for another process that goes on with what was learned."""
        self._begun = {
            "random": self._framework.training.random_state(device),
            "data": Order(self._data).state(),
        }
        self._write(path, None)

    def hand_over_rest(self, path: Path, device: Device) -> None:
        """Save, after an error, what this process has; nobody else may be there to do it.

        Args:
            path, device: see ``hand_over``.
        """
        self._team = SingleProcess()
        self.hand_over(path, device)

    def _write(self, path: Path, within: dict[str, Any] | None) -> None:
        self._learner.sync()
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
                "within": within,
                **self._begun,
            },
            # A model that is not built is left out: the random numbers in the state make its
            # initial values.
            "components": self._learner.components if self._learner.is_built else None,
        }
        save(self._framework, state, path)

    def resume(
        self,
        device: Device,
        first_inputs: Callable[[], tuple[Any, ...]],
        *,
        is_handed_over: bool = False,
    ) -> None:
        """Go on from the checkpoint; from the beginning if there is none yet.

        Args:
            device: where the model is.
            first_inputs: of the data, for a model that is not built before its first batch.
            is_handed_over: whether the file is one of ``hand_over``. Then the model has its
                parameters whatever happens to the rest.

        Raises:
            CheckpointError: if the file is broken, or is not of such a run. The model, the
                optimizer and the data are as they were then, except that a model without shapes has
                got them.
        """
        if self._path is None:
            raise CheckpointError(
                "resume a run", "no checkpoint is named", "fit(..., checkpoint='run.safetensors')"
            )
        # ``Path.exists`` raises where a folder is locked.
        is_there = os.path.exists(self._path)
        if not self._team.of_the_first("whether there is a checkpoint", is_there):
            self.save(device)
            return
        attempted = f"resume from {self._path}"
        with open_checkpoint(self._framework, str(self._path), attempted) as checkpoint:
            self._resume(checkpoint, device, first_inputs, is_handed_over=is_handed_over)

    def _resume(
        self,
        checkpoint: Checkpoint,
        device: Device,
        first_inputs: Callable[[], tuple[Any, ...]],
        *,
        is_handed_over: bool,
    ) -> None:
        children = self._children(checkpoint)
        if is_handed_over:
            self._load_components(checkpoint, children["components"], first_inputs)
        run = checkpoint.read_node(children["run"])
        if not _is_whole(run):
            raise _file_refusal(checkpoint)
        self._check_settings(run["settings"])
        self._check_names(run["history"].keys())
        put = _put_nothing
        if not is_handed_over:
            put = self._prepare_components(checkpoint, children["components"], first_inputs)
        learner, training = self._learner, self._framework.training
        order = Order(self._data)
        put_data_back = order.check(order.state())
        with _refuse_errors(checkpoint, "the run refuses its state"):
            set_modes = learner.check_modes(run["modes"])
            set_random_state = training.check_random_state(run["random"], device)
            within = self._check_within(checkpoint, run["within"], device)
            put_callbacks = check_states(self._callbacks, run["callbacks"])
            go_on = order.check(run["data"])
        with _refuse_errors(checkpoint, "the data refuses its state"):
            go_on()
        try:
            put_callbacks()
        except CheckpointError:
            put_data_back()
            raise
        put()
        set_modes()
        # Last, because making a loader may draw from the framework's random numbers.
        set_random_state()
        self.epoch, self.step, self.history = run["epoch"], run["step"], run["history"]
        self._begun = {"random": run["random"], "data": run["data"]}
        self._within = within

    def _check_within(self, checkpoint: Checkpoint, saved: Any, device: Device) -> _Within | None:
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
        return _Within(saved["batches"], log, set_random_states)

    def _children(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return the entries of the file, if it is one of a run."""
        outline = checkpoint.outline
        children = outline.children() if isinstance(outline, Outline) else {}
        found = children.get("format")
        if found != _FORMAT and isinstance(found, str) and found.startswith(_FORMAT[:-1]):
            raise CheckpointError(
                checkpoint.attempted,
                f"another version of d2ldev wrote it: {quote(found)}, and this one reads {_FORMAT}",
                "go on with that version, or begin another run in another file",
            )
        if children.keys() != {"format", "run", "components"} or found != _FORMAT:
            raise _file_refusal(checkpoint)
        return children

    def _prepare_components(
        self, checkpoint: Checkpoint, found: Any, first_inputs: Callable[[], tuple[Any, ...]]
    ) -> Callable[[], None]:
        """Return a function that loads the model and the optimizer; so far only shapes are made."""
        learner = self._learner
        if found is None:
            if learner.is_built:
                raise CheckpointError(
                    checkpoint.attempted,
                    "it was kept before the first batch had built the model, which is built now: "
                    "the initial values of its variables are in no state",
                    "make the model anew, and do not call it before",
                )
            return _put_nothing
        if not learner.is_built:
            # To make batches draws random numbers, and begins an epoch.
            put_data_back = Order(self._data).check(Order(self._data).state())
            try:
                learner.build(first_inputs())
            finally:
                put_data_back()
        learner.sync()
        put, _ = prepare(self._framework, checkpoint, learner.components, found)
        return lambda: learner.replace(put())

    def _load_components(
        self, checkpoint: Checkpoint, found: Any, first_inputs: Callable[[], tuple[Any, ...]]
    ) -> None:
        """Load the model and the optimizer, and the model alone if the optimizer cannot be."""
        try:
            self._prepare_components(checkpoint, found, first_inputs)()
        except Exception:
            components, model = self._learner.components, found and found.children()["model"]
            if model is not None:
                put, _ = prepare(self._framework, checkpoint, components["model"], model)
                self._learner.replace({**components, "model": put()})
                self._learner.sync()
            raise

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the training; None stands for an object of the user's."""
        settings = self._learner.settings
        has_loss = isinstance(settings.loss, str) and settings.methods is None
        is_named = isinstance(settings.optimizer, str)
        return {
            "loss": settings.loss if has_loss else None,
            "optimizer": settings.optimizer if is_named else None,
            "lr": settings.lr if is_named else None,
            **{name: getattr(settings, name) for name in _OF_THE_TRAINER},
        }

    def _check_settings(self, saved: dict[str, Any]) -> None:
        # Some frameworks would go on with the new learning rate, and others with the old one.
        now = self._settings()
        different = [name for name in now if now[name] != saved[name]]
        if different:
            raise CheckpointError(
                f"resume from {self._path} with {_in_words(now, different)}",
                f"the run began with {_in_words(saved, different)}",
                _fix(saved, different),
            )

    def _check_names(self, saved: Collection[str]) -> None:
        now = self.history.keys()
        if now != set(saved):
            raise CheckpointError(
                f"resume from {self._path} and measure {', '.join(now)}",
                f"the run has measured {', '.join(quote(name)[1:-1] for name in saved)[:1000]}",
                "give the metrics, and val_data or none, that the run began with",
            )


def _put_nothing() -> None:
    """Leave everything as it is."""


def _file_refusal(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        checkpoint.attempted,
        "the file holds no state of a training run",
        "name the file that fit(..., checkpoint=...) wrote, or another one to begin anew",
    )


@contextmanager
def _refuse_errors(checkpoint: Checkpoint, problem: str) -> Iterator[None]:
    """Raise whatever a state of the file makes its reader raise as a ``CheckpointError``."""
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
    """Tell whether everything is there that ``save`` has written, of its types."""
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
        and (within is None or _is_whole_within(within, run["step"]))
        and settings.keys() == {"loss", "optimizer", "lr", *_OF_THE_TRAINER}
        and all(isinstance(value, (str, int, float, NoneType)) for value in settings.values())
        and all(isinstance(name, str) for name in history)
        and all(isinstance(column, list) for column in history.values())
        and all(len(column) == run["epoch"] for column in history.values())
        and all(isinstance(value, float) for column in history.values() for value in column)
    )


def _is_whole_within(within: dict[str, Any], step: int) -> bool:
    is_of_batches = within.keys() == {"batches", "log", "random", "host"}
    return is_of_batches and _is_count(within["batches"]) and within["batches"] <= step


class _Within(NamedTuple):
    """Where a run was within an epoch.

    Args:
        batches: how many of the epoch were done.
        log: the numbers so far.
        set_random_states: restores the random numbers, after the batches were drawn.
    """

    batches: int
    log: DeviceLog
    set_random_states: Callable[[], None]


def _in_words(settings: dict[str, Any], names: list[str]) -> str:
    return ", ".join(
        f"{name} of the user's own" if settings[name] is None else f"{name}={quote(settings[name])}"
        for name in names
    )


def _fix(saved: dict[str, Any], names: list[str]) -> str:
    if any(saved[name] is None for name in names):
        return "hand in what the run began with, or begin another one in another file"
    owner = "Trainer(max_epochs" if set(names) <= set(_OF_THE_TRAINER) else "fit(..."
    return f"{owner}, {_in_words(saved, names)})"
