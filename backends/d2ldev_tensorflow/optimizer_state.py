"""What an optimizer of Keras' has learned, as a nesting, and back.

By the order of its variables: their names have those of layers in them, which count on from model
to model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from d2ldev.errors import describe
from d2ldev.interface import Backend


def state_of(optimizer: Any) -> dict[str, Any] | None:
    """Its class and its variables; None for what is no optimizer."""
    keras: Any = sys.modules.get("keras")
    if not hasattr(keras, "Optimizer") or not isinstance(optimizer, keras.Optimizer):
        return None
    variables = [variable._value for variable in optimizer.variables]
    return {"class": type(optimizer).__name__, "variables": variables}


def state_put(backend: Backend, optimizer: Any, saved: Any) -> Callable[[], None]:
    """What gives an optimizer a state, whose tensors are brought to its variables at once.

    Raises:
        ValueError: if the state is no such optimizer's.
    """
    current = state_of(optimizer)
    if current is None or not isinstance(saved, Mapping) or saved.keys() != current.keys():
        raise ValueError(f"{describe(saved)} is no state of an optimizer of Keras'")
    if saved["class"] != current["class"]:
        raise ValueError(f"its class: {current['class']}, {saved['class']} in the state")
    variables, values = current["variables"], saved["variables"]
    if not optimizer.built:
        raise ValueError(
            "it has not been built: call optimizer.build(model.trainable_variables) first"
        )
    forms = [[(tuple(x.shape), x.dtype.name) for x in each] for each in (variables, values)]
    if forms[0] != forms[1]:
        raise ValueError(f"its variables: {forms[0]}, {forms[1]} in the state")
    pairs = [
        (variable, backend.to(x, backend.device_of(variable)))
        for variable, x in zip(variables, values, strict=True)
    ]

    def put() -> None:
        for variable, value in pairs:
            backend._write(variable, value)

    return put
