"""Keras objects, which belong to the framework that Keras computes with in this process.

d2ldev takes them if that is TensorFlow or JAX. On PyTorch, Keras moves all operands to one device,
which it chooses for the process. A model computes there, and not where it was placed.
"""

from __future__ import annotations

import sys
from abc import ABC
from typing import Any

_TAKEN = ("tensorflow", "jax")


def is_of_keras(cls: type) -> bool:
    """Return whether a class is a layer, an optimizer, a metric, a variable or a seed of Keras."""
    keras: Any = sys.modules.get("keras")
    if not hasattr(keras, "Optimizer"):  # it is not imported, or only in part
        return False
    kinds = keras.Layer, keras.Optimizer, keras.metrics.Metric
    return issubclass(cls, (*kinds, keras.random.SeedGenerator, keras.Variable))


def make_keras_kind(name: str) -> type:
    """Return a class of all objects of Keras, if it computes with the framework of this name.

    It recognizes them without importing Keras: before the import no such object exists.
    """

    class KerasObject(ABC):  # noqa: B024  # only ``isinstance`` uses it
        """Keras layers, models, optimizers, metrics, seed generators and variables."""

        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            return is_of_keras(other) and computes_with() == name

    return KerasObject


def is_refused(cls: type, name: str) -> bool:
    """Return whether a class is of Keras on the framework of this name, which is not taken."""
    return name not in _TAKEN and is_of_keras(cls) and computes_with() == name


def keras_elsewhere(obj: Any, name: str) -> tuple[str, str]:
    """Return why a Keras object does not belong to a framework, and how to change that.

    Args:
        obj: any object.
        name: the framework, as Keras calls it.

    Returns:
        A clause and a line for a message. The line is empty if another backend takes the object as
        it is. Both are empty for an object that is not Keras's, or that belongs to the framework.
    """
    if not is_of_keras(type(obj)):
        return "", ""
    other = computes_with()
    reason = f"Keras computes with {other} in this process"
    if other in _TAKEN:
        return ("", "") if name == other else (reason, "")
    return (
        f"{reason}, and d2ldev takes Keras objects on {' and '.join(_TAKEN)} alone",
        f"KERAS_BACKEND={_TAKEN[0]}, before Keras is imported, and D2LDEV_BACKEND={_TAKEN[0]}",
    )


def computes_with() -> str:
    """Return the framework that Keras computes with; Keras is imported."""
    name: str = sys.modules["keras"].config.backend()
    return name
