"""What a ``gluon.Trainer`` has learned, as a nesting, and back.

By the order in which its parameters were made: MXNet's own names count on from model to model, and
a trainer sorts them as text, ``dense10_bias`` before ``dense9_bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d2ldev.errors import CheckpointError, describe
from d2ldev_mxnet import training_state
from d2ldev_mxnet.parameter_names import in_order_of_making


class _Parameters:
    """The parameters of a trainer, in the place of a model; they are saved with theirs."""

    prefix = ""

    def __init__(self, trainer: Any) -> None:
        self._sorted = sorted(trainer._params, key=lambda p: in_order_of_making(p.name))

    def collect_params(self) -> dict[str, Any]:
        return {}

    def _collect_params_with_prefix(self) -> dict[str, Any]:
        return {str(index): parameter for index, parameter in enumerate(self._sorted)}

    def shapes(self) -> list[list[int]]:
        return [list(parameter.shape or ()) for parameter in self._sorted]


class _Restoration(training_state.Restoration):
    """That of a trainer alone."""

    def _fill(self, parameter: Any, value: Any) -> None:
        """Its parameters are restored with their model."""


def state_of(trainer: Any) -> dict[str, Any]:
    """Its optimizer's numbers, counts and arrays, by the numbers of the parameters."""
    parameters = _Parameters(trainer)
    state: dict[str, Any] = training_state.state_of(parameters, trainer)["optimizer"]
    # In the order of the trainer, which is another in the next process.
    del state["parameters"]
    return {**state, "shapes": parameters.shapes()}


def state_put(trainer: Any, saved: Any) -> Callable[[], None]:
    """What gives a trainer a state.

    Raises:
        ValueError: if the state is no such trainer's.
    """
    if not isinstance(saved, Mapping) or not all(
        isinstance(saved.get(key), Mapping) for key in ("numbers", "schedule", "counts", "states")
    ):
        raise ValueError(f"{describe(saved)} is no state of a trainer")
    parameters = _Parameters(trainer)
    shapes, found = parameters.shapes(), saved.get("shapes")
    if shapes != found:
        raise ValueError(f"its parameters: {shapes}, {found} in the state")
    if not saved["counts"].keys() <= parameters._collect_params_with_prefix().keys():
        raise ValueError("it has counted the steps of other parameters")
    current = training_state.state_of(parameters, trainer)
    told = {key: value for key, value in saved.items() if key != "shapes"}
    told["parameters"] = current["optimizer"]["parameters"]
    try:
        return _Restoration(parameters, trainer, {**current, "optimizer": told}).carry_out
    except CheckpointError as error:
        raise ValueError(error.problem) from error
