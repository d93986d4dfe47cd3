"""Where Keras' layers and optimizers compute: where they were placed.

TensorFlow runs an operation on its default device, wherever the operands are, unless it is in a
scope. Each object that was placed gets the scope of its device around its own ``call`` and
``build``, on the object itself, as Keras wraps ``build`` in ``Layer.__new__``. So a model that is
not built yet makes its variables where it was placed. Keras' classes are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import tensorflow as tf

from d2ldev_tensorflow.parts import KerasObject


class InScope:
    """A method that runs in the scope of a device.

    Args:
        method: bound to its object.
        native: what ``tf.device`` takes.
    """

    def __init__(self, method: Callable[..., Any], native: str) -> None:
        # Keras looks at a method's signature and at its marks.
        update_wrapper(self, method)
        self._method = method
        self.native = native

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the method."""
        with tf.device(self.native):
            return self._method(*arguments, **named)


def compute_at(obj: Any, native: str) -> None:
    """Let a layer or an optimizer build and compute on a device from now on."""
    if not isinstance(obj, KerasObject):
        return
    keras = sys.modules["keras"]
    if isinstance(obj, keras.Layer):
        names = ("build", "call")
    elif isinstance(obj, keras.Optimizer):
        names = ("build", "apply")
    else:
        return
    for name in names:
        method = getattr(obj, name)
        if isinstance(method, InScope):
            method.native = native
        else:
            # Past ``__setattr__``, which looks for state to track.
            vars(obj)[name] = InScope(method, native)
