"""Metrics: what ``fit`` takes, by name, as a function, or as an object.

Held by the requirements ``fit.names-its-metrics`` and ``fit.refuses-other-metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from d2ldev._backend import Backend, framework_of
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.operations.arguments import class_refusal
from d2ldev.operations.other_backends import function_of_another_backend
from d2ldev.options import METRICS, Loss, Metrics, nearest, problem_of
from d2ldev.training.functions import check_number, comparison, take_mean
from d2ldev.training.running_metrics import (
    RunningMetric,
    device_of_prediction,
    find_logits,
    find_methods,
    scope_of,
)

Measure = Callable[[Any, Any], Any] | RunningMetric


def find_metrics(
    backend: Backend, metrics: Metrics, loss: Loss | None = None
) -> Mapping[str, Measure]:
    """Return each metric's function or running metric, by its name in the history.

    Args:
        backend: the backend, for its ``accuracy``.
        metrics: see ``Trainer.fit``.
        loss: with ``'model'`` metrics are functions of the model's output and the batch.

    Raises:
        UnsupportedValueError: for an unknown name, or a name twice. For any other object.
    """
    functions: dict[str, Measure] = {}
    for name, metric in _name_metrics(metrics):
        check_names(["loss", *functions, name])
        functions[name] = _find_metric(backend, name, metric, loss)
    return functions


def _name_metrics(metrics: Any) -> Iterable[tuple[str, Any]]:
    """Return the metrics with their names in the history."""
    if isinstance(metrics, (list, tuple)):
        return [(_name_of(each), each) for each in metrics]
    # A collection of torchmetrics is a mapping, too, and not a ``Mapping``.
    if not hasattr(metrics, "keys") or isinstance(metrics, type):
        raise UnsupportedValueError(
            f"measure {describe(metrics)}",
            "metrics must be a list, a tuple, or a dict of names",
            "metrics=['accuracy'], or metrics={'name': metric}",
        )
    named = [(name, metrics[name]) for name in metrics.keys()]  # noqa: SIM118
    for name, _ in named:
        if not isinstance(name, str):
            raise UnsupportedValueError(
                f"measure {describe(metrics)}",
                f"the name {describe(name)} is not text",
                "metrics={'name': metric}",
            )
    return named


def _name_of(metric: Any) -> str:
    name = getattr(metric, "__name__", None)
    if name is None and find_methods(metric):
        name = getattr(metric, "name", None)
    if isinstance(metric, str):
        name = metric
    return name if isinstance(name, str) else type(metric).__name__


def _find_metric(backend: Backend, name: str, metric: Any, loss: Loss | None) -> Measure:
    attempted = f"measure {describe(metric)}"
    if isinstance(metric, str) and metric == "accuracy":
        return partial(_measure_output, backend) if loss == "model" else backend.accuracy
    methods = find_methods(metric)
    several = isinstance(metric, Mapping) or (methods and hasattr(metric, "keys"))
    if isinstance(metric, type) or several or not (callable(metric) or methods):
        problem = problem_of(
            metric,
            METRICS,
            "a function (prediction, y) -> scalar tensor, or an object with update, compute and "
            "reset",
        )
        fix = "metrics=[function], with def function(prediction, y): ..."
        if nearest(metric, METRICS):
            fix = f"metrics=[{nearest(metric, METRICS)!r}]"
        if isinstance(metric, type):
            raise class_refusal(attempted, metric)
        if several:
            problem, fix = "it has several metrics", "metrics={**collection}, without a list"
        raise UnsupportedValueError(attempted, problem, fix)
    fix = f"a function of the {backend.name} backend's own tensors"
    refusal = function_of_another_backend(framework_of(backend), attempted, metric, fix=fix)
    if refusal is not None:
        raise refusal
    if methods:
        return RunningMetric(backend, name, metric, methods)
    return _run_on_device_of_predictions(backend, name, metric)


def _measure_output(backend: Backend, output: Any, batch: Any) -> Any:
    """Return the accuracy of a model's ``logits`` for the ``labels`` of a batch."""
    return backend.accuracy(*find_logits(output, batch, "measure the accuracy"))


def check_names(names: Sequence[str]) -> None:
    """Raise an UnsupportedValueError if the history would have two numbers of one name."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UnsupportedValueError(
            f"measure {twice[0]!r}",
            "the history already has this name",
            "metrics={'another_name': metric}, a dict of names",
        )


def _run_on_device_of_predictions(
    backend: Backend, name: str, metric: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Return a metric that runs on the device of the first tensor in the predictions."""
    function = comparison(metric)
    call = getattr(metric, "__name__", "__call__").replace("<lambda>", "function")

    def measure(prediction: Any, y: Any) -> Any:
        with scope_of(backend, device_of_prediction(backend, prediction)):
            value = function(prediction, y)
        check_number(f"measure {name}", value, f"{call}(prediction, y)")
        shape = tuple(getattr(value, "shape", ()))
        if shape:
            raise UnsupportedValueError(
                f"measure {name}",
                f"it is of shape {shape}, and not a scalar",
                take_mean(metric, value, "metrics=[{}]"),
            )
        return value

    return measure
