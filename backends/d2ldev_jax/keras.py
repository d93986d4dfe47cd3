"""Keras objects where Keras computes with JAX: their variables, by public names of Keras alone.

A variable gets another array by ``assign``. Its name in files is its path in the model. Keras
counts the layers of a process, so the numbers in names are counted again within each object.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from d2ldev.framework import NoTensor, Role, Slot, make_keras_kind

_NUMBER = re.compile(r"_\d+$")


KerasObject = make_keras_kind("jax")


def is_layer(obj: Any) -> bool:
    """Return whether an object is a layer or a model of Keras on JAX."""
    return isinstance(obj, KerasObject) and isinstance(obj, sys.modules["keras"].Layer)


def list_layers(model: Any) -> list[Any]:
    """Return a layer or a model, and all layers in it: in public, only a model lists its own."""
    found: list[Any] = []
    left, seen = [model], set()
    while left:
        each = left.pop()
        if id(each) in seen or not (is_layer(each) or isinstance(each, (list, tuple, dict))):
            continue
        seen.add(id(each))
        if is_layer(each):
            found.append(each)
            each = vars(each)
        left += each.values() if isinstance(each, dict) else each
    return found


def members(obj: Any) -> Iterator[Slot]:
    """Yield the values of an object's variables."""
    trained: set[int] = set()
    if is_layer(obj):
        if not obj.built and not obj.variables:
            fix = "model(X), with one batch, or a keras.Input as its first layer"
            yield Slot("variables", NoTensor("are not made before it is built", fix))
        trained = {id(x) for x in obj.trainable_variables}
    for name, variable in name_variables(obj):
        is_trained = id(variable) in trained
        role = Role.PARAMETER if is_trained else Role.BUFFER
        yield Slot(name, variable.value, variable.assign, role, is_trained)


def name_variables(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of an object with their names.

    The variables of an optimizer have numbers for names, as in the files of Keras.
    """
    keras: Any = sys.modules["keras"]
    if isinstance(obj, keras.Variable):
        yield "value", obj
        return
    if isinstance(obj, keras.random.SeedGenerator):
        yield "state", obj.state
        return
    if isinstance(obj, keras.Optimizer):
        for index, variable in enumerate(obj.variables):
            yield str(index), variable
        return
    counts: Counter[tuple[str, ...]] = Counter()
    known: dict[tuple[str, ...], str] = {}
    names: set[str] = set()
    for index, variable in enumerate(obj.variables):
        *parts, last = variable.path.split("/")
        made = []
        for end in range(1, len(parts) + 1):
            path = tuple(parts[:end])
            if path not in known:
                stem = _NUMBER.sub("", path[-1])
                number = counts[*path[:-1], stem]
                counts[*path[:-1], stem] += 1
                known[path] = f"{stem}_{number}" if number else stem
            made.append(known[path])
        # The object's own name, and those around it, differ between models.
        inside = parts.index(obj.name) + 1 if obj.name in parts else 0
        name = ".".join([*made[inside:], last])
        name = f"{name}_{index}" if name in names else name
        names.add(name)
        yield name, variable
