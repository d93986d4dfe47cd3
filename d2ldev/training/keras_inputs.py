"""The inputs of Keras models, on any framework that Keras computes with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from d2ldev.contract.training import Signature
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.training.functions import read_signature


def read_keras_signature(model: Any) -> Signature:
    """Return the inputs of a Keras layer or model."""
    if not _is_functional(model):
        is_keras_own = getattr(model.call, "__module__", "").startswith("keras.")
        return read_signature(model.call, switches=("training", "mask")[: 2 if is_keras_own else 1])
    names = _list_inputs(model)
    optional = {each.name for each in model.layers if getattr(each, "optional", False)}
    return Signature(names, frozenset(names) - optional, len(names))


def join_keras_inputs(
    model: Any, inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the operands of a model's call. A functional model takes its inputs together.

    Args:
        model: any model.
        inputs: those without names.
        named: those with names. One that is optional may be missing.
    """
    if not _is_functional(model):
        return inputs, named
    names, is_mapping = _list_inputs(model), _takes_mapping(model)
    if named:
        whole = {name: named.get(name) for name in names}
        inputs = (whole,) if is_mapping else tuple(whole.values())
    is_one = len(inputs) == 1 and (len(names) == 1 or isinstance(inputs[0], Mapping))
    if is_mapping and not is_one:
        fix = ", ".join(f"{name!r}: ..." for name in names)
        raise UnsupportedValueError(
            f"call {describe(model)}",
            f"its inputs have names, and the batch has {len(inputs)} inputs without names",
            f"yield {{{fix}, 'y': y}}, or ({{{fix}}}, y), from the data",
        )
    return (inputs[0] if len(inputs) == 1 else list(inputs),), {}


def _is_functional(model: Any) -> bool:
    """Return whether a model knows its inputs: a functional one, or a ``Sequential``."""
    keras: Any = sys.modules.get("keras")
    return isinstance(model, getattr(keras, "Model", ())) and hasattr(model, "inputs")


def _list_inputs(model: Any) -> tuple[str, ...]:
    """Return the names of a functional model's inputs, in order."""
    return tuple(model.input) if _takes_mapping(model) else tuple(x.name for x in model.inputs)


def _takes_mapping(model: Any) -> bool:
    # A Sequential has only ``inputs``.
    return isinstance(getattr(model, "input", None), Mapping)
