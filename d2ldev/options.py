"""Options that are text: their values as types, and the errors of other values.

A type checker finds a misspelt option in a program. At run time, an ``UnsupportedValueError`` names
the option that was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

LossName = Literal["mse", "cross_entropy", "bce", "model"]
OptimizerName = Literal["sgd", "momentum", "adam", "adamw", "adagrad"]
MetricName = Literal["accuracy"]
OwnPrecision = Literal["model", "bf16", "fp16"]
Precision = Literal[OwnPrecision, "bf16-mixed", "16-mixed", "16", 16, "32-true", "32", 32]
MatmulPrecisionName = Literal["highest", "high", "medium"]
Statistics = Literal["global", "local"]
Mode = Literal["min", "max"]
Period = Literal["epoch", "step"]
Activation = Literal["relu", "tanh", "sigmoid"]
Loss = LossName | Callable[..., Any]
"""``'mse'``, ``'cross_entropy'``, ``'bce'``, ``'model'``, or ``(prediction, y) -> scalar tensor``.

Or ``(y_true, y_pred) -> scalar tensor``, if the first parameter has the name of a target.
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

Or ``(y_true, y_pred) -> scalar tensor``, if the first parameter has the name of a target. Or an
object that keeps a running value: ``update``, ``compute`` and ``reset``, or ``update_state``,
``result`` and ``reset_state``.
"""
Metrics = Sequence[Metric] | Mapping[str, Metric]
"""The metrics of ``fit`` and ``validate``; a mapping has their names in the history."""

Optimizer = OptimizerName | _Steps | _Updates | _Applies
"""The name of an optimizer, or one of the framework's own; any other text is an error."""

LOSSES: tuple[str, ...] = get_args(LossName)
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
METRICS: tuple[str, ...] = get_args(MetricName)
PRECISIONS: tuple[str, ...] = get_args(OwnPrecision)
OWN_PRECISIONS: dict[object, OwnPrecision] = {
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    16: "fp16",
    "32-true": "model",
    "32": "model",
    32: "model",
}
"""Lightning's names of precisions, and ours. Its ``'32-true'`` converts nothing either."""
CONVERSIONS: dict[object, str] = {
    "bf16-true": "bfloat16",
    "16-true": "float16",
    "64-true": "float64",
    "64": "float64",
    64: "float64",
}
"""Lightning's precisions that convert the parameters, which d2ldev leaves as they are."""
MATMUL_PRECISIONS: tuple[str, ...] = get_args(MatmulPrecisionName)
"""What products and convolutions of float32 are computed in; the most precise one first."""
STATISTICS: tuple[str, ...] = get_args(Statistics)
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
    """Return the choice that a value is a spelling error of; empty if it is of none.

    Another word has another meaning, however similar it is: ``'rmsprop'`` is not ``'adagrad'``, and
    ``'nadam'`` is not ``'adam'``.

    >>> nearest('Adamm', ('sgd', 'adam')), nearest('nadam', ('sgd', 'adam'))
    ('adam', '')
    """
    if not isinstance(value, str):
        return ""
    text = _fold(str.__str__(value)[:_LONGEST])
    found = [choice for choice in choices if _is_misspelt(text, _fold(choice))]
    return next((choice for choice in found if _fold(choice) == text), "".join(found[:1]))


def write_option(name: str, value: object, choices: Sequence[str], otherwise: str) -> str:
    """Return the line that mends an option: with the choice that was meant, or another line.

    Args:
        name: of the option.
        value: as the user gave it.
        choices: the values that there are.
        otherwise: the line if the value is a spelling error of none.

    >>> write_option('optimizer', 'adamm', ('sgd', 'adam'), 'leave it out')
    "optimizer='adam'"
    """
    near = nearest(value, choices)
    return f"{name}={near!r}" if near else otherwise


_LONGEST = 4000


def _fold(text: str) -> str:
    """Return a text without what hardly tells words apart: case, ``-``, ``_``, doubled letters."""
    import re  # not before it is needed

    return re.sub(r"[-_\s]|([^\W\d])(?=\1)", "", text.lower())


def _is_misspelt(text: str, word: str) -> bool:
    """Tell whether a text is a spelling error of a word: it begins alike, and few letters differ.

    A word of three letters may have two swapped, or lack one: ``'mae'`` is not ``'mse'``. Digits
    have to be the same: ``'float16'`` is not ``'float64'``.
    """
    if text[:1] != word[:1] or [c for c in text if c.isdigit()] != [c for c in word if c.isdigit()]:
        return False
    letters = sum(not c.isdigit() for c in min(text, word, key=len))
    is_slip = len(text) == len(word) - 1 or sorted(text) == sorted(word)
    return _is_within(text, word, max(min(letters // 4, 2), is_slip))


def _is_within(a: str, b: str, edits: int) -> bool:
    """Tell whether a text becomes another one by so many edits, swapped neighbours included."""
    pairs = enumerate(zip(a, b, strict=False))
    same = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    a, b = a[same:], b[same:]
    if not a or not b or not edits:
        return max(len(a), len(b)) <= edits
    rests = [(a[1:], b[1:]), (a[1:], b), (a, b[1:])]
    if a[:2] == b[1::-1]:
        rests.append((a[2:], b[2:]))
    return any(_is_within(*rest, edits - 1) for rest in rests)
