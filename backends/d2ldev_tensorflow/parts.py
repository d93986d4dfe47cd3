"""What Keras' and TensorFlow's objects keep, for ``place``.

Variables are moved in place: the same ``tf.Variable`` gets memory on another device
(``refill``), so that whoever holds one, an optimizer above all, still holds it.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import anonymous_name

from d2ldev.nesting.walk import register_container
from d2ldev.operations.placing import Part

# Of Keras: what a layer, a model or an optimizer is besides its variables. Most of it is in every
# object's ``__dict__``, which is read below; this is what only functional models have.
_OF_FUNCTIONAL_MODELS = frozenset(
    {
        *("_functional", "_nodes", "_nodes_by_depth", "_operations", "_operations_by_depth"),
        *("_inputs", "_inputs_struct", "_outputs", "_outputs_struct", "output_names"),
    }
)
_OF_MODULES = frozenset({"_name", "_name_scope", "_scope_name"})
# Functions that Keras has traced, with the memory that the variables had then.
_TRACED = ("train_function", "test_function", "predict_function")
# Most attributes are of these types, and hold no tensor.
_WITHOUT_TENSORS = (bool, int, float, str, type(None), tf.DType, tf.TensorShape)


class KerasObject(ABC):  # noqa: B024  # it asks, and has nothing to be made of
    """Keras' layers, models, optimizers, metrics, seed generators and variables.

    It knows them without importing Keras: of what is not imported there is no object.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return issubclass(other, _keras_classes())


def _keras_classes() -> tuple[type, ...]:
    keras: Any = sys.modules.get("keras")
    if not hasattr(keras, "Optimizer") or keras.config.backend() != "tensorflow":
        return ()
    return (
        *(keras.Layer, keras.Optimizer, keras.metrics.Metric),
        *(keras.random.SeedGenerator, keras.Variable),
    )


OBJECT_TYPES: tuple[type, ...] = (tf.Module, tf.random.Generator, KerasObject)


def parts_of(obj: Any) -> Iterator[Part]:
    """The parts of a module or of one of Keras' objects."""
    if not isinstance(obj, KerasObject):
        return _attributes(obj, _OF_MODULES, (), setattr)
    keras = sys.modules["keras"]
    if isinstance(obj, keras.Variable):
        return _variables([obj])
    if isinstance(obj, keras.random.SeedGenerator):
        return _variables([obj.state])
    if isinstance(obj, keras.Optimizer):
        return _optimizer_parts(obj)
    return _layer_parts(obj)


def _layer_parts(layer: Any) -> Iterator[Part]:
    yield from _variables(
        layer._variables
        if hasattr(layer, "_variables")  # a metric's
        else [*layer._trainable_variables, *layer._non_trainable_variables]
    )
    keras = sys.modules["keras"]
    # Past ``__setattr__``, which refuses a layer that is built some of what it has.
    yield from _attributes(layer, _own_attributes(), (keras.Variable,), _put_past_setattr)
    for kind in ("layers", "metrics", "seed_generators"):
        for index, value in enumerate(getattr(layer, f"_{kind}", ())):
            yield Part(f"{kind}.{index}", value, _stays)


def _optimizer_parts(optimizer: Any) -> Iterator[Part]:
    listed = {id(variable) for variable in optimizer._variables}
    keras = sys.modules["keras"]
    # Nadam's product, a plain attribute (``Nadam.build`` in Keras' ``src/optimizers/nadam.py``).
    # Where another optimizer builds it, nothing tracks attributes: ``LossScaleOptimizer.build`` is
    # under ``no_automatic_dependency_tracking``.
    others = [
        value
        for value in vars(optimizer).values()
        if isinstance(value, keras.Variable) and id(value) not in listed
    ]
    yield from _variables([*optimizer._variables, *others])
    # That of a loss-scaling optimizer, which wraps another.
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield Part("inner_optimizer", inner, _stays)
    # Those of one that has several, each for some of the variables.
    for index, inner in enumerate(getattr(optimizer, "_inner_optimizers", ())):
        yield Part(f"optimizers.{index}", inner, _stays)


def _variables(variables: list[Any]) -> Iterator[Part]:
    names: set[str] = set()
    for index, variable in enumerate(variables):
        # Keras makes some of them later, when they are first needed.
        if variable._value is not None and not _stays_on_the_host(variable._value):
            name = variable.name
            name = f"{name}_{index}" if name in names else name
            names.add(name)
            yield Part(name, variable._value, _stays)


def _attributes(
    obj: Any, own: frozenset[str], listed: tuple[type, ...], put: Callable[..., object]
) -> Iterator[Part]:
    """The tensors, variables and modules in an object's attributes, and in their lists."""
    skipped = (*_WITHOUT_TENSORS, *listed)
    for name, value in list(vars(obj).items()):
        if name in own or name.startswith("_self_") or isinstance(value, skipped):
            continue
        if not _stays_on_the_host(value):
            yield Part(name, value, partial(put, obj, name))


def _put_past_setattr(obj: Any, name: str, value: Any) -> None:
    vars(obj)[name] = value


def _stays(_: Any) -> None:
    """Variables and objects are never exchanged for others."""


def _stays_on_the_host(value: Any) -> bool:
    """Strings, and handles of tables and the like, which no device but the CPU can hold."""
    return isinstance(value, (tf.Tensor, tf.Variable)) and value.dtype in (
        *(tf.string, tf.resource, tf.variant),
    )


@lru_cache(1)
def _own_attributes() -> frozenset[str]:
    """What every layer and every model has in its ``__dict__``."""
    keras = sys.modules["keras"]
    own = {*vars(keras.Layer(name="any")), *vars(keras.Sequential(name="any"))}
    return frozenset(own | _OF_FUNCTIONAL_MODELS | {"build", "call"})


def is_variable(x: Any) -> bool:
    """Whether others may hold this very tensor."""
    return isinstance(x, tf.Variable)


def refill(x: Any, new: tf.Tensor) -> None:
    """Give a variable the memory of ``new``, and keep it who it is.

    TensorFlow has no call for that. A variable is a handle of memory, with a name and a shape: it
    gets another handle, made where ``new`` is, as ``tf.Variable`` makes its own.
    """
    old = x._handle
    with tf.device(new.backing_device):
        handle = tf.raw_ops.VarHandleOp(
            dtype=x.dtype, shape=x.shape, shared_name=anonymous_name(), debug_name=old._name
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=new)
    handle._handle_data = old._handle_data  # shape and dtype, for functions that are traced
    vars(handle).update(vars(old))  # its name, and whose it is
    x._handle = handle
    # A function that was traced before holds the old handle for ever. Without its memory it fails,
    # instead of computing with forgotten values; and the memory is free at once.
    tf.raw_ops.AssignVariableOp(resource=old, value=_nothing(x.dtype))


@lru_cache
def _nothing(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(np.zeros(0, dtype.as_numpy_dtype))


def finish(obj: Any) -> None:
    """Let go of the functions that were traced with the old memory; they are traced again."""
    attributes = vars(obj)
    for name in _TRACED:
        if attributes.get(name) is not None:
            attributes[name] = None
    for function in _functions_of(type(obj)):
        # Private; TensorFlow keeps there what it traced for each object.
        function._descriptor_cache.pop(obj, None)


@lru_cache(1024)
def _functions_of(cls: type) -> tuple[Any, ...]:
    """The methods of a class that are ``tf.function``s."""
    return tuple(
        value
        for base in cls.__mro__
        for value in vars(base).values()
        if isinstance(value, tf.types.experimental.PolymorphicFunction)
    )


def register_containers() -> None:
    """Tensors of several parts, and the dicts and tuples in which a ``tf.Module`` keeps others."""
    for cls in (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices):
        register_container(
            cls,
            lambda x: tf.nest.flatten(x, expand_composites=True),
            lambda old, new: tf.nest.pack_sequence_as(old, new, expand_composites=True),
        )
    module = tf.Module()
    module.mapping, module.pair = {}, ({},)
    register_container(
        type(module.mapping),
        Mapping.values,
        lambda old, new: type(old)(dict(zip(old, new, strict=True))),
    )
    register_container(type(module.pair), list, lambda old, new: type(old)(tuple(new)))
