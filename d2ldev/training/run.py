"""One run of ``fit``: how far it is, and the checkpoint from which it can go on.

A run that was killed and resumed gives the same parameters as one that was not: the state holds the
model, the optimizer, the random state, and what the order of the batches depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from d2ldev.device import CPU, Device
from d2ldev.errors import CheckpointError, D2LDevError
from d2ldev.saving import as_path
from d2ldev.training.learner import Learner
from d2ldev.training.order import Order

_FORMAT = "d2ldev training state 3"


class Run:
    """How far a run is.

    Args:
        learner: what is trained.
        data: what it is trained on, of any kind that ``Order`` takes.
        names: of the numbers that the history has for each epoch.
        checkpoint: where the state is kept; None keeps none.

    Attributes:
        epoch: how many epochs are done.
        history: name -> one number for each of them.
    """

    def __init__(
        self, learner: Learner, data: Any, names: Collection[str], checkpoint: Any
    ) -> None:
        self.epoch = 0
        self.history: dict[str, list[float]] = {name: [] for name in names}
        self._learner = learner
        self._data = data
        self._path = None if checkpoint is None else Path(as_path(checkpoint, "save"))

    def record(self, found: dict[str, float]) -> None:
        """An epoch is done, with these numbers."""
        for name, value in found.items():
            self.history[name].append(value)
        self.epoch += 1

    def save(self) -> None:
        """Keep the state: after each epoch, and before the first, in which a run may end, too.

        So what cannot be written is found out before an epoch was computed for nothing. What is
        done after an epoch, such as to freeze a layer, belongs to the state: it is kept afterwards.
        """
        if self._path is not None:
            self._learner.backend.save(self._state(), self._path)

    def resume(self, device: Device) -> None:
        """Go on from the checkpoint; from the beginning if there is none yet.

        Raises:
            CheckpointError: if the file is broken, or is none of such a run. Nothing has changed
                then.
        """
        if self._path is None:
            raise CheckpointError(
                "resume a run", "no checkpoint is named", "fit(..., checkpoint='run.safetensors')"
            )
        if not self._path.exists():
            self.save()
            return
        state = self._learner.backend.load(self._path, device=device)
        found = state.get("format") if isinstance(state, dict) else None
        if found != _FORMAT and str(found).startswith("d2ldev training state"):
            raise CheckpointError(
                f"resume from {self._path}",
                f"another version of d2ldev wrote it: {found}, and this one reads {_FORMAT}",
                "go on with that version, or begin another run in another file",
            )
        if not _is_whole(state):
            raise CheckpointError(
                f"resume from {self._path}",
                "the file holds no state of a training run",
                "name the file that fit(..., checkpoint=...) wrote, or another one to begin anew",
            )
        self._check_settings(state["settings"])
        self._check_names(state["history"].keys())
        # To the host: a loader is made there.
        go_on = Order(self._data).checked(self._learner.backend.to(state["data"], CPU))
        self._take_over(state["learner"], go_on)
        self.epoch, self.history = state["epoch"], state["history"]

    def _take_over(self, saved: dict[str, Any], go_on: Callable[[], None]) -> None:
        """Give the learner and the data their states, or neither."""
        before = self._learner.state()
        try:
            self._learner.restore(saved)
            go_on()
            # Again: to go through the data may have drawn from the framework's random numbers. Not
            # only now: a state of another model is to be refused before the data is touched.
            self._learner.restore(saved)
        except BaseException as error:
            with suppress(CheckpointError):  # what had no shapes before cannot lose them again
                self._learner.restore(before)
            if isinstance(error, Exception) and not isinstance(error, D2LDevError):
                raise CheckpointError(
                    f"resume from {self._path}",
                    f"the framework or the data refuses the state: {error}",
                    "name the file that fit(..., checkpoint=...) wrote for this model and data",
                ) from error
            raise

    def _state(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "epoch": self.epoch,
            "history": self.history,
            "settings": self._settings(),
            "learner": self._learner.state(),
            "data": Order(self._data).state(),
        }

    def _settings(self) -> dict[str, Any]:
        """What is said of the training; None stands for an object or a function of the user's."""
        loss, optimizer, lr, gradient_clip_val = self._learner.settings
        is_named = isinstance(optimizer, str)
        return {
            "loss": loss if isinstance(loss, str) else None,
            "optimizer": optimizer if is_named else None,
            "lr": float(lr) if is_named else None,
            "gradient_clip_val": float(gradient_clip_val),
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


def _is_whole(state: Any) -> bool:
    """Whether everything is there that ``_state`` has written, of its types."""
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        return False
    types = {"epoch": int, "history": dict, "settings": dict, "learner": dict, "data": dict}
    if not all(isinstance(state.get(name), kind) for name, kind in types.items()):
        return False
    columns = state["history"].values()
    return state["epoch"] >= 0 and all(
        isinstance(column, list)
        and len(column) == state["epoch"]
        and all(isinstance(value, float) for value in column)
        for column in columns
    )


def _in_words(settings: dict[str, Any], names: list[str]) -> str:
    values = {name: settings.get(name) for name in names}
    words = [
        f"{name} of the user's own" if value is None else f"{name}={value!r}"
        for name, value in values.items()
    ]
    return ", ".join(words)


def _fix(saved: dict[str, Any], names: list[str]) -> str:
    if any(saved.get(name) is None for name in names):
        return "hand in what the run began with, or begin another one in another file"
    owner = "Trainer(max_epochs" if names == ["gradient_clip_val"] else "fit(..."
    return f"{owner}, {_in_words(saved, names)})"
