"""Where the operands are of what a user called.

Many of TensorFlow's and Keras' functions make tensors on their way: a window, a first state, the
tensor of a list. In these an operation has no operands of its own; it belongs where those of the
call are that the user wrote. The call is found on the stack, in its outermost frame.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from types import CodeType, FrameType
from typing import Any

_LIBRARIES = ("tensorflow.", "keras.")
# How many values of a call are looked at; a batch of thousands of tensors is on one device.
_ENOUGH = 64


class _InLibraries(dict[CodeType, bool]):
    """Whether code is TensorFlow's or Keras'; remembered, for a stack is deep."""

    def of(self, frame: FrameType) -> bool:
        code = frame.f_code
        found = self.get(code)
        if found is None:
            found = str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES)
            self[code] = found
        return found


_in_libraries = _InLibraries()


def outermost_call(frame: FrameType | None) -> FrameType | None:
    """The frame of the function of TensorFlow or Keras that a user called."""
    found = None
    while frame is not None and _in_libraries.of(frame):
        found, frame = frame, frame.f_back
    return found


def home_of_call(place_of: Callable[[Any], str | None], depth: int = 2) -> str | None:
    """The device of the first operand of the call that runs; None if it has none.

    Args:
        place_of: the name of a value's device; None for what is nowhere in particular.
        depth: how many frames lie between this function and TensorFlow's.
    """
    frame = outermost_call(sys._getframe(depth))
    if frame is None:
        return None
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    local = frame.f_locals
    arguments = [local[name] for name in code.co_varnames[:count] if name in local]
    # Where they are not on one device, an operation of the call raises, if it uses them together.
    for value in chain(islice(_leaves(arguments), _ENOUGH), _state_of(arguments)):
        there = place_of(value)
        if there is not None:
            return there
    return None


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value


def _state_of(arguments: Iterable[Any]) -> Iterator[Any]:
    """The variables of the layers, models and optimizers among the arguments of a call."""
    keras = sys.modules.get("keras")
    if keras is not None:
        for value in _leaves(arguments):
            if isinstance(value, (keras.Layer, keras.Optimizer)):
                yield from value.variables
