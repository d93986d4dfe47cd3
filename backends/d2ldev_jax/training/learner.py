"""The learners: ``jax.grad``, optax's optimizers, and one jitted function for a step.

Between two steps a learner holds the arrays in two lists. ``jax.jit`` flattens lists in C++, and
Flax's objects in Python. ``sync`` puts the arrays into the model and the optimizer, without a copy.
The next step takes them from there again, with the changes that the user has made.

All models of one structure share the compiled functions if their loss and settings are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from inspect import signature
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from d2ldev import D2LDevError, Trainer, UnsupportedValueError
from d2ldev.framework import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    CPU,
    LEAST_WEIGHT,
    MOMENTUM,
    NO_LABEL,
    WEIGHT_DECAY,
    Framework,
    Inputs,
    Learner,
    Objective,
    Programs,
    Signature,
    Tensor,
    TrainingSettings,
    describe,
    is_text,
    list_named_tensors,
    optimizer_refusal,
    place,
    quote,
    read_signature,
    state_refusal,
    text_of,
)
from d2ldev_jax.keras import KerasObject, is_layer
from d2ldev_jax.models import value_of
from d2ldev_jax.training import widen_labels
from d2ldev_jax.training.places import OneDevice
from d2ldev_jax.training.wrappers import SWITCHES, PytreeModule, Wrapper

_OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=MOMENTUM),
    "adam": lambda lr: optax.adam(lr, *BETAS, eps=ADAM_EPSILON),
    "adamw": lambda lr: optax.adamw(lr, *BETAS, eps=ADAM_EPSILON, weight_decay=WEIGHT_DECAY),
    # optax adds it inside the root.
    "adagrad": lambda lr: optax.adagrad(lr, 0.0, ADAGRAD_EPSILON**2),
}
_OF_NO_TRAINING = optax.set_to_zero()  # one object, because programs depend on it
_PRECISIONS = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
# The flags of a module that is in evaluation mode.
_FLAGS = ("deterministic", "use_running_average")


def _name_text(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that calls a compiled function, to name text among its operands."""

    @wraps(method)
    def run(self: JaxLearner, *operands: Any) -> Any:
        try:
            return method(self, *operands)
        except TypeError as error:
            for path, x in jax.tree_util.tree_leaves_with_path(operands):
                if isinstance(x, (str, bytes)) or is_text(x):
                    raise UnsupportedValueError(
                        f"compute with {describe(self._model)}",
                        f"{quote(x)} in the batch, at {jax.tree_util.keystr(path)}, is text, and "
                        "no function that JAX compiles takes text",
                        "replace it by numbers, for example from a vocabulary; or remove it",
                    ) from error
            raise

    return run


class JaxLearner(Learner):
    """Train a ``flax.nnx.Module`` with an ``nnx.Optimizer``.

    ``step`` runs the model in training mode, and ``evaluate`` in evaluation mode. The user's own
    flags do not change. A module that the user froze by ``eval()`` stays frozen in ``step``. But a
    model with every flag set was left in evaluation mode, and is trained as a whole. If batch
    normalization has a model's only flags, give the model another flag to freeze it:
    ``net.deterministic = False``, then ``net.norm.eval()``.

    Args:
        framework: the owner of the arrays.
        model: the model.
        settings: the settings of the training.
        places: returns the places of arrays and batches, for the model's device.
    """

    def __init__(
        self,
        framework: Framework,
        model: Any,
        settings: TrainingSettings,
        places: Callable[[jax.Device], OneDevice] = OneDevice,
    ) -> None:
        super().__init__(settings)
        self._framework = framework
        self._places_from = places
        wrapped = _wrap(model)
        if isinstance(wrapped, Wrapper):
            wrapped.check(settings)
        if not isinstance(wrapped, nnx.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is neither a flax.nnx.Module, nor a pytree that can be called",
                "for a linen module nnx.bridge.ToNNX(net, rngs=nnx.Rngs(0)).lazy_init(X), or D2L's "
                "training_step on one device. If it has only parameters, "
                "jax.tree_util.Partial(net.apply, variables). Put your own parameters into an "
                "nnx.Module, as nnx.Param",
            )
        self._objective = Objective(framework, settings, _LOSSES, _divide)
        self._state: _State = [], [], _Scaler() if settings.precision == "fp16" else None
        self._steps: Any = None
        self._is_synced: bool
        self._sums: Any = None
        self._reference = 1.0  # of the factors of the batches of a step
        # An operand of the programs, so that another rate compiles nothing.
        self._rate: Any = jnp.asarray(settings.lr) if isinstance(settings.optimizer, str) else None
        self.replace({"model": wrapped, "optimizer": _make_optimizer(wrapped, settings)})

    def sync(self) -> dict[str, Any]:
        if not self._is_synced:
            model_arrays, optimizer_arrays, _ = self._state
            self._steps.model_split.put(self._model, self._places.take_local(model_arrays))
            self._steps.optimizer_split.put(
                self._optimizer, self._places.take_local(optimizer_arrays)
            )
            self._is_synced = True
            for each in (self._model, self._optimizer):
                if hasattr(each, "push"):
                    each.push()
        components = {"model": _unwrap(self._model), "optimizer": _unwrap(self._optimizer)}
        *_, scaler = self._state
        if scaler is not None:
            components["scaler"] = self._places.take_local(scaler)
        return components

    def replace(self, components: dict[str, Any]) -> None:
        self._model = _wrap(components["model"])
        self._optimizer = _wrap_optimizer(self._model, components["optimizer"])
        is_trained = self.settings.optimizer is not None
        if is_trained and not jax.tree.leaves(nnx.state(self._model, self._optimizer.wrt)):
            is_wrapped = isinstance(self._model, Wrapper)
            raise UnsupportedValueError(
                f"train {describe(_unwrap(self._model))}",
                f"there is nothing to train: nothing of it is {self._optimizer.wrt}",
                "arrays of floats in it, or model.trainable = True of Keras"
                if is_wrapped
                else "self.weight = nnx.Param(...) in its __init__",
            )
        # A model without arrays computes on the device of its inputs. It is only evaluated.
        places = [x for _, x in list_named_tensors(self._framework, self._model)[:1]]
        device = self._framework.tensors.device_of(places[0]) if places else CPU
        # A new optimizer's counter of steps is on the default device.
        self._optimizer = place(self._framework, self._optimizer, device)
        self._places = self._places_from(self._framework.devices.native(device))
        scaler = components.get("scaler", self._state[-1])
        self._sums, self._rate, scaler = self._places.replicate((self._sums, self._rate, scaler))
        self._state = [], [], self._places.broadcast_first(scaler)
        self._take(self._places.replicate_first)

    @property
    def takes_marks(self) -> bool:
        return self._places.takes_marks

    @cached_property
    def signature(self) -> Signature:
        model = self._model
        if isinstance(model, Wrapper):
            return model.read_signature()
        if isinstance(model, nnx.bridge.ToNNX):  # it has the parameters of its linen module
            wrapped = "to_nnx__module" if hasattr(model, "to_nnx__module") else "module"
            model = getattr(model, wrapped)
        while isinstance(model, nnx.Sequential) and len(model.layers):
            model = model.layers[0]  # which gets all inputs
        return read_signature(model, switches=SWITCHES)

    @_name_text
    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if self._is_synced:
            self._take()
        if self.settings.accumulate_grad_batches == 1:
            inputs, y = self._places.shard_batch((self.signature.arrange(inputs), y), self.portion)
            self._state, found, prediction = self._program.step(self._state, self._rate, inputs, y)
        else:
            _, whole = self._objective.weigh(inputs, y, self.portion)
            if not self.pending:
                self._reference = whole
            inputs, y = self._places.shard_batch((self.signature.arrange(inputs), y), self.portion)
            model_arrays, optimizer_arrays, scaler = self._state
            model_arrays, self._sums, found, prediction = self._program.accumulate(
                (model_arrays, [], scaler), self._sums, (whole, self._reference), inputs, y
            )
            self._state = model_arrays, optimizer_arrays, scaler
            self.pending += 1
            if self.pending == self.settings.accumulate_grad_batches:
                self.flush()
        return self._take_loss(found, prediction)

    def flush(self) -> None:
        if not self.pending:
            return
        if self._is_synced:
            self._take()
        self._state = self._program.apply(self._state, self._rate, self._sums)
        self._sums, self.pending = None, 0

    @_name_text
    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if self._is_synced:
            self._take()
        batch = self.signature.arrange(inputs), y
        arrays, batch = self._places.prepare_alone(self._state[0], batch, self.portion)
        found, prediction = self._program.evaluate(arrays, *batch)
        return self._take_loss(found, prediction)

    def _take_loss(self, found: Any, prediction: Any) -> tuple[Tensor, Any]:
        """Return the loss of a program and its prediction, and note its weight and its labels."""
        loss, weight, wrong = found
        places, portion = self._places, self.portion
        weight = places.take_weight(weight, portion)
        prediction = places.take_shard(prediction, portion)
        wrong = tuple(map(places.take_local, wrong))
        loss, self.weight = self._objective.take((loss, weight, wrong), prediction, self.batch)
        return places.take_local(loss), prediction

    def check_labels(self) -> None:
        self._objective.check_labels()

    @_name_text
    def predict(self, inputs: Inputs) -> Any:
        if self._is_synced:
            self._take()
        inputs = self.signature.arrange(inputs)
        arrays, inputs = self._places.prepare_alone(self._state[0], inputs, self.portion)
        return self._places.take_local(self._program.predict(arrays, inputs))

    def modes(self) -> list[str]:
        return _list_set_flags(self._model)

    def check_modes(self, modes: Any) -> Callable[[], None]:
        names = [name for name, _, _ in _list_flags(self._model)]
        if not isinstance(modes, list) or any(name not in names for name in modes):
            raise state_refusal("model", f"its flags are {names}, and set were {describe(modes)}")

        def put() -> None:
            self.sync()
            _put_flags(self._model, modes)

        return put

    def _take(self, put: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """Take the arrays from the model and the optimizer.

        Args:
            put: moves them to the devices of a step.
        """
        put = put or self._places.replicate
        for each in (self._model, self._optimizer):
            if hasattr(each, "pull"):
                each.pull()
        model_split, model_arrays = _split_model(self._model)
        own = self._optimizer.tx
        if self._rate is not None:
            self._optimizer.tx = _make_with_any_rate(self.settings.optimizer)
        try:
            optimizer_split, optimizer_arrays = _split(self._optimizer)
        finally:
            self._optimizer.tx = own
        in_model, in_optimizer, scaler = self._state
        is_here = _are_same(model_arrays, in_model) and _are_same(optimizer_arrays, in_optimizer)
        del in_model, in_optimizer  # or a device would hold its part twice
        if not is_here:
            self._state = [], [], scaler
            self._state = put(_strengthen(model_arrays)), put(_strengthen(optimizer_arrays)), scaler
        steps = _Steps(
            model_split,
            optimizer_split,
            self._objective,
            self.settings,
            self._optimizer.wrt,
        )
        if self._steps is None or self._steps.structure != steps.structure:
            self._steps = steps
            is_wrapped = isinstance(self._model, Wrapper)
            objects = self._model.list_dependencies() if is_wrapped else []
            self._program = _PROGRAMS.get([self.settings.loss, *objects], steps.values, _Program)
            self._program.users[id(steps)] = steps
        self._is_synced = False


def _wrap(model: Any) -> Any:
    """Return a model as an ``nnx.Module``; one that cannot be is returned as it is."""
    if is_layer(model):
        from d2ldev_jax.training.keras import KerasModule

        return KerasModule(model)
    if isinstance(model, nnx.Module):
        _check_layers(model)
        return model
    # JAX takes an object for a leaf unless its class is registered.
    is_pytree = callable(model) and not jax.tree_util.all_leaves([model])
    return PytreeModule(model) if is_pytree else model


def _check_layers(model: nnx.Module) -> None:
    """Check that a module has no layer of Keras: Flax would not see its variables."""
    if "keras" not in sys.modules:
        return
    for path, node in nnx.iter_graph(model):
        for name, value in vars(node).items() if isinstance(node, nnx.Module) else ():
            if isinstance(value, KerasObject):
                where = ".".join(map(str, (*path, name)))
                raise UnsupportedValueError(
                    f"train {type(model).__name__}",
                    f"{where} is a {type(value).__name__} of Keras, whose variables Flax does not "
                    "train",
                    "train the Keras model itself, or make the layer of flax.nnx",
                )


def _make_optimizer(model: nnx.Module, settings: TrainingSettings) -> nnx.Optimizer[Any]:
    optimizer = _wrap_optimizer(model, make_optimizer(settings))
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if isinstance(optimizer, optax.GradientTransformation):
        tx = optimizer
        # Of arrays: Flax's variables around a list or a tuple in a state cannot be read.
        of_arrays = optax.GradientTransformation(
            lambda state: tx.init(_take_arrays(state)), tx.update
        )
        optimizer = nnx.Optimizer(model, of_arrays, wrt=nnx.Param)
        optimizer.tx = tx
    if not isinstance(optimizer, nnx.Optimizer) or isinstance(optimizer, nnx.ModelAndOptimizer):
        raise optimizer_refusal(
            optimizer,
            "an optax.GradientTransformation or an nnx.Optimizer",
            module=optax,
            path="optax",
            arguments=str(settings.lr),
            owns=_makes_optimizer,
        )
    return optimizer


def _makes_optimizer(function: Any) -> bool:
    """Tell whether a function of a learning rate returns an optimizer of optax."""
    return isinstance(function(0.01), optax.GradientTransformation)


def _wrap_optimizer(model: nnx.Module, optimizer: Any) -> Any:
    """Return an optimizer of Keras as one of Flax, and any other as it is."""
    if not isinstance(optimizer, KerasObject):
        return optimizer
    from d2ldev_jax.training.keras import KerasModule, KerasOptimizer

    if not isinstance(model, KerasModule):
        raise UnsupportedValueError(
            f"train {describe(model)} with the optimizer {describe(optimizer)}",
            "it trains the variables of Keras models alone",
            "optimizer=optax.sgd(0.1), or optimizer='sgd'",
        )
    return KerasOptimizer(model, optimizer)


def _unwrap(obj: Any) -> Any:
    """Return a model or an optimizer as the user knows it."""
    return obj.unwrap() if hasattr(obj, "unwrap") else obj


def _take_arrays(state: Any) -> Any:
    """Return a state with arrays in the places of Flax's variables."""
    return jax.tree.map(value_of, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def make_optimizer(settings: TrainingSettings) -> Any:
    """Return the optimizer of a training: optax's for a name, or else the user's object."""
    optimizer = settings.optimizer
    if optimizer is None:
        return _OF_NO_TRAINING
    is_named = isinstance(optimizer, str) and optimizer in _OPTIMIZERS
    return _OPTIMIZERS[optimizer](settings.lr) if is_named else optimizer


@contextmanager
def name_failed_update(optimizer: Any) -> Iterator[None]:
    """Raise an error that names optax's optimizer if the trace of its update fails.

    Such an update needs other arguments than those that optax's own optimizers take.
    """
    try:
        yield
    except D2LDevError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedValueError(
            f"train with the optimizer {describe(optimizer)}",
            f"its update fails: {text_of(error)}. It gets gradients and parameters. If it takes "
            "extra arguments, it gets value=, grad=, and without accumulate_grad_batches value_fn=",
            "leave out accumulate_grad_batches; optax.GradientTransformationExtraArgs(tx.init, "
            "update), where update gives tx.update what it needs; or optax.adam(0.1)",
        ) from error


def _choose_extra(tx: optax.GradientTransformation, known: dict[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that an update takes, among those that optax documents."""
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return {}
    parameters = signature(tx.update).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: x for name, x in known.items() if takes_all or name in parameters}


@lru_cache
def _make_with_any_rate(name: str) -> optax.GradientTransformation:
    """Return the one optimizer of a name, because programs depend on the object.

    Its ``update`` takes the learning rate. All these optimizers multiply by it at the end. It also
    takes which parameters the step uses: the others and their states stay as they are.
    """
    of_rate_1 = _OPTIMIZERS[name](1.0)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        rate: Tensor,
        used: tuple[bool, ...],
        **_more: Any,
    ) -> tuple[Any, Any]:
        updates, after = of_rate_1.update(updates, state, params)
        updates = jax.tree.map(lambda x: x * rate.astype(x.dtype), updates)
        if all(used):
            return updates, after
        structure = jax.tree.structure(updates)
        are_used = jax.tree.unflatten(structure, used)

        def choose(new: Any, old: Any) -> Any:
            if jax.tree.structure(new) != structure:  # such as the number of steps
                return new
            return jax.tree.map(lambda is_used, a, b: a if is_used else b, are_used, new, old)

        def is_of_parameters(x: Any) -> bool:
            return bool(jax.tree.structure(x) == structure)

        none = jax.tree.map(jnp.zeros_like, updates)
        after = jax.tree.map(choose, after, state, is_leaf=is_of_parameters)
        return choose(updates, none), after

    return optax.GradientTransformationExtraArgs(of_rate_1.init, update)


# -- objects without their arrays -----------------------------------------------------------------


class _Split(NamedTuple):
    """A Flax object without its arrays.

    Args:
        graph: the graph of the objects, with all static attributes.
        structure: the places of the arrays.
    """

    graph: Any
    structure: Any

    def merge(self, arrays: list[Any]) -> Any:
        """Return such an object with these arrays."""
        obj = nnx.merge(self.graph, jax.tree.unflatten(self.structure, arrays))
        if isinstance(trainer := vars(obj).get("trainer"), ref):
            vars(obj)["trainer"] = trainer()
        return obj

    def put(self, obj: Any, arrays: list[Any]) -> None:
        """Give the object itself these arrays."""
        nnx.update(obj, jax.tree.unflatten(self.structure, arrays))


def _split(obj: Any) -> tuple[_Split, list[Any]]:
    graph, sown, state = nnx.split(obj, nnx.Intermediate, ...)
    if sown:
        nnx.pop(obj, nnx.Intermediate)  # the values of ``sow`` grow with each call
        graph, state = nnx.split(obj)
    arrays, structure = jax.tree.flatten(state)
    return _Split(graph, structure), arrays


def _split_model(model: Any) -> tuple[_Split, list[Any]]:
    """Split a model with a weak reference to its Trainer.

    The table of programs keeps the graph, and the Trainer refers to the model.
    """
    trainer = vars(model).get("trainer")
    if not isinstance(trainer, Trainer):
        return _split(model)
    vars(model)["trainer"] = ref(trainer)
    try:
        return _split(model)
    finally:
        vars(model)["trainer"] = trainer


def _are_same(arrays: list[Any], others: list[Any]) -> bool:
    """Tell whether two lists have the same objects."""
    return len(arrays) == len(others) and all(map(is_, arrays, others))


def _strengthen(arrays: list[Any]) -> list[Tensor]:
    """Return arrays with the types that a step returns, so that it is traced only once."""
    return [
        x
        if isinstance(x, jax.Array) and not getattr(x, "weak_type", False)
        else jnp.asarray(x, jnp.result_type(x))
        for x in arrays
    ]


def _list_arrays(obj: Any, before: _Split, old: list[Any]) -> list[Any]:
    """Return the arrays of an object after a step, in the order of those before it.

    Args:
        obj: the object.
        before, old: the object without its arrays, and the arrays, before the step.
    """
    after, arrays = _split(obj)
    if after.structure == before.structure:
        return arrays
    earlier, now = (
        jax.tree.unflatten(split.structure, found)
        for split, found in ((before, old), (after, arrays))
    )
    if _find_variables(now) != _find_variables(earlier):
        raise UnsupportedValueError(
            f"train {describe(obj)}",
            f"a step has made or deleted variables: {after.structure}",
            "optimizer=optax.sgd(0.1), as optax made it"
            if isinstance(obj, nnx.Optimizer)
            else "make all variables in __init__",
        )
    # A call may leave further arrays in attributes, and may leave none.
    found = dict(jax.tree_util.tree_flatten_with_path(now)[0])
    return [found.get(path, x) for path, x in jax.tree_util.tree_flatten_with_path(earlier)[0]]


def _find_variables(state: Any) -> dict[Any, Any]:
    """Return the structures of Flax's variables in a state, by their paths."""
    found, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return {path: jax.tree.structure(x) for path, x in found if isinstance(x, nnx.Variable)}


# -- compiled functions ---------------------------------------------------------------------------


def _call(model: Any, inputs: Inputs) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _cast(tree: Any, old: Any, new: Any) -> Any:
    """Return a nesting whose arrays of one dtype have another one."""
    return jax.tree.map(lambda x: x.astype(new) if getattr(x, "dtype", None) == old else x, tree)


class _Scaler(NamedTuple):
    """The factor of the loss that keeps small gradients from being 0 in float16.

    It has the numbers of ``flax.training.dynamic_scale``, which does not take ``nnx`` modules.

    Args:
        scale: the factor.
        steps: the number of steps since its last change, or since the last skipped step.
    """

    scale: Tensor = np.float32(2**16)
    steps: Tensor = np.int32(0)

    def after(self, is_finite: Tensor) -> _Scaler:
        """Return the scaler for the next step."""
        grows = self.steps == 1999
        factor = jnp.where(is_finite, jnp.where(grows, 2.0, 1.0), 0.5)
        steps = jnp.where(is_finite & ~grows, self.steps + 1, 0)
        return _Scaler(self.scale * factor, steps)


# The values that a step changes: the arrays of the model and of the optimizer, and the scaler. A
# named tuple takes a microsecond more in each step.
_State = tuple[list[Tensor], list[Tensor], _Scaler | None]


class _Program:
    """The compiled functions of all learners with the same loss and the same ``_Steps.values``.

    A trace calls any of these learners' steps, once for each shape. The program keeps none alive.

    Attributes:
        users: the steps of these learners, by their ids.
    """

    def __init__(self) -> None:
        self.users: WeakValueDictionary[int, _Steps] = WeakValueDictionary()
        self.step = _compile(self.users, "step")
        self.accumulate = _compile(self.users, "accumulate")
        self.apply = _compile(self.users, "apply")
        self.evaluate = _compile(self.users, "evaluate")
        self.predict = _compile(self.users, "predict")


def _compile(users: WeakValueDictionary[int, _Steps], name: str) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        # The learner that calls is one of them. Threads may add others meanwhile.
        user = next(x for each in users.valuerefs() if (x := each()) is not None)
        return getattr(user, name)(*operands)

    run.__name__ = name
    # JAX names the operands in its errors.
    run.__signature__ = signature(partial(getattr(_Steps, name), None))  # type: ignore[attr-defined]
    return jax.jit(run)


# One table for all models, because a program holds none of their arrays. Structures are compared
# as ``nnx.jit`` compares them.
_PROGRAMS: Programs[_Program] = Programs(16)


@dataclass(eq=False)
class _Steps:
    """The functions of a step that JAX compiles."""

    model_split: _Split
    optimizer_split: _Split
    objective: Objective
    settings: TrainingSettings
    wrt: Any

    @property
    def structure(self) -> Any:
        """Return all dependencies that may change while a learner is in use."""
        return self.model_split, self.optimizer_split

    @property
    def values(self) -> Hashable:
        """Return all dependencies of the functions but the loss."""
        settings = self.settings
        how = settings.gradient_clip_val, settings.precision, settings.methods
        return self.structure, self.wrt, how

    def step(self, state: _State, rate: Tensor | None, inputs: Inputs, y: Any) -> Any:
        """Return the state after a step, and the loss, its weight and the prediction before it."""
        model, gradients, (_, *found), prediction = self._differentiate(state, None, inputs, y)

        def compute_loss(parameters: Any) -> Tensor:
            model = self.model_split.merge(state[0])
            nnx.update(model, parameters)
            _train(model)
            (value, *_), _ = self._compare(model, inputs, y, is_step=True)
            loss: Tensor = value
            return loss

        state = self._update(model, state, rate, gradients, found[0], value_fn=compute_loss)
        return state, found, prediction

    def accumulate(self, state: _State, sums: Any, alike: Any, inputs: Inputs, y: Any) -> Any:
        """Return the model's arrays, the sums over the batches of a step, and what ``step`` does.

        Args:
            state: without the arrays of the optimizer.
            sums: of gradients, losses and factors; None before the first batch.
            alike: the weight of the batch if all elements count alike, and the reference.
            inputs, y: see ``Learner.step``.
        """
        model, gradients, (factor, *found), prediction = self._differentiate(
            state, alike, inputs, y
        )
        new = [*gradients, found[0] * factor, factor]
        if sums is not None:
            pairs = zip(sums, new, strict=True)
            new = [a if b is None else b if a is None else a + b for a, b in pairs]
        arrays = _list_arrays(model, self.model_split, state[0])
        return arrays, new, found, prediction

    def apply(self, state: _State, rate: Tensor | None, sums: Any) -> _State:
        """Return the state after a step with the mean of the gradients."""
        *sums, total = sums
        *gradients, value = jax.tree.map(lambda x: (x / total).astype(x.dtype), sums)
        return self._update(self.model_split.merge(state[0]), state, rate, gradients, value)

    def evaluate(self, model_arrays: list[Tensor], inputs: Inputs, y: Any) -> tuple[Any, Any]:
        """Return the loss with its weight, and the prediction, in evaluation mode."""
        return self._compare(self._prepare_evaluation(model_arrays), inputs, y, is_step=False)

    def predict(self, model_arrays: list[Tensor], inputs: Inputs) -> Any:
        """Return the prediction in evaluation mode."""
        return self._compute_prediction(self._prepare_evaluation(model_arrays), inputs)

    def _prepare_evaluation(self, model_arrays: list[Tensor]) -> Any:
        model = self.model_split.merge(model_arrays)
        model.eval()
        return model

    def _compute_prediction(self, model: Any, inputs: Inputs) -> Any:
        """Return the prediction, in float32 if the model computes in fewer bits.

        A layer without its own ``dtype`` computes in the dtype of its inputs and parameters. The
        statistics of batch normalization are not parameters, and keep their dtype.
        """
        narrow = _PRECISIONS.get(self.settings.precision)
        if narrow is None:
            return _call(model, inputs)
        wide, structure = jax.tree.flatten(nnx.state(model, nnx.Param))
        nnx.update(model, jax.tree.unflatten(structure, _cast(wide, jnp.float32, narrow)))
        prediction = _call(model, _cast(inputs, jnp.float32, narrow))
        nnx.update(model, jax.tree.unflatten(structure, wide))
        return _cast(prediction, narrow, jnp.float32)

    def _compare(self, model: Any, inputs: Inputs, y: Any, *, is_step: bool) -> Any:
        """Return the loss with its weight, and the prediction."""
        if self.settings.methods is not None:
            return self.objective.compute(model, *inputs, is_step=is_step), None
        prediction = self._compute_prediction(model, inputs)
        value, weight, wrong = self.objective.compare(prediction, y)
        if isinstance(model, Wrapper):
            value = sum(model.take_losses(), value)
        return (value, weight, wrong), prediction

    def _differentiate(self, state: _State, alike: Any, inputs: Inputs, y: Any) -> Any:
        """Return the model, the gradients, the loss and the prediction.

        Args:
            state, alike, inputs, y: see ``accumulate``. With None as ``alike`` the factor is 1.

        Returns:
            The model, the gradients, a tuple, and the prediction. The gradients are those of the
            product of a factor and the loss. A parameter that the program does not use has None.
            The tuple has the factor, the loss and its weight.
        """
        arrays, _, scaler = state
        model = self.model_split.merge(arrays)
        used: set[int] = set()

        def compare(model: Any) -> Any:
            leaves, structure = jax.tree.flatten(nnx.state(model, self.wrt))
            leaves = [_note_use(used, i, x) for i, x in enumerate(leaves)]
            nnx.update(model, jax.tree.unflatten(structure, leaves))
            (value, weight, wrong), prediction = self._compare(model, inputs, y, is_step=True)
            scaled, factor = value, None
            if alike is not None:
                whole, reference = alike
                factor = (whole if weight is None else weight + whole * LEAST_WEIGHT) / reference
                scaled = (value * factor).astype(value.dtype)
            if scaler is not None:
                scaled *= scaler.scale
            return scaled, ((factor, value, weight, wrong), prediction)

        _train(model)
        trained = nnx.DiffState(0, self.wrt)
        gradient = nnx.value_and_grad(compare, argnums=trained, has_aux=True)
        (_, (found, prediction)), gradients = gradient(model)
        leaves = [x if i in used else None for i, x in enumerate(jax.tree.leaves(gradients))]
        return model, leaves, found, prediction

    def _update(
        self,
        model: Any,
        state: _State,
        rate: Tensor | None,
        gradients: Any,
        value: Tensor,
        **more: Any,
    ) -> _State:
        model_arrays, optimizer_arrays, scaler = state
        optimizer = self.optimizer_split.merge(optimizer_arrays)
        before = _list_arrays(model, self.model_split, model_arrays), optimizer_arrays
        if scaler is not None:
            gradients = jax.tree.map(lambda x: x / scaler.scale, gradients)
        if self.settings.gradient_clip_val:
            gradients = clip(gradients, self.settings.gradient_clip_val)
        parameters, structure = jax.tree.flatten(nnx.state(model, self.wrt))
        pairs = zip(gradients, parameters, strict=True)
        whole = jax.tree.unflatten(
            structure, [jnp.zeros_like(x) if g is None else g for g, x in pairs]
        )
        more = {"value": value, "grad": _take_arrays(whole), **more}
        of_name = {"rate": rate, "used": tuple(x is not None for x in gradients)}
        extra = _choose_extra(optimizer.tx, more) if rate is None else of_name
        with name_failed_update(optimizer.tx):
            optimizer.update(model, whole, **extra)
        after = (
            _list_arrays(model, self.model_split, model_arrays),
            _list_arrays(optimizer, self.optimizer_split, optimizer_arrays),
        )
        if scaler is None:
            return *after, None
        is_finite = jnp.all(
            jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradients)])
        )
        # A step with an infinite gradient or NaN is skipped.
        after = jax.tree.map(
            lambda a, b: a if a is b or a.shape != b.shape else jnp.where(is_finite, a, b),
            after,
            before,
        )
        return *after, scaler.after(is_finite)


def _note_use(used: set[int], number: int, x: Tensor) -> Tensor:
    """Return an array, and note at the trace of the gradients whether the loss depends on it."""

    @jax.custom_vjp
    def same(x: Tensor) -> Tensor:
        return x

    def backward(_: None, gradient: Any) -> tuple[Tensor]:
        # JAX does not call it for an array that the loss does not depend on.
        used.add(number)
        return (gradient,)

    same.defvjp(lambda x: (x, None), backward)
    return same(x)


def clip(gradients: Any, largest: float) -> Any:
    """Return the gradients, clipped as by ``torch.nn.utils.clip_grad_norm_``."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    factor = jnp.minimum(1.0, largest / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)


# A named loss returns its ``Learner.weight``, too.


def _mse(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    prediction, y = _mask_uncounted(prediction, y, weights)
    return _mean((prediction - y.astype(prediction.dtype)) ** 2, weights)


def _cross_entropy(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any, Any]:
    prediction, y = _mask_uncounted(prediction, y, weights)
    y = widen_labels(y)
    # A label that is too large gives NaN. A negative label counts from the last class.
    counts = (y >= 0) & (y < prediction.shape[-1])
    # Of a row that does not count, too, the loss may be infinite, and 0 times it is NaN.
    logits = jnp.where(counts[..., None], prediction, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, y, 0))
    others = jnp.where(counts, NO_LABEL, y).ravel()
    wrong = (others[(others != NO_LABEL).argmax()],) if y.size else ()  # the first one
    if weights is not None:
        counts = counts * jnp.expand_dims(weights, range(weights.ndim, counts.ndim))
    return *_mean(losses, counts), wrong


def _bce(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    prediction, y = _mask_uncounted(prediction, y, weights)
    return _mean(optax.sigmoid_binary_cross_entropy(prediction, y), weights)


def _mask_uncounted(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Return both with 0 in place of rows with weight 0: 0 times an infinite loss is NaN.

    The prediction gets at least the digits of float32, which the mean over a batch needs.
    """
    prediction = prediction.astype(jnp.promote_types(prediction.dtype, jnp.float32))
    if weights is None:
        return prediction, y
    counts = jnp.expand_dims(weights != 0, range(weights.ndim, y.ndim))
    rows = jnp.expand_dims(counts, range(y.ndim, prediction.ndim))
    return jnp.where(rows, prediction, 0), jnp.where(counts, y, 0)


def _mean(losses: Tensor, weights: Any) -> tuple[Tensor, Any]:
    if weights is None:
        return jnp.mean(losses), None
    number = losses.size / max(1, weights.size)  # of losses for each weight
    losses = jnp.mean(losses.reshape(*weights.shape, -1), -1)
    mean, total = _divide(jnp.sum(losses * weights), jnp.sum(weights))
    return mean, total * number


def _divide(total: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
    """Return a ``WeightedLoss`` as a mean, and its weight: see ``Objective``."""
    dtype = jnp.promote_types(jnp.result_type(total), jnp.float32)
    weight = jax.lax.stop_gradient(jnp.asarray(weight, dtype))
    return total / (weight + (weight == 0)), weight


_LOSSES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "mse": _mse,
    "cross_entropy": _cross_entropy,
    "bce": _bce,
}


# -- modes ----------------------------------------------------------------------------------------


def _train(model: nnx.Module) -> None:
    """Put a model into training mode, except for the modules that the user has frozen.

    ``Module.train`` alone would unfreeze modules that the user put into evaluation mode. An example
    is the batch normalization of a network that is fine-tuned. But if all flags are set, the user
    has called ``model.eval()``, and the whole model is trained.
    """
    frozen = _list_set_flags(model)
    model.train()
    if len(frozen) < len(list(_list_flags(model))):
        _put_flags(model, frozen)


def _list_set_flags(model: nnx.Module) -> list[str]:
    """Return the names of the flags that are set."""
    return [name for name, module, flag in _list_flags(model) if getattr(module, flag)]


def _put_flags(model: nnx.Module, names: Collection[str]) -> None:
    """Set these flags, and unset all others; a flag with the right value is not written."""
    for name, module, flag in _list_flags(model):
        if bool(getattr(module, flag)) != (name in names):
            setattr(module, flag, name in names)


def _list_flags(model: nnx.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield each flag of a model: ``'layers/0/norm/use_running_average'``, the module, the name."""
    for path, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Module):
            for flag in _FLAGS:
                if hasattr(module, flag):
                    yield "/".join(map(str, (*path, flag))), module, flag
