"""Options that are text: their values as types, and the errors of other values.

A type checker finds a misspelt option in a program. At run time, an ``UnsupportedValueError`` names
the nearest option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

LossName = Literal["mse", "cross_entropy", "bce", "model"]
OptimizerName = Literal["sgd", "momentum", "adam", "adamw", "adagrad"]
MetricName = Literal["accuracy"]
Precision = Literal["model", "bf16", "fp16"]
MatmulPrecisionName = Literal["highest", "high", "medium"]
Statistics = Literal["global", "local"]
Keep = Literal["last", "best"]
Mode = Literal["min", "max"]
Period = Literal["epoch", "step"]
Activation = Literal["relu", "tanh", "sigmoid"]
Loss = LossName | Callable[..., Any]
"""``'mse'``, ``'cross_entropy'``, ``'bce'``, ``'model'``, or ``(prediction, y) -> scalar tensor``.

Or ``(y_true, y_pred) -> scalar tensor``, as in Keras, if the first parameter is named ``y_true``.
"""

NumGpus = int | Literal["auto"]
"""A number, -1 for all that there are, or ``'auto'``, which says the same."""


class _Steps(Protocol):
    """Of PyTorch, and Gluon's ``Trainer``."""

    @property
    def step(self) -> Any: ...


class _Updates(Protocol):
    """Of optax, NNX and MXNet."""

    @property
    def update(self) -> Any: ...


class _Applies(Protocol):
    """Of Keras."""

    @property
    def apply_gradients(self) -> Any: ...


class _Computes(Protocol):
    """A metric of torchmetrics, and of NNX."""

    @property
    def update(self) -> Any: ...
    @property
    def compute(self) -> Any: ...
    @property
    def reset(self) -> Any: ...


class _GivesResult(Protocol):
    """A metric of Keras."""

    @property
    def update_state(self) -> Any: ...
    @property
    def result(self) -> Any: ...
    @property
    def reset_state(self) -> Any: ...


class _Gets(Protocol):
    """A metric of Gluon."""

    @property
    def update(self) -> Any: ...
    @property
    def get(self) -> Any: ...
    @property
    def reset(self) -> Any: ...


Metric = MetricName | Callable[[Any, Any], Any] | _Computes | _GivesResult | _Gets
"""``'accuracy'``, or ``(prediction, y) -> scalar tensor``, the mean over a batch.

Or ``(y_true, y_pred) -> scalar tensor``, with these names. Or an object that keeps a running value:
``update``, ``compute`` and ``reset``, or ``update_state``, ``result`` and ``reset_state``.
"""
Metrics = Sequence[Metric] | Mapping[str, Metric]
"""The metrics of ``fit`` and ``validate``; a mapping has their names in the history."""

Optimizer = OptimizerName | _Steps | _Updates | _Applies
"""The name of an optimizer, or one of the framework's own; any other text is an error."""

LOSSES: tuple[str, ...] = get_args(LossName)
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
METRICS: tuple[str, ...] = get_args(MetricName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
MATMUL_PRECISIONS: tuple[str, ...] = get_args(MatmulPrecisionName)
"""What products and convolutions of float32 are computed in; the most precise one first."""
STATISTICS: tuple[str, ...] = get_args(Statistics)
KEEPS: tuple[str, ...] = get_args(Keep)
MODES: tuple[str, ...] = get_args(Mode)
PERIODS: tuple[str, ...] = get_args(Period)
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def problem_of(value: object, choices: Sequence[str], other: str = "") -> str:
    """Return the problem of an option that is text; empty if it is valid.

    Args:
        value: as the user gave it.
        choices: the values that there are.
        other: other valid values, in words.

    >>> problem_of('adamm', ('sgd', 'adam'))
    "it must be one of 'sgd', 'adam'; did you mean 'adam'?"
    """
    # Of a text only: arrays compare each of their elements.
    if isinstance(value, str) and value in choices:
        return ""
    found = ", ".join(map(repr, choices)) + (f", or {other}" if other else "")
    problem = f"it must be {'one of ' if other or len(choices) > 1 else ''}{found}"
    near = nearest(value, choices)
    return problem + (f"; did you mean {near!r}?" if near else "")


def nearest(value: object, choices: Sequence[str]) -> str:
    """Return the nearest choice for a misspelt value; empty if no choice is near.

    >>> nearest('Adam', ('sgd', 'adam'))
    'adam'
    """
    if not isinstance(value, str):
        return ""
    import difflib  # not before it is needed

    text = str.__str__(value)[:50].lower().replace("-", "_")
    known = {choice.lower(): choice for choice in choices}
    return next((known[x] for x in difflib.get_close_matches(text, known, n=1)), "")
