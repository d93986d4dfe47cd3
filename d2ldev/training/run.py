"""One run of ``fit``: how far it is, and the checkpoint from which it can go on.

A run that was killed and resumed gives the same parameters as one that was not. ``backend.save``
writes its file, and ``backend.load`` reads it: the model, the optimizer, which parts are frozen,
random numbers, and the state of the batches' order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from d2ldev.device import Device
from d2ldev.errors import CheckpointError, D2LDevError
from d2ldev.files.description import Outline
from d2ldev.files.load import Checkpoint, opened
from d2ldev.files.load_into import Fitting
from d2ldev.files.save import save
from d2ldev.framework import Framework, Learner
from d2ldev.operations.arguments import as_path
from d2ldev.training.order import Order

_FORMAT = "d2ldev training state 6"
# The settings that are arguments of ``Trainer``, and not of ``fit``.
_OF_THE_TRAINER = ("gradient_clip_val", "accumulate", "precision")


class Run:
    """The progress of a run.

    Args:
        framework: of the learner.
        learner: what is trained.
        data: what it is trained on, of any kind that ``Order`` takes.
        names: of the numbers that the history has for each epoch.
        checkpoint: where the state is kept; None keeps none.

    Attributes:
        epoch: how many epochs are done.
        history: name -> one number for each of them.
    """

    def __init__(
        self,
        framework: Framework,
        learner: Learner,
        data: Any,
        names: Collection[str],
        checkpoint: Any,
    ) -> None:
        self.epoch = 0
        self.history: dict[str, list[float]] = {name: [] for name in names}
        self._framework = framework
        self._learner = learner
        self._data = data
        self._path = None if checkpoint is None else Path(as_path(checkpoint, "save"))

    def record(self, found: dict[str, float]) -> None:
        """Note the numbers of an epoch that is done."""
        for name, value in found.items():
            self.history[name].append(value)
        self.epoch += 1

    def save(self, device: Device) -> None:
        """Save the state after each epoch, and before the first, in which a run may end, too.

        So an error in writing is found before an epoch is computed for nothing. The state is saved
        after ``on_epoch_end``, because what that does, such as freezing a layer, belongs to it.

        Args:
            device: where the model is.
        """
        if self._path is None:
            return
        self._learner.sync()
        state = {
            "format": _FORMAT,
            "run": {
                "epoch": self.epoch,
                "history": self.history,
                "settings": self._settings(),
                "modes": self._learner.modes(),
                "random": self._framework.training.random_state(device),
                "data": Order(self._data).state(),
            },
            # A model that is not built is left out: the random numbers in the state make its
            # initial values.
            "parts": self._learner.parts if self._learner.is_built else None,
        }
        save(self._framework, state, self._path)

    def resume(self, device: Device, first_inputs: Callable[[], tuple[Any, ...]]) -> None:
        """Go on from the checkpoint; from the beginning if there is none yet.

        Args:
            device: where the model is.
            first_inputs: of the data, for a model that is not built before its first batch.

        Raises:
            CheckpointError: if the file is broken, or is not of such a run. The model, the
                optimizer and the data are as they were then, except that a model without shapes has
                got them.
        """
        if self._path is None:
            raise CheckpointError(
                "resume a run", "no checkpoint is named", "fit(..., checkpoint='run.safetensors')"
            )
        if not self._path.exists():
            self.save(device)
            return
        with opened(self._framework, str(self._path), f"resume from {self._path}") as checkpoint:
            self._resume(checkpoint, device, first_inputs)

    def _resume(
        self,
        checkpoint: Checkpoint,
        device: Device,
        first_inputs: Callable[[], tuple[Any, ...]],
    ) -> None:
        children = self._children(checkpoint)
        run = checkpoint.part(children["run"])
        if not _is_whole(run):
            raise _foreign(checkpoint)
        self._check_settings(run["settings"])
        self._check_names(run["history"].keys())
        put = self._parts_put(checkpoint, children["parts"], first_inputs)
        learner, training = self._learner, self._framework.training
        set_modes = learner.checked_modes(run["modes"])
        set_random_state = training.checked_random_state(run["random"], device)
        go_on = Order(self._data).checked(run["data"])
        try:
            go_on()
        except D2LDevError:
            raise
        except Exception as error:
            raise CheckpointError(
                checkpoint.attempted,
                f"the data refuses its state: {error}",
                "resume with the loader that the run began with",
            ) from error
        put()
        set_modes()
        # Last, because making a loader may draw from the framework's random numbers.
        set_random_state()
        self.epoch, self.history = run["epoch"], run["history"]

    def _children(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the parts of the file, if it is one of a run."""
        outline = checkpoint.outline
        children = dict(outline.children) if isinstance(outline, Outline) else {}
        found = children.get("format")
        if found != _FORMAT and str(found).startswith("d2ldev training state"):
            raise CheckpointError(
                checkpoint.attempted,
                f"another version of d2ldev wrote it: {found}, and this one reads {_FORMAT}",
                "go on with that version, or begin another run in another file",
            )
        if children.keys() != {"format", "run", "parts"}:
            raise _foreign(checkpoint)
        return children

    def _parts_put(
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
            return lambda: None
        if not learner.is_built:
            # To make batches draws random numbers, and begins an epoch.
            put_data_back = Order(self._data).checked(Order(self._data).state())
            try:
                learner.build(first_inputs())
            finally:
                put_data_back()
        learner.sync()
        put = Fitting(self._framework, checkpoint).prepared(learner.parts, found)
        return lambda: learner.replace(put())

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the training; None stands for an object of the user's."""
        settings = self._learner.settings
        is_named = isinstance(settings.optimizer, str)
        return {
            "loss": settings.loss if isinstance(settings.loss, str) else None,
            "optimizer": settings.optimizer if is_named else None,
            "lr": settings.lr if is_named else None,
            **{name: getattr(settings, name) for name in _OF_THE_TRAINER},
        }

    def _check_settings(self, saved: dict[str, Any]) -> None:
        # Some frameworks would go on with the new learning rate, and others with the old one.
        now = self._settings()
        if now != saved:
            different = [name for name in now if now[name] != saved.get(name)]
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
                f"the run has measured {', '.join(saved)}",
                "give the metrics, and val_data or none, that the run began with",
            )


def _foreign(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        checkpoint.attempted,
        "the file holds no state of a training run",
        "name the file that fit(..., checkpoint=...) wrote, or another one to begin anew",
    )


def _is_whole(run: Any) -> bool:
    """Tell whether everything is there that ``save`` has written, of its types."""
    types = {"epoch": int, "history": dict, "settings": dict, "data": dict}
    if not isinstance(run, dict) or not all(isinstance(run.get(n), t) for n, t in types.items()):
        return False
    columns = run["history"].values()
    return (
        run.keys() == {*types, "modes", "random"}
        and run["epoch"] >= 0
        and all(
            isinstance(column, list)
            and len(column) == run["epoch"]
            and all(isinstance(value, float) for value in column)
            for column in columns
        )
    )


def _in_words(settings: dict[str, Any], names: list[str]) -> str:
    return ", ".join(
        f"{name} of the user's own" if settings.get(name) is None else f"{name}={settings[name]!r}"
        for name in names
    )


def _fix(saved: dict[str, Any], names: list[str]) -> str:
    if any(saved.get(name) is None for name in names):
        return "hand in what the run began with, or begin another one in another file"
    owner = "Trainer(max_epochs" if set(names) <= set(_OF_THE_TRAINER) else "fit(..."
    return f"{owner}, {_in_words(saved, names)})"
