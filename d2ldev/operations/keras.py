"""Copies of Keras models, and the framework that computes a loss of Keras."""

from __future__ import annotations

import sys
from collections import Counter
from types import FunctionType
from typing import Any

from d2ldev.contract.parallel import twin_refusal
from d2ldev.errors import text_of
from d2ldev.nesting.keras import computes_with

_COPY_FIX = (
    "for each device: copy = make(), your function that makes such a model; "
    "copy.set_weights(model.get_weights()); backend.place(copy, device)"
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
    return computes_with() if any(str(each).partition(".")[0] == "keras" for each in where) else ""


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
