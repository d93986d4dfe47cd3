"""What a ``gluon.Trainer`` has learned, as a nesting, and back.

By the numbers of its parameters: MXNet's own names count on from model to model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2ldev.errors import CheckpointError
from d2ldev_mxnet import training_state


class _Parameters:
    """The parameters of a trainer, in the place of a model; they are saved with theirs."""

    prefix = ""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def collect_params(self) -> dict[str, Any]:
        return {}

    def _collect_params_with_prefix(self) -> dict[str, Any]:
        return {str(index): p for index, p in enumerate(self._trainer._params)}


class _Restoration(training_state.Restoration):
    """That of a trainer alone."""

    def _fill(self, parameter: Any, value: Any) -> None:
        """Its parameters are restored with their model."""


def state_of(trainer: Any) -> dict[str, Any]:
    """Its optimizer's numbers, counts and arrays, by the numbers of the parameters."""
    state: dict[str, Any] = training_state.state_of(_Parameters(trainer), trainer)["optimizer"]
    return state


def state_put(trainer: Any, saved: Any) -> Callable[[], None]:
    """What gives a trainer a state.

    Raises:
        ValueError: if the state is no such trainer's.
    """
    parameters = _Parameters(trainer)
    current = training_state.state_of(parameters, trainer)
    try:
        return _Restoration(parameters, trainer, {**current, "optimizer": saved}).carry_out
    except CheckpointError as error:
        raise ValueError(error.problem) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it lacks what a trainer's state has: {error}") from error
