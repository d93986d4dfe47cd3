"""Losses that are given by name: means over a batch, or weighted means.

Each returns its ``Learner.weight``, too.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d2ldev.framework import NO_LABEL, Tensor


def _mse(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    prediction, y = _mask_uncounted(widen(prediction), y, weights)
    return _mean((prediction - tf.cast(y, prediction.dtype)) ** 2, weights)


def _cross_entropy(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any, Any]:
    logits, y = _mask_uncounted(widen(prediction), widen_labels(y), weights)
    none = tf.constant(NO_LABEL, tf.int64)
    # A label that is not a class raises an error on the CPU, and gives NaN on a GPU.
    classes = logits.shape[-1]
    counts = (y >= 0) & (y < (tf.shape(logits, tf.int64)[-1] if classes is None else classes))
    others = tf.where(counts, none, y)
    # Of an empty batch, too.
    wrong = tf.minimum(tf.reduce_min(others), none), tf.maximum(tf.reduce_max(others), none)
    # Of a row that does not count, too, the loss may be infinite, and 0 times it is NaN.
    logits = tf.where(counts[..., tf.newaxis], logits, tf.zeros_like(logits))
    y = tf.where(counts, y, 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    counts = tf.cast(counts, losses.dtype)
    if weights is None:
        number = tf.reduce_sum(counts)
        return tf.math.divide_no_nan(tf.reduce_sum(losses * counts), number), number, wrong
    weights = tf.cast(weights, losses.dtype)
    for _ in range(y.shape.rank - weights.shape.rank):
        weights = weights[..., tf.newaxis]
    return *_mean(losses, counts * weights), wrong


def _bce(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    logits, y = _mask_uncounted(widen(prediction), y, weights)
    y = tf.cast(y, logits.dtype)
    return _mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits), weights)


def _mask_uncounted(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Return both with 0 where the weight is 0: 0 times an infinite loss would be NaN."""
    if weights is None:
        return prediction, y
    counts = tf.cast(weights, tf.bool)
    for _ in range(y.shape.rank - weights.shape.rank):
        counts = counts[..., tf.newaxis]
    rows = counts if prediction.shape.rank == y.shape.rank else counts[..., tf.newaxis]
    parts = (rows, prediction), (counts, y)
    return tuple(tf.where(which, x, tf.zeros_like(x)) for which, x in parts)


def _mean(losses: Tensor, weights: Any) -> tuple[Tensor, Any]:
    if weights is None:
        return tf.reduce_mean(losses), None
    shape = tf.concat([tf.shape(weights), [-1]], 0)
    sizes = tf.cast(tf.size(losses), losses.dtype), tf.cast(tf.size(weights), losses.dtype)
    losses, weights = tf.reduce_mean(tf.reshape(losses, shape), -1), tf.cast(weights, losses.dtype)
    mean, total = divide(tf.reduce_sum(losses * weights), tf.reduce_sum(weights))
    return mean, total * tf.math.divide_no_nan(*sizes)  # of all elements


def divide(total: Any, weight: Any) -> tuple[Any, Any]:
    """Return a ``WeightedLoss`` as a mean, and its weight: see ``Objective``."""
    total = tf.convert_to_tensor(total)
    weight = tf.stop_gradient(tf.cast(weight, total.dtype))
    return total / (weight + tf.cast(weight == 0, total.dtype)), weight


LOSSES = {"mse": _mse, "cross_entropy": _cross_entropy, "bce": _bce}


def widen(prediction: Tensor) -> Tensor:
    """Return float16 and bfloat16 in float32: a mean over a batch needs more digits."""
    return tf.cast(prediction, tf.float32) if prediction.dtype.size < 4 else prediction


def widen_labels(y: Tensor) -> Tensor:
    """Return labels in int64. A great one of ``uint64`` stays great: -100 counts as no label."""
    labels = tf.cast(y, tf.int64)
    if y.dtype == tf.uint64:
        labels = tf.where(labels < 0, tf.int64.max, labels)
    return labels
