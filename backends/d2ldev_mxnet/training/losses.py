"""Losses that are given by name: means over the examples of a batch, or over their weights.

Each returns its ``Learner.weight``, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from d2ldev.framework import NO_LABEL, Tensor
from d2ldev_mxnet.framework import mx


def _mse(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    prediction, y = _mask_uncounted(prediction, y, weights)
    return _mean((prediction - _like(y, prediction)) ** 2, weights)


def _cross_entropy(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any, Any]:
    """Return the mean over the labels that are classes; 0 if none is."""
    prediction, y = _mask_uncounted(prediction, y, weights)
    if y.dtype not in (np.int32, np.int64):
        # MXNet compares in the dtype of labels, in which 200 may be -56:
        # https://github.com/apache/mxnet/issues/16964
        y = y.astype("int64")
    classes = prediction.shape[-1]
    if weights is None and y.size:
        loss, *others = _mean_cross_entropy(classes, threading.get_ident())(prediction, y)
        number, *extremes = (x.detach() for x in others)
        return loss, number, tuple(extremes)
    is_class = _find_classes(mx, y, classes)
    losses = _cross_entropies(mx, prediction, y, is_class)
    counts = mx.np.ones_like(losses) * is_class
    if weights is None:  # an empty batch, which has no extremes
        loss, number = _mean_of_classes(mx, losses, counts)
        return loss, number.detach(), ()
    wrong = _find_extremes(mx, y, is_class) if y.size else ()
    weights = weights.reshape((*weights.shape, *[1] * (y.ndim - weights.ndim)))
    return *_mean(losses, counts * weights.astype(losses.dtype)), tuple(x.detach() for x in wrong)


# By MXNet's functions of arrays, or by those of symbols.


def _find_classes(space: Any, y: Any, classes: int) -> Any:
    """Return whether each label is a class."""
    return space.np.mod(y, classes) == y


def _cross_entropies(space: Any, prediction: Any, y: Any, is_class: Any) -> Any:
    """Return the loss of each label. Where it is not a class, the number counts for nothing."""
    # The loss of a row that does not count may be infinite, and 0 times it is NaN.
    rows = space.np.expand_dims(is_class, -1)
    prediction = space.np.where(rows, prediction, space.np.zeros_like(prediction))
    # ``pick`` takes a label that is out of range for the nearest class.
    return -space.npx.pick(space.npx.log_softmax(prediction, axis=-1), y, axis=-1)


def _find_extremes(space: Any, y: Any, is_class: Any) -> tuple[Any, Any]:
    """Return the least and the greatest label outside the classes; else ``NO_LABEL``."""
    others = space.np.where(is_class, space.np.zeros_like(y) + NO_LABEL, y)
    return others.min(), others.max()


def _mean_of_classes(space: Any, losses: Any, counts: Any) -> tuple[Any, Any]:
    """Return the mean of the losses that count, and their number."""
    # The number is an integer. If it is 0, the loss of 0 is divided by 1.
    number = counts.sum()
    return (losses * counts).sum() / space.np.maximum(number, 1), number


@lru_cache
def _mean_cross_entropy(classes: int, _thread: int) -> Any:
    """Return a block that computes the mean cross-entropy in one call of MXNet's.

    It also returns the number of labels that count, and the extremes of those outside the classes.
    Each thread has a block of its own: two threads must not call one at the same time.

    Args:
        classes: how many there are.
    """

    def mean(space: Any, prediction: Any, y: Any) -> Any:
        is_class = _find_classes(space, y, classes)
        losses = _cross_entropies(space, prediction, y, is_class)
        counts = space.np.ones_like(losses) * is_class
        means = _mean_of_classes(space, losses, counts)
        return *means, *_find_extremes(space, y, is_class)

    return _make_block(mean)


def _make_block(function: Callable[..., Any]) -> Any:
    # MXNet does not count a block with a prefix, and the names of the user's stay what they are.
    block = mx.gluon.nn.HybridLambda(function, prefix="")
    block.hybridize()
    return block


def _bce(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    prediction, y = _mask_uncounted(prediction, y, weights)
    # By comparison: ``abs`` and ``relu`` have the gradient 0 at 0. And not by MXNet's ``softrelu``,
    # which is log(1 + exp(x)), and so 0 where exp(x) is small.
    is_positive = (prediction >= 0).astype(prediction.dtype)
    size = prediction * (2 * is_positive - 1)
    y = _like(y, prediction)
    return _mean(prediction * (is_positive - y) + mx.np.log1p(mx.np.exp(-size)), weights)


def _like(y: Tensor, prediction: Tensor) -> Tensor:
    """Return a target in the dtype of the prediction: MXNet computes with no two."""
    return y if y.dtype == prediction.dtype else y.astype(prediction.dtype)


def _mask_uncounted(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Return both with 0 in place of rows with weight 0: 0 times an infinite loss is NaN."""
    if weights is None:
        return prediction, y
    counts = (weights != 0).reshape((*weights.shape, *[1] * (y.ndim - weights.ndim)))
    rows = counts.reshape((*counts.shape, *[1] * (prediction.ndim - y.ndim)))
    parts = (rows, prediction), (counts, y)
    return tuple(mx.np.where(which, x, mx.np.zeros_like(x)) for which, x in parts)


def _mean(losses: Tensor, weights: Any) -> tuple[Tensor, Any]:
    if weights is None:
        return losses.mean(), None
    number = losses.size / max(1, weights.size)  # of losses for each weight
    losses, weights = losses.reshape((*weights.shape, -1)).mean(-1), weights.astype(losses.dtype)
    mean, total = divide((losses * weights).sum(), weights.sum())
    return mean, total * number


def divide(total: Any, weight: Any) -> tuple[Any, Any]:
    """Return a ``WeightedLoss`` as a mean, and its weight: see ``Objective``."""
    if not isinstance(total, mx.np.ndarray):
        return total, weight
    if isinstance(weight, mx.nd.NDArray):
        weight = weight.as_np_ndarray().detach().as_in_ctx(total.ctx).astype(total.dtype)
    else:
        weight = mx.np.array(weight, total.dtype, ctx=total.ctx)
    return total / (weight + (weight == 0)), weight


def avoid_zero(total: Any) -> Any:
    """Return a sum of weights by which one may divide."""
    return mx.np.maximum(total, float(np.finfo(total.dtype).tiny))


LOSSES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "mse": _mse,
    "cross_entropy": _cross_entropy,
    "bce": _bce,
}
