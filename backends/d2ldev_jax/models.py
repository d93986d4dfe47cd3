"""Models: the arrays of ``flax.nnx`` modules, optimizers and variables.

A move works in place: a variable gets another array, and its owners still share the variable. Flax
takes longer to import than JAX. This module imports Flax only to make a model. Before the import no
object of Flax's classes exists.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from d2ldev import UnsupportedValueError
from d2ldev.framework import Models, NoTensor, Role, Slot, Tensor, import_optional
from d2ldev_jax import keras
from d2ldev_jax.keras import KerasObject

# Most attributes have these types, which hold no array.
_PLAIN = frozenset({bool, int, float, str, type(None)})
_WITHOUT_ARRAYS = (bool, int, float, str, np.dtype, type(jnp.float32))


class FlaxObject(ABC):  # noqa: B024  # for ``isinstance`` only, without subclasses
    """The objects of Flax: nnx's modules, optimizers, metrics, streams, variables; linen's modules.

    The first four are subclasses of ``Pytree``. A linen module holds its fields, and no parameters.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
        # During the import of Flax they do not exist yet.
        found = [getattr(nnx, name, None) for name in ("Pytree", "Variable")]
        found.append(getattr(linen, "Module", None))
        return issubclass(other, tuple(base for base in found if base is not None))


class JaxModels(Models):
    """Flax's ``nnx``, and Keras; parameter pytrees are containers, and need no members."""

    types = (FlaxObject, KerasObject)

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Any:
        nnx = import_optional("flax.nnx", "make an MLP", extra="jax")
        made: list[Any] = []
        for kernel, bias in layers:
            n_out, n_in = kernel.shape
            # Without memory: the layer draws no numbers, and makes no arrays on another device.
            linear = nnx.eval_shape(lambda i=n_in, o=n_out: nnx.Linear(i, o, rngs=nnx.Rngs(0)))
            linear.kernel, linear.bias = nnx.Param(kernel.T), nnx.Param(bias)
            made += [linear, getattr(jax.nn, activation)]
        return nnx.Sequential(*made[:-1])

    def members(self, obj: Any) -> Iterator[Slot]:
        if isinstance(obj, KerasObject):
            yield from keras.members(obj)
            return
        if _is_variable(obj):
            yield _slot_of(obj)
            return
        attributes = vars(obj)
        items: Iterable[tuple[Any, Any]] = attributes.items()
        is_of_linen = is_linen(obj)
        if is_of_linen:  # other attributes are Flax's own
            items = [(each.name, attributes.get(each.name)) for each in fields(obj)]
            scope = attributes.get("scope")
            if scope is None:
                problem = "are not in it, because init returns them"
                fix = "variables = net.init(jax.random.key(0), X); backend.summarize(variables)"
                yield Slot("parameters", NoTensor(problem, fix, is_kept_apart=True))
            elif scope.variables():
                problem = "are bound to it, where nothing can replace them"
                fix = "model, variables = model.unbind(), and place the variables"
                yield Slot("variables", NoTensor(problem, fix))
        nnx: Any = sys.modules.get("flax.nnx")
        # ``nnx.state`` has each array, in lists, tuples and dicts as well. A call may leave one.
        is_saved = not (is_of_linen or (nnx is not None and isinstance(obj, nnx.Module)))
        for key, value in items:
            cls = type(value)
            if cls in _PLAIN or (cls is FunctionType and _is_of_libraries(value)):
                continue
            if isinstance(value, _WITHOUT_ARRAYS):
                continue
            name = str(key)  # in flax 0.12.0 the attributes of an ``nnx.List`` are numbers
            if not name.startswith("_pytree__"):  # flax's own notes, without a public name
                role = Role.VARIABLE if _is_variable(value) else Role.BUFFER
                yield Slot(
                    name, value, partial(attributes.__setitem__, key), role, is_saved=is_saved
                )


def _is_of_libraries(function: FunctionType) -> bool:
    """Return whether a function is JAX's or Flax's own, as the initializers of a layer are."""
    name: str = function.__globals__.get("__name__", "")
    return name.startswith(("jax.", "flax."))


def _is_variable(obj: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # linen does not import it
    return nnx is not None and isinstance(obj, nnx.Variable)


def is_linen(model: Any) -> bool:
    """Return whether a model is a module of ``flax.linen``."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def value_of(variable: Any) -> Any:
    """Return the raw value of a variable, without the hooks that convert it."""
    # In flax 0.11 ``raw_value`` is the value. In 0.12 it warns, and there are two methods.
    get = getattr(type(variable), "get_raw_value", None)
    return object.__getattribute__(variable, "raw_value") if get is None else get(variable)


def _put_value(variable: Any, value: Any) -> None:
    put = getattr(type(variable), "set_raw_value", None)
    if put is None:
        object.__setattr__(variable, "raw_value", value)
    else:
        put(variable, value)


def _slot_of(variable: Any) -> Slot:
    value = value_of(variable)
    if sys.modules["flax.nnx.variablelib"].is_array_ref(value):
        raise UnsupportedValueError(
            f"place a {type(variable).__name__}",
            "it holds a jax.Ref, whose memory cannot be replaced, and other holders see the Ref",
            "make the model without: with nnx.use_refs(False): model = Model(...)",
        )
    if isinstance(value, jax.ShapeDtypeStruct):
        fix = "model = Model(rngs=nnx.Rngs(0)), outside of nnx.eval_shape"
        value = NoTensor("has a shape and no values", fix)
    # A subclass says what it holds: a parameter, statistics, random numbers. A bare variable says
    # nothing, and these two are for what a call leaves.
    nnx = sys.modules["flax.nnx"]
    is_left = type(variable) is nnx.Variable or isinstance(variable, (nnx.Intermediate, nnx.Cache))
    is_parameter = isinstance(variable, nnx.Param)
    return Slot(
        "value",
        value,
        partial(_put_value, variable),
        Role.PARAMETER if is_parameter else Role.BUFFER,
        is_trained=is_parameter,  # which of them an optimizer changes, it says itself
        is_saved=not is_left,
    )
