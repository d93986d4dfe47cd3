"""Keras' objects, which are of the framework that Keras computes with in this process."""

from __future__ import annotations

import sys
from typing import Any


def keras_elsewhere(obj: Any, name: str) -> tuple[str, str] | None:
    """Return why one of Keras' objects is not one of a framework's, and what makes it one.

    Args:
        obj: any object.
        name: the framework, as Keras calls it.

    Returns:
        A clause and a line for a message; None for what is not of Keras, or is of the framework.
    """
    keras: Any = sys.modules.get("keras")
    if not hasattr(keras, "Optimizer"):  # it is not imported, or only in part
        return None
    kinds = keras.Layer, keras.Optimizer, keras.metrics.Metric
    if not isinstance(obj, (*kinds, keras.random.SeedGenerator, keras.Variable)):
        return None
    other = keras.config.backend()
    if other == name:
        return None
    reason = f"Keras computes with {other} in this process"
    return reason, f"KERAS_BACKEND={name}, before Keras is imported"
