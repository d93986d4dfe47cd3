"""Models: the contents of Keras's and TensorFlow's objects, and the device where they compute.

Variables move in place: the same ``tf.Variable`` gets memory on another device. So references to
it stay valid, above all those of an optimizer.

Outside of a scope TensorFlow runs an operation on its default device, wherever the operands are. So
``place`` wraps ``call`` and ``build`` of the object in the scope of the device. It wraps them on
the object, as Keras wraps ``build`` in ``Layer.__new__``. A model that is not built yet then makes
its variables where it was placed. Keras's classes stay unchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial, update_wrapper
from operator import itemgetter
from typing import Any

import numpy as np
import tensorflow as tf

# Private: a new ``tf.Variable``, which has such a name as well, takes seven times as long.
from tensorflow.python.eager.context import anonymous_name

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import Models, NoTensor, Role, Slot, Tensor, make_keras_kind
from d2ldev_tensorflow.devices import OF_THE_HOST, DefaultDevice, TensorFlowDevices, place_of
from d2ldev_tensorflow.strict import allow_mixing

OF_PROGRAMS = "_d2ldev_programs"
"""The attribute of a model that holds its traced functions for training."""
_OF_MODULES = frozenset({"_name", "_name_scope", "_scope_name", OF_PROGRAMS})
# The prefix of the attributes in which TensorFlow keeps the other attributes again.
_OF_TRACKING = "_self_"
_FLAT = str.maketrans("/:", "__")
_WITHOUT_NAME = re.compile(r"^variable_\d+$")
# Functions that Keras has traced. They keep the memory that the variables had.
_TRACED = ("train_function", "test_function", "predict_function")
# The methods that make these functions.
_MAKERS = tuple(f"make_{name}" for name in _TRACED)
# ``compile`` makes these metrics and mean losses for ``fit``. No list of the model has them.
_COMPILED = ("_loss_tracker", "_compile_metrics", "_compile_loss")
KerasObject = make_keras_kind("tensorflow")
_PLAIN = frozenset({bool, int, float, str, type(None)})
# Most attributes have one of these types, and hold no tensor that moves. The last one is a table of
# a layer that looks up text.
_WITHOUT_TENSORS = (
    *(bool, int, float, str, type(None), tf.DType, tf.TensorShape),
    tf.saved_model.experimental.TrackableResource,
)


def is_of_keras(x: Any, name: str) -> bool:
    """Return whether an object is an instance of a Keras class, without importing Keras."""
    return isinstance(x, getattr(sys.modules.get("keras"), name, ()))


def is_of_text(layer: Any) -> bool:
    """Return whether a Keras layer looks up text or keys in a table on the host."""
    names = "StringLookup", "IntegerLookup", "TextVectorization", "Hashing", "HashedCrossing"
    keras = sys.modules.get("keras")
    kinds = (getattr(getattr(keras, "layers", None), name, ()) for name in names)
    return any(isinstance(layer, kind) for kind in kinds)


def find_learned_beside_variables(model: Any) -> list[tuple[Any, str]]:
    """Return layers with a vocabulary or limits outside of variables, each with the attribute.

    ``adapt`` or ``set_vocabulary`` has set them. A constructor's vocabulary is in the program.
    """
    layers = list_layers(model)
    # The vocabulary of a ``TextVectorization`` is in a layer inside it.
    lookups = {id(layer): getattr(layer, "_lookup_layer", layer) for layer in layers}
    inner = {id(lookup) for key, lookup in lookups.items() if id(lookup) != key}
    found = []
    for layer in layers:
        lookup = lookups[id(layer)]
        if id(layer) in inner:
            continue
        if hasattr(lookup, "get_vocabulary") and lookup.input_vocabulary is None:
            found.append((layer, "vocabulary"))
        elif getattr(layer, "bin_boundaries", None) is not None and layer.summary is not None:
            found.append((layer, "bin_boundaries"))
    return found


class TensorFlowModels(Models):
    """Keras objects, modules and generators."""

    types = (tf.Module, tf.random.Generator, KerasObject)

    def __init__(self, devices: TensorFlowDevices) -> None:
        self._devices = devices

    # -- making -----------------------------------------------------------------------------------

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Any:
        import keras  # imported late, because computing without Keras does not need it

        if keras.config.backend() != "tensorflow":
            raise UnsupportedValueError(
                "make an MLP of Keras layers",
                f"Keras computes with {keras.config.backend()} in this process",
                "set KERAS_BACKEND=tensorflow before Keras is imported, or unset it",
            )
        dense = [
            keras.layers.Dense(
                bias.shape[0],
                activation=activation if i < len(layers) - 1 else None,
                # Clones of the model draw from it. With a seed it uses no random state.
                kernel_initializer=keras.initializers.VarianceScaling(
                    1 / 3, "fan_in", "uniform", seed=i
                ),
                name=f"dense_{i}",
            )
            for i, (_, bias) in enumerate(layers)
        ]
        first = layers[0][0]
        with tf.device(place_of(first)):
            net = keras.Sequential([keras.Input((first.shape[1],)), *dense], name="mlp")
            for layer, (kernel, bias) in zip(dense, layers, strict=True):
                layer.kernel.assign(tf.transpose(kernel))
                layer.bias.assign(bias)
        return net

    # -- placing ----------------------------------------------------------------------------------

    def members(self, obj: Any) -> Iterator[Slot]:
        if not isinstance(obj, KerasObject):
            return _members_of_module(obj)
        keras = sys.modules["keras"]
        if isinstance(obj, keras.Variable):
            return _variables([obj])
        if isinstance(obj, keras.random.SeedGenerator):
            return _variables([obj.state])
        if isinstance(obj, keras.Optimizer):
            return _members_of_optimizer(obj)
        return _members_of_layer(obj)

    def find_unsaved(self, model: Any) -> Sequence[str]:
        return [f"{layer.name}.{what}" for layer, what in find_learned_beside_variables(model)]

    def find_refill(self, x: Tensor) -> Callable[[Tensor], object] | None:
        return partial(_refill, x) if isinstance(x, tf.Variable) else None

    def plan_writes(
        self, values: Sequence[tuple[Tensor, Tensor, bool]]
    ) -> list[Callable[[], object] | None]:
        return [
            partial(assign, x, new) if isinstance(x, tf.Variable) else None for x, new, _ in values
        ]

    def finish(self, obj: Any) -> None:
        # Functions that were traced with the old memory are traced again.
        attributes = vars(obj)
        for name in _TRACED:
            if attributes.get(name) is not None:
                attributes[name] = None
        for function in attributes.values():
            if isinstance(function, tf.types.experimental.PolymorphicFunction):
                # Private. It returns the function, for all holders, to its state before a call.
                vars(function).update(vars(function._clone(None)))
        cls: type = type(obj)
        for function in _functions_of(cls):
            # Private. TensorFlow keeps the traces for each object there.
            function._descriptor_cache.pop(obj, None)

    def place_context(self, device: Device) -> AbstractContextManager[Any]:
        # Move variables at once, also while a function is being traced.
        return tf.init_scope()

    def settle(self, obj: Any, device: Device) -> None:
        is_computing = is_of_keras(obj, "Layer") or is_of_keras(obj, "Optimizer")
        if is_computing and self._devices.count():
            compute_at(obj, self._devices.native(device))


# -- contents of objects --------------------------------------------------------------------------


def _members_of_module(module: Any) -> Iterator[Slot]:
    """Yield what a ``tf.Module`` or a generator keeps."""
    for slot in _attributes(module, _OF_MODULES, (), partial(setattr, module)):
        # A variable in a list or a dict is a variable of the module, too.
        for name, x in _inside(slot.name, slot.value):
            if isinstance(x, tf.Variable):
                role = Role.PARAMETER if x.trainable else Role.BUFFER
                yield Slot(name, x, role=role, is_trained=x.trainable)
        if not isinstance(slot.value, tf.Variable):
            yield slot


def _members_of_layer(layer: Any) -> Iterator[Slot]:
    keras = sys.modules["keras"]
    # A metric has no parameters. A frozen one stays in the list of those that can be trained.
    parameters = {id(x) for x in list_parameters(layer)} if isinstance(layer, keras.Layer) else ()
    for name, variable in _name_variables(_list_variables(layer)):
        is_parameter = id(variable) in parameters
        role = Role.PARAMETER if is_parameter else Role.BUFFER
        is_trained = is_parameter and layer.trainable and variable.trainable
        yield Slot(name, value_of(variable), role=role, is_trained=is_trained)
    if isinstance(layer, keras.Model) and not layer.built:
        lacking = NoTensor(
            "are not made before it is built", "model(X), with one batch", is_made_there=True
        )
        yield Slot("variables", lacking)
    # Not through ``__setattr__``, which refuses some attributes of a built layer.
    put = vars(layer).__setitem__
    yield from _attributes(layer, _own_attributes(), (keras.Variable,), put)
    for kind in ("layers", "metrics", "seed_generators"):
        for index, value in enumerate(getattr(layer, f"_{kind}", ())):
            yield Slot(f"{kind}.{index}", value)
    if vars(layer).get("compiled"):
        for index, each in enumerate(_list_compiled_variables(layer)):
            name = f"compiled.{index}.{each.path.translate(_FLAT)}"
            yield Slot(name, value_of(each), role=Role.WORKING)


def value_of(variable: Any) -> Any:
    """Return TensorFlow's own variable in one of Keras; None before it is made.

    The public ``value`` would compute the initial value then, which draws random numbers.
    """
    return getattr(variable, "_value", variable)


def set_value(variable: Any, value: Any) -> None:
    """Let one of Keras's variables hold another variable of TensorFlow."""
    variable._value = value  # private: the public ``assign`` would only write into the present one


def list_layers(model: Any) -> list[Any]:
    """Return a Keras layer and all layers in it; [] for any other object."""
    # In public, only a model lists its layers, and without the layers inside them.
    return list(model._flatten_layers()) if is_of_keras(model, "Layer") else []


def list_parameters(layer: Any) -> list[Any]:
    """Return a layer's own variables that can be trained, also where they are frozen."""
    return list(layer._trainable_variables)  # the public list includes those of inner layers


def list_statistics(layer: Any) -> list[Any]:
    """Return a layer's own variables that are never trained."""
    return list(layer._non_trainable_variables)  # as above


def _list_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer or a metric, without those of inner layers."""
    if hasattr(layer, "_variables"):  # a metric has this list
        return list(layer._variables)
    return [*list_parameters(layer), *list_statistics(layer)]


def _list_compiled_variables(model: Any) -> list[Any]:
    """Return the variables of a compiled model's metrics and mean losses; [] for a layer."""
    holders = [getattr(model, name, None) for name in _COMPILED]
    # Metrics that the user has made. Before the first batch of ``fit`` they are only here.
    for name in ("_user_metrics", "_user_weighted_metrics"):
        given = getattr(getattr(model, "_compile_metrics", None), name, None)
        if given is not None:
            holders += [each for each in tf.nest.flatten(given) if hasattr(each, "update_state")]
    found = [variable for each in holders if each is not None for variable in each.variables]
    made = {id(variable): variable for variable in found if value_of(variable) is not None}
    return list(made.values())


def own_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, without those of the optimizers that it wraps."""
    return _own_variables(optimizer, _attributes_of(optimizer))


def _own_variables(optimizer: Any, attributes: Sequence[tuple[str, Any]]) -> list[Any]:
    variable = sys.modules["keras"].Variable
    # Nadam keeps a product in a plain attribute, and no list has it (``Nadam.build`` in
    # Keras's ``src/optimizers/nadam.py``). Keras does not track attributes where another optimizer
    # builds one: ``LossScaleOptimizer.build`` has ``no_automatic_dependency_tracking``.
    kept = [x for _, x in attributes if isinstance(x, variable)]
    return list({id(x): x for x in [*optimizer._variables, *kept]}.values())


def _attributes_of(optimizer: Any) -> list[tuple[str, Any]]:
    """Return an optimizer's attributes without plain values."""
    return [
        (name, value)
        for name, value in vars(optimizer).items()
        if type(value) not in _PLAIN and not name.startswith(_OF_TRACKING)
    ]


def _members_of_optimizer(optimizer: Any) -> Iterator[Slot]:
    attributes = _attributes_of(optimizer)
    variables = _own_variables(optimizer, attributes)
    numbers = _number_paths(optimizer)
    for slot in _variables(variables):
        found = _find_slot(slot.name, numbers)
        yield slot._replace(name=".".join(map(str, found))) if found else slot
    unlisted = _find_unlisted(optimizer, attributes, variables)
    inner = [*_list_wrapped(optimizer), *_inner_optimizers(unlisted)]
    for name, each in inner:
        yield Slot(name, each)
    yield from _members_of_unlisted(optimizer, unlisted, variables, [each for _, each in inner])


def find_unlisted_attributes(optimizer: Any) -> Iterator[Slot]:
    """Yield the attributes with tensors, layers or variables that Keras does not list.

    Keras lists its own variables, and those in attributes, their lists and their dicts.
    """
    attributes = _attributes_of(optimizer)
    variables = _own_variables(optimizer, attributes)
    unlisted = _find_unlisted(optimizer, attributes, variables)
    inner = [x for _, x in (*_list_wrapped(optimizer), *_inner_optimizers(unlisted))]
    return _members_of_unlisted(optimizer, unlisted, variables, inner)


def _find_unlisted(
    optimizer: Any, attributes: Sequence[tuple[str, Any]], variables: Sequence[Any]
) -> list[tuple[str, Any]]:
    """Return the attributes that may hold more than an optimizer's variables."""
    known = {id(x) for x in (*variables, *list_trained(optimizer))}
    return [
        (name, value)
        for name, value in attributes
        if id(value) not in known
        # Most are lists of momenta, and walking these is slow.
        and not (isinstance(value, list) and known.issuperset(map(id, value)))
    ]


def _members_of_unlisted(
    optimizer: Any,
    unlisted: Sequence[tuple[str, Any]],
    variables: list[Any],
    inner: Sequence[Any],
) -> Iterator[Slot]:
    if not unlisted:
        return
    trained = list_trained(optimizer)
    known = {id(x) for x in (*variables, *trained, *inner)}
    with_memory = (tf.Variable, tf.Tensor, KerasObject)
    put = vars(optimizer).__setitem__  # not through ``__setattr__``, which would track it
    for name, value in unlisted:
        found = [x for x in _leaves(value, []) if id(x) not in known]
        if any(isinstance(x, with_memory) and not _stays_on_the_host(x) for x in found):
            yield Slot(name, value, partial(put, name))


def _leaves(value: Any, found: list[Any]) -> list[Any]:
    """Return the leaves of an attribute and of its lists and dicts, without plain values."""
    if type(value) in _PLAIN:
        return found
    if isinstance(value, (list, tuple)):
        for inner in value:
            _leaves(inner, found)
    # Keras variables first: checking whether an object is a mapping is slow.
    elif not isinstance(value, sys.modules["keras"].Variable) and isinstance(value, Mapping):
        for inner in value.values():
            _leaves(inner, found)
    else:
        found.append(value)
    return found


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an attribute and of its lists and dicts, with their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _inside(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _inside(f"{name}.{index}", inner)
    else:
        yield name, value


def list_trained(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer trains, in its order; [] before it is built."""
    # A ``MultiOptimizer`` lacks the attribute.
    return list(getattr(optimizer, "_trainable_variables", ()))


def find_slots(optimizer: Any) -> dict[int, tuple[int, str]]:
    """Return an optimizer's values for one trained variable each, by their ids.

    Each has the number of the trained variable, and the name of the slot.
    """
    numbers = _number_paths(optimizer)
    named = _name_variables(own_variables(optimizer))
    slots = ((x, _find_slot(name, numbers)) for name, x in named)
    return {id(value_of(x)): slot for x, slot in slots if slot is not None}


def _number_paths(optimizer: Any) -> dict[str, int]:
    # TensorFlow's own variables have no path: see Keras's ``add_variable_from_reference``.
    trained = list_trained(optimizer)
    paths = [str(getattr(x, "path", x.name)).translate(_FLAT) for x in trained]
    return {path: number for number, path in enumerate(paths)}


def _find_slot(name: str, numbers: Mapping[str, int]) -> tuple[int, str] | None:
    """Return the number of a slot's variable, and the slot's name without the variable's path.

    The path contains names of layers, and Keras numbers those through all models of a process.
    """
    end = name.rfind("_")
    while end > 0:
        if name[:end] in numbers:
            return numbers[name[:end]], name[end + 1 :]
        end = name.rfind("_", 0, end)
    return None


def inner_optimizers(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that an optimizer wraps, with their names."""
    yield from _list_wrapped(optimizer)
    yield from _inner_optimizers(
        _find_unlisted(optimizer, _attributes_of(optimizer), optimizer._variables)
    )


def _list_wrapped(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that one of Keras's own optimizers wraps."""
    # An optimizer that scales the loss has one.
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        yield "inner_optimizer", inner
    if is_multiple(optimizer):
        for index, inner in enumerate(optimizer.optimizers):
            yield f"optimizers.{index}", inner


def is_multiple(optimizer: Any) -> bool:
    """Return whether an optimizer has several others, each for some of the variables."""
    optimizers: Any = getattr(sys.modules.get("keras"), "optimizers", None)
    return isinstance(optimizer, getattr(optimizers, "MultiOptimizer", ()))


def _inner_optimizers(unlisted: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers in the attributes of a user's class."""
    if not unlisted:
        return
    keras: Any = sys.modules["keras"]
    for attribute, value in sorted(unlisted, key=itemgetter(0)):
        if attribute in ("inner_optimizer", "_inner_optimizers"):
            continue
        if not isinstance(value, keras.Variable) and any(
            isinstance(x, keras.Optimizer) for x in _leaves(value, [])
        ):
            for name, inner in _inside(attribute, value):
                if isinstance(inner, keras.Optimizer):
                    yield name, inner


def all_optimizers(outermost: Any) -> Iterator[Any]:
    """Yield an optimizer, if there is one, and those that it wraps."""
    waiting = [] if outermost is None else [outermost]
    for each in waiting:
        yield each
        waiting += [x for _, x in inner_optimizers(each) if all(x is not y for y in waiting)]


def _variables(variables: list[Any]) -> Iterator[Slot]:
    for name, variable in _name_variables(variables):
        yield Slot(name, value_of(variable))


def _name_variables(variables: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables that have values on a device, with their names."""
    names: set[str] = set()
    for index, variable in enumerate(variables):
        # Keras makes some variables later, when they are first needed.
        value = value_of(variable)
        if value is not None and not _stays_on_the_host(value):
            name = variable.name
            # Keras numbers variables without a name from the start of the process.
            if name.startswith("variable_"):
                name = _WITHOUT_NAME.sub("variable", name)
            name = f"{name}_{index}" if name in names else name
            names.add(name)
            yield name, variable


def assign(x: tf.Variable, new: tf.Tensor) -> None:
    """Write a value into a variable, whose memory stays: a traced function computes with it."""
    with tf.device(x.device):
        x.assign(new)


def _refill(x: tf.Variable, new: tf.Tensor) -> None:
    """Give a variable the memory of a tensor."""
    # TensorFlow has no call for that. A variable is a handle of memory, with a name and a
    # shape. It gets another handle on the tensor's device, as ``tf.Variable`` makes its own. No
    # public function sets the handle.
    old = x.handle
    with tf.device(place_of(new)):
        handle = tf.raw_ops.VarHandleOp(
            dtype=x.dtype, shape=x.shape, shared_name=anonymous_name(), debug_name=x.name
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=new)
    handle._handle_data = old._handle_data  # shape and dtype, for functions that are traced
    vars(handle).update(vars(old))  # its name and its owner
    x._handle = handle
    # A function that was traced before holds the old handle forever. Without its memory the
    # function fails, instead of computing with old values. The memory is free at once.
    nothing = tf.constant(np.zeros(0, x.dtype.as_numpy_dtype))
    tf.raw_ops.AssignVariableOp(resource=old, value=nothing)


def _attributes(
    obj: Any, own: frozenset[str], listed: tuple[type, ...], put: Callable[..., object]
) -> Iterator[Slot]:
    """Yield the tensors, variables and modules in an object's attributes, and in their lists."""
    library = "keras" if is_of_keras(obj, "Layer") else "tf"
    line = f"self.{{}} = {library}.Variable(x, trainable=False)"
    for name, value in list(vars(obj).items()):
        if type(value) in _PLAIN or name in own or name.startswith(_OF_TRACKING):
            continue
        cls: type = type(value)
        if _is_subclass(cls, (*_WITHOUT_TENSORS, *listed)) or _is_setting(cls):
            continue
        if not _stays_on_the_host(value):
            set_to = partial(put, name)
            yield Slot(name, value, set_to, Role.ATTRIBUTE, is_saved=False, registration=line)


@lru_cache(1024)
def _is_setting(cls: type) -> bool:
    """Return whether a class is Keras's own for a setting, such as a regularizer.

    Its constants stay: Keras brings them to the device of a layer.
    """
    is_kept = _is_subclass(cls, (KerasObject, list, tuple, dict, set))
    return cls.__module__.startswith("keras.") and not is_kept


@lru_cache(4096)
def _is_subclass(cls: type, bases: tuple[type, ...]) -> bool:
    """Return whether a class is derived from another one: of TensorFlow's it takes long to tell."""
    return issubclass(cls, bases)


def _stays_on_the_host(value: Any) -> bool:
    cls: type = type(value)
    return _is_subclass(cls, (tf.Tensor, tf.Variable)) and value.dtype in OF_THE_HOST


@lru_cache(1)
def _own_attributes() -> frozenset[str]:
    """Return the names in the ``__dict__`` of every layer and model, without its variables."""
    keras = sys.modules["keras"]
    x = keras.Input((1,), name="any")
    # Keras 3.10 to 3.13 refuse a model whose output is its input.
    model = keras.Model(x, keras.layers.Identity(name="same")(x), name="any")
    made = keras.Layer(name="any"), keras.Sequential(name="any"), model
    return frozenset({"build", "call", OF_PROGRAMS, *_MAKERS}.union(*map(vars, made)))


@lru_cache(1024)
def _functions_of(cls: type) -> tuple[Any, ...]:
    """Return the methods of a class that are ``tf.function``s."""
    return tuple(
        value
        for base in cls.__mro__
        for value in vars(base).values()
        if isinstance(value, tf.types.experimental.PolymorphicFunction)
    )


# -- where objects compute ------------------------------------------------------------------------


def compute_at(obj: Any, native: str) -> None:
    """Let a layer or an optimizer build and compute on a device from now on.

    Args:
        obj: the layer or the optimizer.
        native: an argument of ``tf.device``; empty for the device of the call.
    """
    compute = "call" if is_of_keras(obj, "Layer") else "apply"
    methods = vars(obj)
    if not isinstance(obj.build, _InScope):
        # Not through ``__setattr__``, which looks for state to track.
        methods["build"] = _BuildInScope(obj, native)
        scope = _InScopeOfText if is_of_text(obj) else _InScope
        methods[compute] = scope(getattr(obj, compute), native)
        if is_of_keras(obj, "Model"):
            for made, maker in zip(_TRACED, _MAKERS, strict=True):
                methods[maker] = _MakeInScope(obj, maker, made, native)
    for name in ("build", compute, *_MAKERS):
        if name in methods:
            methods[name].native = native


class _InScope:
    """A method that runs in the scope of a device.

    Args:
        method: a bound method.
        native: an argument of ``tf.device``.
    """

    def __init__(self, method: Callable[..., Any], native: str) -> None:
        # Keras reads a method's signature and its marks.
        update_wrapper(self, method)
        self._method = method
        self.native = native

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with DefaultDevice(self.native):
            return self._method(*arguments, **named)


class _InScopeOfText(_InScope):
    """A method that looks up text on the host, beside tensors on a device, and returns numbers."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with allow_mixing(), DefaultDevice(self.native):
            found = super().__call__(*arguments, **named)
            return tf.nest.map_structure(self._move, found, expand_composites=True)

    def _move(self, x: Any) -> Any:
        is_number = isinstance(x, tf.__internal__.EagerTensor) and x.dtype not in OF_THE_HOST
        return tf.identity(x) if is_number else x


class _BuildInScope(_InScope):
    """A ``build`` that makes its variables on a device, also those that Keras makes later.

    Keras may only trace a model to find the shapes. Then it makes the variables after it has left
    all scopes but its own.
    """

    def __init__(self, owner: Any, native: str) -> None:
        super().__init__(owner.build, native)
        self._owner = owner

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        built = super().__call__(*arguments, **named)
        for variable in self._owner.variables:
            later = variable._deferred_initialize  # private, as it happens outside of all calls
            if value_of(variable) is None and not isinstance(later, _InScope):
                vars(variable)["_deferred_initialize"] = _InScope(later, self.native)
        return built


class _MakeInScope(_InScope):
    """A method of a model that makes a function for ``fit``, ``evaluate`` or ``predict``.

    XLA runs a function on the device of its call, and reads no variable on another device.

    Args:
        model: the owner of the method.
        maker: the name of the method.
        made: the attribute that it sets.
        native: an argument of ``tf.device``.
    """

    def __init__(self, model: Any, maker: str, made: str, native: str) -> None:
        super().__init__(getattr(model, maker), native)
        self._model = model
        self._made = made

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = super().__call__(*arguments, **named)
        function = getattr(self._model, self._made)
        if isinstance(function, _InScope):
            function.native = self.native
        elif self.native:
            self._gather()
            setattr(self._model, self._made, _InScope(function, self.native))
        return result

    def _gather(self) -> None:
        """Move metrics and losses that were compiled after ``place`` to the model's device."""
        compiled = _list_compiled_variables(self._model)
        for optimizer in all_optimizers(getattr(self._model, "optimizer", None)):
            compiled += own_variables(optimizer)
        for variable in {id(x): value_of(x) for x in compiled}.values():
            is_of_one_device = isinstance(variable, tf.Variable) and not hasattr(variable, "values")
            if is_of_one_device and not variable.device.endswith(self.native.removeprefix("/")):
                with tf.device(self.native):
                    new = tf.identity(variable)
                _refill(variable, new)
