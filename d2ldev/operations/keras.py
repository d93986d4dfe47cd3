"""Keras objects, which belong to the framework that Keras computes with in this process.

d2ldev takes them if that is TensorFlow or JAX. On PyTorch, Keras moves all operands to one device,
which it chooses for the process. A model computes there, and not where it was placed.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections import Counter
from types import FunctionType
from typing import Any

from d2ldev.contract.parallel import twin_refusal
from d2ldev.errors import text_of

_TAKEN = ("tensorflow", "jax")
_COPY_FIX = (
    "for each device: copy = make(), your function that makes such a model; "
    "copy.set_weights(model.get_weights()); backend.place(copy, device)"
)


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
            return is_of_keras(other) and _backend() == name

    return KerasObject


def is_refused(cls: type, name: str) -> bool:
    """Return whether a class is of Keras on the framework of this name, which is not taken."""
    return name not in _TAKEN and is_of_keras(cls) and _backend() == name


def keras_elsewhere(obj: Any, name: str) -> tuple[str, str] | None:
    """Return why a Keras object does not belong to a framework, and how to change that.

    Args:
        obj: any object.
        name: the framework, as Keras calls it.

    Returns:
        A clause and a line for a message. The line is empty if another backend takes the object as
        it is. None for an object that is not Keras's, or that belongs to the framework.
    """
    if not is_of_keras(type(obj)):
        return None
    other = _backend()
    reason = f"Keras computes with {other} in this process"
    if other in _TAKEN:
        return None if name == other else (reason, "")
    return (
        f"{reason}, and d2ldev takes Keras objects on {' and '.join(_TAKEN)} alone",
        f"KERAS_BACKEND={_TAKEN[0]}, before Keras is imported, and D2LDEV_BACKEND={_TAKEN[0]}",
    )


def clone_keras_model(model: Any) -> Any:
    """Return a layer or model like another one, by its ``get_config()``, with the same values.

    Raises:
        UnsupportedValueError: if Keras cannot make it, or makes it with other variables.
    """
    made = None
    try:
        made = _clone(model)
        if model.built and not made.built:
            made.build_from_config(model.get_build_config())
        for new, old in zip(made.variables, model.variables, strict=True):
            new.assign(old.value)
            if new.trainable != old.trainable:  # it was frozen alone, without its layer
                new.trainable = old.trainable
    except Exception as error:  # a user's get_config() may raise anything
        # The second sentence is often Keras's own remedy. After it comes the whole configuration.
        sentences = " ".join(text_of(error).split()).split(". ")
        problem = _tell_difference(made, model) or ". ".join(sentences[:2])
        told = f"Keras makes a copy from its get_config(), which failed: {problem}"
        raise twin_refusal(model, told, _COPY_FIX) from error
    return made


def _clone(model: Any) -> Any:
    try:
        return type(model).from_config(model.get_config())
    except Exception:  # such as a layer whose class is not registered with Keras
        keras = sys.modules["keras"]
        if not isinstance(model, keras.Model):
            raise
        return keras.models.clone_model(model)


def backend_of_function(function: Any) -> str:
    """Return the framework that Keras computes a loss or a metric with; empty if it is not Keras's.

    Args:
        function: any loss or metric. A user's function that calls Keras is not Keras's.
    """
    if "keras" not in sys.modules:
        return ""
    where = [function.__module__] if isinstance(function, FunctionType) else []
    where += [cls.__module__ for cls in type(function).__mro__]
    return _backend() if any(str(each).partition(".")[0] == "keras" for each in where) else ""


def _tell_difference(made: Any, model: Any) -> str:
    """Return the first layer whose copy has other variables; empty if there is none."""
    if made is None or len(made.variables) == len(model.variables):
        return ""
    for new, old in zip(getattr(made, "layers", ()), getattr(model, "layers", ()), strict=False):
        if told := _tell_difference(new, old):
            return told
    theirs, mine = (Counter(x.name for x in each.variables) for each in (model, made))
    lacking, besides = ", ".join((theirs - mine).elements()), ", ".join((mine - theirs).elements())
    what = f"lacks {lacking}" if lacking else f"has {besides} besides"
    return f"the copy of {model.name} {what}. Was it changed after it was made?"


def _backend() -> str:
    name: str = sys.modules["keras"].config.backend()
    return name
