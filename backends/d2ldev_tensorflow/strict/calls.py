"""What a user called, and where its operands are.

Many of TensorFlow's and Keras' functions make tensors on their way: a window, a first state, the
tensor of a list, zeros for a gradient. None of these is the user's. What the user wrote is the
outermost call of TensorFlow or Keras on the stack; where its operands are on one device, whatever
it makes belongs there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

import tensorflow as tf

# Keras calls layers that were placed through ``scopes``, and walks nestings with ``optree``.
_LIBRARIES = ("tensorflow.", "keras.", "optree.", "d2ldev_tensorflow.models")
_OWN = "d2ldev_tensorflow.strict"
# How many values of a call are looked at; a batch of thousands of tensors is on one device.
_ENOUGH = 256
_HAS_REST, _HAS_KEYWORDS = 0x04, 0x08  # a code's flags for *args and **kwargs
# Where a variable is has no bearing on its gradient, which is computed where the loss was.
_NO_OPERANDS = ("sources",)


class _InLibraries(dict[str, bool]):
    """Whether a module is TensorFlow's or Keras'."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = name.startswith(_LIBRARIES)
        return found


_in_libraries = _InLibraries()


class Call:
    """The outermost call of TensorFlow or Keras that is running.

    Args:
        place_of: TensorFlow's name of the device where an operand is, None for what is none.
    """

    def __init__(self, place_of: Callable[[Any], str | None]) -> None:
        self._place_of = place_of
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
            frame = frame.f_back
        found = None
        while frame is not None and _in_libraries[frame.f_globals.get("__name__", "")]:
            found, frame = frame, frame.f_back
        self._arguments = [] if found is None else list(_arguments_of(found))

    def home(self) -> str | None:
        """The device of its first operand; None if it has none."""
        return next(self._places(), None)

    def only_home(self, is_function: bool) -> str | None:
        """The one device of all of its operands; None if it has none, or they are on several.

        Args:
            is_function: whether it is the call of a function that refuses its operands. These are
                not among the arguments of a ``tf.function``, nor of ``tf.vectorized_map``, which
                makes one of the user's function: what that one closes over is the user's.
        """
        if any(isinstance(each, tf.types.experimental.Callable) for each in self._arguments):
            return None
        if is_function and any(map(_is_function_of_the_user, self._arguments)):
            return None
        places = set(islice(self._places(), _ENOUGH))
        return places.pop() if len(places) == 1 else None

    def _places(self) -> Iterator[str]:
        for value in _leaves(self._arguments):
            there = self._place_of(value)
            if there is not None:
                yield there
        for value in _state_of(self._arguments):
            there = self._place_of(value)
            if there is not None:
                yield there


def _arguments_of(frame: FrameType) -> Iterator[Any]:
    code, local = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & _HAS_REST) + bool(code.co_flags & _HAS_KEYWORDS)
    for name in code.co_varnames[:count]:
        if name not in _NO_OPERANDS and name in local:
            value = local[name]
            # Most functions are wrapped in one that takes anything.
            if isinstance(value, (tuple, dict)):
                yield from value.values() if isinstance(value, dict) else value
            else:
                yield value


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        elif isinstance(value, tf.__internal__.CompositeTensor):
            # A sparse or a ragged tensor, a linear operator; a variable has its handle.
            yield from tf.nest.flatten(value, expand_composites=True)
        else:
            yield value


def _is_function_of_the_user(value: Any) -> bool:
    if not callable(value) or isinstance(value, (type, *_holders())):
        return False
    return not _in_libraries[type(value).__module__]


def _state_of(arguments: Iterable[Any]) -> Iterator[Any]:
    """The variables of the layers, optimizers and modules among the arguments of a call."""
    holders = _holders()
    for value in arguments:
        if isinstance(value, holders):
            with suppress(AttributeError):  # in its own ``__init__`` it is not complete
                yield from list(value.variables)


def _holders() -> tuple[type, ...]:
    """What has variables of its own."""
    keras = sys.modules.get("keras")
    return (
        (tf.Module,) if keras is None else (tf.Module, keras.Layer, keras.Optimizer, keras.Metric)
    )
