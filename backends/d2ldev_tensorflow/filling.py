"""Tensors of one number, of counted numbers, and of another dtype, in every dtype there is.

TensorFlow's own operations know fewer of them: nothing fills with float8, only floats are cast to
it, and ``tf.range`` counts in six dtypes, adding up the rounding errors of the shorter ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from d2ldev_tensorflow.numpy_exchange import from_data


def filled(shape: tuple[int, ...], value: Any, dtype: tf.DType | None) -> tf.Tensor:
    """A tensor filled with a number."""
    if dtype is None or not dtype.name.startswith("float8"):
        return tf.fill(shape, from_data(value, dtype))
    return tf.cast(tf.fill(shape, from_data(value, tf.float32)), dtype)


def counted(start: Any, stop: Any, step: Any, dtype: tf.DType | None) -> tf.Tensor:
    """The numbers from ``start`` to ``stop``, counted in 64 bits and then converted."""
    numbers = (start, stop, step)
    real = any(isinstance(number, (float, np.floating)) for number in numbers)
    if dtype is None:
        narrow = all(abs(number) < 2**31 for number in numbers)
        dtype = tf.float32 if real else tf.int32 if narrow else tf.int64
    return cast(tf.range(*numbers, dtype=tf.float64 if real else tf.int64), dtype)


def cast(x: Any, dtype: tf.DType) -> tf.Tensor:
    """A tensor in another dtype."""
    if dtype.name.startswith("float8") and not x.dtype.is_floating:
        x = tf.cast(x, tf.float32)
    return tf.cast(x, dtype)
