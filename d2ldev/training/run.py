"""One run of ``fit``: how far it is, and the checkpoint from which it can go on.

A run that was killed and resumed gives the same parameters as one that was not: the state holds the
model, the optimizer, the random state, and what the order of the batches depends on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from d2ldev.device import Device
from d2ldev.errors import CheckpointError
from d2ldev.training.learner import Learner
from d2ldev.training.order import Order

_FORMAT = "d2ldev training state 2"


class Run:
    """How far a run is.

    Args:
        learner: what is trained.
        data: what it is trained on, of any kind that ``Order`` takes.
        checkpoint: where the state is kept; None keeps none.

    Attributes:
        epoch: how many epochs are done.
        history: name -> one number for each of them.
    """

    def __init__(self, learner: Learner, data: Any, checkpoint: Any) -> None:
        self.epoch = 0
        self.history: dict[str, list[float]] = {}
        self._learner = learner
        self._data = data
        self._path = None if checkpoint is None else Path(os.fspath(checkpoint))

    def record(self, found: dict[str, float]) -> None:
        """An epoch is done, with these numbers."""
        for name, value in found.items():
            self.history.setdefault(name, []).append(value)
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
            CheckpointError: if the file is broken, or is none of such a run.
        """
        if self._path is None:
            raise CheckpointError(
                "resume a run", "no checkpoint is named", "fit(..., checkpoint='run.safetensors')"
            )
        if not self._path.exists():
            self.save()
            return
        state = self._learner.backend.load(self._path, device=device)
        if not isinstance(state, dict) or state.get("format") != _FORMAT or not _is_whole(state):
            raise CheckpointError(
                f"resume from {self._path}",
                "the file holds no state of a training run",
                "name the file that fit(..., checkpoint=...) wrote, or another one to begin anew",
            )
        self._check_rate(state["rate"])
        go_on = Order(self._data).checked(state["data"])
        go_on()
        # Afterwards: to go through the data may draw from the framework's random numbers.
        self._learner.restore(state["learner"])
        self.epoch, self.history = state["epoch"], state["history"]

    def _state(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "epoch": self.epoch,
            "history": self.history,
            "rate": self._rate(),
            "learner": self._learner.state(),
            "data": Order(self._data).state(),
        }

    def _rate(self) -> list[Any] | None:
        """The name of the optimizer and its learning rate; None for the framework's own object."""
        settings = self._learner.settings
        is_named = isinstance(settings.optimizer, str)
        return [settings.optimizer, float(settings.lr)] if is_named else None

    def _check_rate(self, saved: Any) -> None:
        # Some frameworks would go on with the new learning rate, and others with the old one.
        now = self._rate()
        if now != saved:
            raise CheckpointError(
                f"resume from {self._path} with {_in_words(now)}",
                f"the run began with {_in_words(saved)}",
                f"fit(..., {_in_words(saved)})" if saved else "hand that optimizer in again",
            )


def _is_whole(state: dict[str, Any]) -> bool:
    """Whether everything is there that ``_state`` has written, of its types."""
    types = {"epoch": int, "history": dict, "learner": dict}
    return all(isinstance(state.get(name), kind) for name, kind in types.items()) and (
        {"rate", "data"} <= state.keys()
    )


def _in_words(rate: Any) -> str:
    if rate is None:
        return "an optimizer of the framework's own"
    optimizer, lr = rate
    return f"optimizer={optimizer!r}, lr={lr:g}"
