"""The labels of ``'cross_entropy'``: each is the number of a class, or ``NO_LABEL``.

On the device, a step leaves out every label that is not a class. So no invalid label reaches a
kernel or the parameters. The host checks labels in its own memory at once, without a wait. It
checks the range of other labels at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from d2ldev.contract import Framework, Learner, TrainingSettings, Weighted
from d2ldev.contract.training import NO_LABEL, Labels
from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError
from d2ldev.nesting.kinds import TENSOR
from d2ldev.training.steps import is_named
from d2ldev.typing import Inputs

# How many steps may pass before ranges that wait on a device are read.
_MOST_PENDING = 1024


def has_labels(settings: TrainingSettings) -> bool:
    """Tell whether the targets of a training are labels."""
    return is_named(settings) and settings.loss == "cross_entropy"


def look_at(
    framework: Framework, y: Any, *, is_drawn: bool = False, waits: bool = False
) -> Labels | None:
    """Return the properties of labels that the host can read.

    Args:
        framework: whose tensors they may be.
        y: labels as a tensor or a NumPy array, or a ``Weighted`` of them.
        is_drawn: whether they were drawn from the data just now, so that nothing is queued.
        waits: whether labels on a device are brought over.

    Returns:
        None if they are on a device, or are not labels: a step refuses these.
    """
    y, weights = y if type(y) is Weighted else (y, None)
    found = y if type(y) is np.ndarray else _on_the_host(framework, y, is_drawn, waits)
    if found is None or not found.ndim or not found.size:
        return None
    unsigned, limit = _UNSIGNED.get(found.dtype, (None, 0))
    if unsigned is None:
        return None
    if weights is None:
        # One look at plain labels: as unsigned numbers, negative ones are the largest.
        numbers = found.view(unsigned)
        greatest = numbers.item(numbers.argmax())
        if greatest <= limit:
            return _from_zero(greatest)
    if weights is not None:
        weights = _on_the_host(framework, weights, is_drawn, waits)
        if weights is None or weights.shape != found.shape[: weights.ndim] or not weights.ndim:
            return None
    return _look_closely(found, weights)


# By dtype of integers: the unsigned one of its size, and the greatest number of both. After a step
# little of the host's code is in the processor's caches: ``max`` takes five times as long there.
_UNSIGNED = {
    np.dtype(name): (np.dtype(f"u{np.dtype(name).itemsize}"), int(np.iinfo(name).max))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


@lru_cache(maxsize=1024)
def _from_zero(greatest: int) -> Labels:
    return Labels(0, greatest)


def _on_the_host(framework: Framework, x: Any, is_drawn: bool, waits: bool) -> Any:
    if isinstance(x, np.ndarray):
        return x
    if framework.state.kinds[type(x)] is not TENSOR:
        return None
    tensors = framework.tensors
    if not waits and tensors.device_of(x) is not CPU:
        return None
    found = tensors.read(x)
    return tensors.to_numpy(x) if found is None and is_drawn else found


def _look_closely(found: np.ndarray[Any, Any], weights: Any) -> Labels:
    counts = found != NO_LABEL
    if weights is not None:
        known = weights.reshape(*weights.shape, *[1] * (found.ndim - weights.ndim))
        labels = found[counts & (known != 0)]
    else:
        labels = found[counts]
    extremes = (int(labels.min()), int(labels.max())) if labels.size else (0, 0)
    if counts.all():
        return Labels(*extremes)
    return Labels(*extremes, counts.reshape(len(found), -1).sum(1))


def check(framework: Framework, learner: Learner) -> Learner:
    """Let a learner look at the labels of each batch; return it."""
    if has_labels(learner.settings):
        vars(learner)["_watch"] = _Watch(framework)
        learner.__class__ = _make_looking_class(type(learner))
    return learner


@lru_cache(maxsize=64)
def _make_looking_class(cls: type[Learner]) -> type[Learner]:
    """Return a class of learners that look at the labels of their batches."""

    def make_class(name: str) -> Callable[..., Any]:
        def compute(self: Any, inputs: Inputs, y: Any) -> Any:
            labels, is_traced = self.labels, False
            if labels is None:
                try:
                    labels = look_at(self._watch.framework, y)
                    if self.portion is None:  # else they are not all labels of the batch
                        self.labels = labels
                except UnsupportedValueError:  # it has no device, because it is only traced
                    is_traced = True
            try:
                found = getattr(cls, name)(self, inputs, y)
            finally:
                self.labels = None
            if labels is not None:
                classes = found[1].shape[-1]
                if labels.least < 0 or labels.greatest >= classes:
                    raise _refusal(labels.least, labels.greatest, classes)
            elif not is_traced:
                self._watch.note(y, found[1].shape[-1])
            return found

        return compute

    def check_labels(self: Any) -> None:
        self._watch.read()

    methods: dict[str, Any] = {name: make_class(name) for name in ("step", "evaluate")}
    methods |= {"check_labels": check_labels, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), methods)


class _Watch:
    """The ranges of labels that a learner has met on a device.

    Args:
        framework: of the learner.
    """

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        # The ranges of labels on a device, and the number of classes of each.
        self._ranges: list[Any] = []
        self._classes: list[int] = []

    def note(self, y: Any, classes: int) -> None:
        """Note the range of labels that are on a device, and of how many classes they are."""
        y, weights = y if isinstance(y, Weighted) else (y, None)
        self._ranges.append(self.framework.training.label_range(y, weights))
        self._classes.append(classes)
        if len(self._ranges) >= _MOST_PENDING:
            self.read()

    def read(self) -> None:
        """Read the ranges that wait on a device; see ``Learner.check_labels``."""
        ranges, classes = self._ranges, self._classes
        self._ranges, self._classes = [], []
        if not ranges:
            return
        tensors = self.framework.tensors
        for (least, greatest), number in zip(
            tensors.to_numpy(tensors.stack(ranges)).tolist(), classes, strict=True
        ):
            if least < 0 or greatest >= number:
                raise _refusal(least, greatest, number)


def _refusal(least: int, greatest: int, classes: int) -> UnsupportedValueError:
    """Return the error of a batch with a label that is not a class."""
    wrong = least if least < 0 else greatest
    fix = f"labels from 0 to {classes - 1}, or {NO_LABEL} for an example without a label"
    if wrong > 0:
        fix = f"a model with at least {wrong + 1} classes, or {fix}"
    return UnsupportedValueError(
        f"train on a batch with the label {wrong}",
        f"its prediction has {classes} classes; the label was left out, like {NO_LABEL}",
        fix,
    )
