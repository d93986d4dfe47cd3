"""The labels of ``'cross_entropy'``: each is the number of a class, or ``NO_LABEL``.

A step leaves out every label that is no class, on the device, so that none reaches a kernel or the
parameters. The host looks at labels that it has, which waits for nothing, and at the range of the
others at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import Framework, Learner, Settings, Weighted
from d2ldev.framework.training import NO_LABEL, Labels
from d2ldev.nesting.kinds import TENSOR

# How many steps may pass before ranges that wait on a device are read.
_MOST_PENDING = 1024


def has_labels(settings: Settings) -> bool:
    """Tell whether the targets of a training are labels."""
    is_named = isinstance(settings.loss, str) and settings.methods is None
    return is_named and settings.loss == "cross_entropy"


def may_leave_out(learner: Learner) -> bool:
    """Tell whether a label of the next batch may be one that is left out."""
    is_known = learner.labels is not None and learner.labels.counts is None
    return has_labels(learner.settings) and not is_known


def seen(framework: Framework, y: Any, *, waits: bool = False) -> Labels | None:
    """Return what the host can see of labels.

    Args:
        framework: whose tensors they may be.
        y: labels as a tensor or a NumPy array, or a ``Weighted`` of them.
        waits: whether labels on a device are brought over.

    Returns:
        None if they are on a device, or are no labels: a step refuses these.
    """
    y, weights = y if isinstance(y, Weighted) else (y, None)
    found = _on_the_host(framework, y, waits)
    if found is None or found.dtype.kind not in "iu" or not found.size or not found.ndim:
        return None
    if weights is None:
        # One look at plain labels: as unsigned numbers, negative ones are the largest.
        greatest = int(found.view(found.dtype.str.replace("i", "u")).max())
        if greatest < 2 ** (8 * found.itemsize - 1) or found.dtype.kind == "u":
            return Labels(0, greatest)
    return _seen_closely(framework, found, weights, waits)


def _on_the_host(framework: Framework, x: Any, waits: bool) -> Any:
    if type(x) is np.ndarray:
        return x
    if framework.kinds[type(x)] is not TENSOR:
        return None
    tensors = framework.tensors
    return tensors.to_numpy(x) if waits or tensors.device_of(x) is CPU else None


def _seen_closely(
    framework: Framework, found: np.ndarray[Any, Any], weights: Any, waits: bool
) -> Labels | None:
    counts, sums = found != NO_LABEL, None
    if weights is not None:
        known = _on_the_host(framework, weights, waits)
        if known is None or known.shape != found.shape[: known.ndim] or not known.ndim:
            return None
        known = known.reshape(*known.shape, *[1] * (found.ndim - known.ndim))
        sums = (counts * known.astype("float64")).sum(tuple(range(1, found.ndim)))
        labels = found[counts & (known != 0)]
    else:
        labels = found[counts]
    extremes = (int(labels.min()), int(labels.max())) if labels.size else (0, 0)
    if counts.all():
        return Labels(*extremes)
    return Labels(*extremes, counts.reshape(len(found), -1).sum(1), sums)


def check(framework: Framework, learner: Learner) -> Learner:
    """Let a learner look at the labels of each batch; return it."""
    if has_labels(learner.settings):
        watch = _Watch(framework)
        own, cls = ref(learner), type(learner)
        methods = ["evaluate"] if learner.settings.optimizer is None else ["step", "evaluate"]
        for name in methods:
            # Not a bound method, which would keep the learner alive.
            vars(learner)[name] = watch.looking(own, getattr(cls, name))
        vars(learner)["check_labels"] = watch.read
    return learner


class _Watch:
    """What is known of the labels of a learner.

    Args:
        framework: of the learner.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        # The ranges of labels on a device, and the number of classes of each.
        self._ranges: list[Any] = []
        self._classes: list[int] = []

    def looking(self, own: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a learner that looks at the labels of its batch."""

        def compute(inputs: tuple[Any, ...], y: Any) -> Any:
            learner = own()
            labels = learner.labels
            if labels is None:
                learner.labels = labels = seen(self._framework, y)
            try:
                found = method(learner, inputs, y)
            finally:
                learner.labels = None
            classes = found[1].shape[-1]
            if labels is None:
                self._note(y, classes)
            elif labels.least < 0 or labels.greatest >= classes:
                raise _refusal(labels.least, labels.greatest, classes)
            return found

        return compute

    def _note(self, y: Any, classes: int) -> None:
        y, weights = y if isinstance(y, Weighted) else (y, None)
        self._ranges.append(self._framework.training.label_range(y, weights))
        self._classes.append(classes)
        if len(self._ranges) >= _MOST_PENDING:
            self.read()

    def read(self) -> None:
        """Read the ranges that wait on a device; see ``Learner.check_labels``."""
        ranges, classes = self._ranges, self._classes
        self._ranges, self._classes = [], []
        if not ranges:
            return
        tensors = self._framework.tensors
        for (least, greatest), number in zip(
            tensors.to_numpy(tensors.stack(ranges)).tolist(), classes, strict=True
        ):
            if least < 0 or greatest >= number:
                raise _refusal(least, greatest, number)


def _refusal(least: int, greatest: int, classes: int) -> UnsupportedValueError:
    wrong = least if least < 0 else greatest
    fix = f"labels from 0 to {classes - 1}, or {NO_LABEL} for what has none"
    if wrong > 0:
        fix = f"a model with at least {wrong + 1} classes, or {fix}"
    return UnsupportedValueError(
        f"train on a batch with the label {wrong}",
        f"its prediction has {classes} classes; the label was left out, like {NO_LABEL}",
        fix,
    )
