"""Between TensorFlow and NumPy: copies in both directions.

bfloat16 and float8 are ``ml_dtypes``' in NumPy, as TensorFlow itself has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def from_data(obj: Any, dtype: tf.DType | None) -> tf.Tensor:
    """A new tensor with the values of a number, nested lists, or a NumPy array."""
    if dtype is not None:
        # By NumPy's rules, which convert where TensorFlow refuses: of [1, 2] it makes no float8.
        obj = np.asarray(obj).astype(dtype.as_numpy_dtype)
    elif isinstance(obj, (list, tuple)) and _holds_arrays(obj):
        obj = np.array(obj)
    return tf.constant(obj)  # which copies, also memory that is aligned


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """The values of a tensor or a variable, wherever it is, in an array of its own."""
    # TensorFlow copies arrays, and gives a scalar for what has no dimensions.
    return np.asarray(x.numpy())


def _holds_arrays(obj: Any) -> bool:
    if isinstance(obj, (list, tuple)):
        return any(_holds_arrays(item) for item in obj)
    return hasattr(obj, "__array__")
