"""Metrics by name: what is measured on predictions, on the device where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from d2ldev.errors import UnsupportedValueError, describe

if TYPE_CHECKING:
    from d2ldev.interface import Backend

Metric = str | Callable[[Any, Any], Any]
"""``'accuracy'``, or ``(prediction, y) -> scalar tensor``, the mean over a batch."""


def named_metrics(
    backend: Backend, metrics: Sequence[Metric]
) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Each metric's function, by the name that it has in the history.

    Args:
        backend: whose ``accuracy`` is meant.
        metrics: names and functions; a function's name is its own.

    Raises:
        UnsupportedValueError: for an unknown name, what cannot be called, or a name twice.
    """
    found: dict[str, Callable[[Any, Any], Any]] = {}
    for metric in metrics:
        function: Callable[[Any, Any], Any]
        if metric == "accuracy":
            name, function = "accuracy", backend.accuracy
        elif callable(metric):
            name, function = getattr(metric, "__name__", type(metric).__name__), metric
        else:
            raise UnsupportedValueError(
                f"measure {describe(metric)}",
                "a metric is 'accuracy', or (prediction, y) -> scalar tensor",
                "metrics=['accuracy']",
            )
        if name in found or name == "loss":
            raise UnsupportedValueError(
                f"measure {name!r}",
                "the history has that name already",
                "give the function another __name__",
            )
        found[name] = function
    return found
