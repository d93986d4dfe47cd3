"""Labels and the logits that they are compared with, also where a function is traced with them.

TensorFlow may not know then how many dimensions they have, nor how long these are.
"""

from __future__ import annotations

import tensorflow as tf

from d2ldev.interface import Tensor
from d2ldev.training.learner import check_labels


def check(prediction: Tensor, y: Tensor) -> None:
    """See that there is one label for each row of logits, as far as that is known.

    Raises:
        UnsupportedValueError: if there is not, or labels are no integers.
    """
    logits, labels = prediction.shape, y.shape
    if logits.rank is None:
        # What is not known is taken to fit.
        logits = tf.TensorShape([] if labels.rank is None else labels).concatenate([None])
    if labels.rank is None:
        labels = logits[:-1]
    check_labels(logits, labels, y.dtype.name)


def in_rows(prediction: Tensor, y: Tensor) -> Tensor:
    """Labels of the shape of the rows of logits; what did not fit would be broadcast otherwise."""
    rows = prediction.shape[:-1]
    if rows.is_fully_defined() and y.shape.is_fully_defined():
        return y
    return tf.reshape(y, tf.shape(prediction)[:-1])
