"""Named metrics, computed on the device of the predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from d2ldev._backend import Backend, framework_of
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.walk import flatten
from d2ldev.operations.other_backends import function_of_another_backend
from d2ldev.options import METRICS, Loss, Metric, problem_of
from d2ldev.training.functions import comparison, describe_output, mean_of, metric_refusal


def find_metrics(
    backend: Backend, metrics: Sequence[Metric], loss: Loss | None = None
) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Return each metric's function, by its name in the history.

    Args:
        backend: the backend, for its ``accuracy``.
        metrics: names and functions; a function has its own name in the history.
        loss: with ``'model'`` metrics are functions of the model's output and the batch.

    Raises:
        UnsupportedValueError: for an unknown name, or a name twice. For an object that cannot be
            called, or that keeps a running value.
    """
    if not isinstance(metrics, (list, tuple)):
        raise UnsupportedValueError(
            f"measure {describe(metrics)}",
            "metrics must be a list or a tuple",
            "metrics=['accuracy']",
        )
    functions: dict[str, Callable[[Any, Any], Any]] = {}
    for metric in metrics:
        function: Callable[[Any, Any], Any]
        if isinstance(metric, str) and metric == "accuracy":
            name, function = "accuracy", backend.accuracy
            if loss == "model":
                function = partial(_measure_output, backend)
        elif callable(metric):
            name = getattr(metric, "__name__", type(metric).__name__)
            attempted = f"measure {describe(metric)}"
            fix = f"a function of the {backend.name} backend's own tensors"
            refusal = function_of_another_backend(framework_of(backend), attempted, metric, fix=fix)
            if refusal is not None:
                raise refusal
            function = _run_on_device_of_predictions(backend, name, metric)
        elif hasattr(metric, "update") and hasattr(metric, "reset"):  # a metric of Gluon
            raise metric_refusal(
                metric,
                "metrics=['accuracy'], or a function: "
                "def error(prediction, y): return abs(prediction - y).mean()",
            )
        else:
            raise UnsupportedValueError(
                f"measure {describe(metric)}",
                problem_of(metric, METRICS, "(prediction, y) -> scalar tensor"),
                "metrics=['accuracy']",
            )
        check_names(["loss", *functions, name])
        functions[name] = function
    return functions


def _measure_output(backend: Backend, output: Any, batch: Any) -> Any:
    """Return the accuracy of a model's ``logits`` for the ``labels`` of a batch."""
    logits, labels = (
        x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)
        for x, name in ((output, "logits"), (batch, "labels"))
    )
    rank = len(getattr(logits, "shape", ()))
    problem = f"the logits have {rank} dimensions, and the model may have shifted the labels"
    if logits is None or labels is None:
        problem = f"there are no {'logits' if logits is None else 'labels'}; "
        problem += describe_output(output) if logits is None else "the batch needs the key 'labels'"
    elif rank == 2:
        return backend.accuracy(logits, labels)
    raise UnsupportedValueError(
        "measure the accuracy with loss='model'",
        problem,
        "metrics=[function], with def function(output, batch): ...",
    )


def check_names(names: Sequence[str]) -> None:
    """Raise an UnsupportedValueError if the history would have two numbers of one name."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UnsupportedValueError(
            f"measure {twice[0]!r}",
            "the history already has this name",
            "give the function another __name__",
        )


def _run_on_device_of_predictions(
    backend: Backend, name: str, metric: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """Return a metric that runs on the device of the first tensor in the predictions.

    Outside a ``tf.function``, TensorFlow computes on its default device, not on the operands' one.
    """
    function = comparison(metric)

    def measure(prediction: Any, y: Any) -> Any:
        flat = flatten(prediction, framework_of(backend).state.kinds, "measure a prediction")
        device = next(map(backend.device_of, flat.tensors.values()), None)
        with nullcontext() if device is None else backend.on(device):
            value = function(prediction, y)
        shape = tuple(getattr(value, "shape", ()))
        if shape:
            raise UnsupportedValueError(
                f"measure {name}",
                f"it is of shape {shape}, and not a scalar",
                f"metrics=[{mean_of(metric, value)}]",
            )
        return value

    return measure
