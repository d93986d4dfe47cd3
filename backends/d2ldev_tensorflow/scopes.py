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

# Private, but where ``tf.device`` itself says which device it is.
from tensorflow.python.eager.context import context
from tensorflow.python.framework.device_spec import DeviceSpecV2

from d2ldev_tensorflow.parts import KerasObject


class _Specifications(dict[str, Any]):
    """TensorFlow's parsed device, with the full name, for what ``tf.device`` takes."""

    def __missing__(self, native: str) -> Any:
        whole = DeviceSpecV2.from_string(context()._context_devices[0])
        self[native] = found = whole.make_merged_spec(DeviceSpecV2.from_string(native))
        _of_defaults.add(id(found))
        return found


_specifications = _Specifications()
_of_defaults: set[int] = set()


class DefaultDevice:
    """A scope that says where tensors are made.

    It is ``tf.device``, but for ``strict()``: an operation whose operands are elsewhere runs where
    they are. A ``tf.device`` is the user's word on where it runs.

    Args:
        native: what ``tf.device`` takes.
    """

    def __init__(self, native: str) -> None:
        self._native = native
        self._scope = tf.device(native)
        # What ``tf.device`` has set, of which nobody else's is told apart.
        self._theirs: Any = None

    def __enter__(self) -> None:
        self._scope.__enter__()
        if tf.executing_eagerly():
            current = context()
            self._theirs = current.device_spec
            current._set_device(current.device_name, _specifications[self._native])

    def __exit__(self, *error: object) -> None:
        current = context()
        if self._theirs is not None and current.device_spec is _specifications[self._native]:
            current._set_device(current.device_name, self._theirs)
        self._scope.__exit__(*error)


def is_default_only(specification: Any) -> bool:
    """Whether the innermost scope is a ``DefaultDevice``, by TensorFlow's parsed device."""
    return id(specification) in _of_defaults


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
        with DefaultDevice(self.native):
            return self._method(*arguments, **named)


class BuildInScope(InScope):
    """A ``build`` that makes its variables on a device, also those that Keras makes later.

    Where it only traces a model to find the shapes, it puts off making the variables until it has
    left all scopes but its own.
    """

    def __init__(self, owner: Any, native: str) -> None:
        super().__init__(owner.build, native)
        self._owner = owner

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Build, and see to the variables that are put off."""
        built = super().__call__(*arguments, **named)
        for variable in self._owner.variables:
            later = variable._deferred_initialize
            if variable._value is None and not isinstance(later, InScope):
                vars(variable)["_deferred_initialize"] = InScope(later, self.native)
        return built


def compute_at(obj: Any, native: str) -> None:
    """Let a layer or an optimizer build and compute on a device from now on."""
    if not isinstance(obj, KerasObject):
        return
    keras = sys.modules["keras"]
    if not isinstance(obj, (keras.Layer, keras.Optimizer)):
        return
    compute = "call" if isinstance(obj, keras.Layer) else "apply"
    if isinstance(obj.build, InScope):
        obj.build.native = getattr(obj, compute).native = native
    else:
        # Past ``__setattr__``, which looks for state to track.
        vars(obj)["build"] = BuildInScope(obj, native)
        vars(obj)[compute] = InScope(getattr(obj, compute), native)
