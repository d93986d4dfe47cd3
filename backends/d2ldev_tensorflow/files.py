"""Files: the layers of a ``keras.Sequential``, and what an optimizer has learned.

Kernels are ``(*window, in, out)``. Channels come last in what a convolution makes. A model's input
that is flattened has the caller's order, which is the same in every framework.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.framework import Files, Framework, Layer, Tensor
from d2ldev.framework.files import turn, turn_after_flattening
from d2ldev.operations import moving, placing
from d2ldev_tensorflow.models import inner_optimizers, is_of_keras

# Modules of Keras whose layers have no parameters, and keep the order of their input.
_WITHOUT_PARAMETERS = (
    *("keras.src.layers.activations.", "keras.src.layers.pooling."),
    *("keras.src.layers.core.input_layer", "keras.src.layers.regularization."),
)


class TensorFlowFiles(Files):
    """TensorFlow's tensors, Keras' models and optimizers in files."""

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework.tensors)
        self._framework = framework

    def borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        self.tensors.device_of(x)  # a tensor without bytes is refused, by name
        return np.asarray(self.tensors.read(x.value() if isinstance(x, tf.Variable) else x))

    def adopt(self, array: np.ndarray[Any, Any], dtype: str, native: Any) -> Tensor:
        # Of the array's own dtype: one copy less.
        return self.tensors.from_data(array, None, native)

    def layers(self, model: Any) -> Sequence[Layer] | None:
        keras: Any = sys.modules.get("keras")
        is_keras = hasattr(keras, "Sequential")
        if not is_keras or type(model) is not keras.Sequential or not model.built:
            return None
        of = keras.layers
        layers = []
        channels = 0  # in the last axis before it was flattened, if it was
        has_channels = False
        for layer in model.layers:
            if getattr(layer, "data_format", None) == "channels_first":
                return None  # Keras' Flatten transposes these, and a layer beside it may not
            if type(layer) is of.Flatten:
                if has_channels:
                    shape = layer.input.shape
                    channels = shape[-1] if len(shape) > 2 else 0  # or nothing is flattened
            elif type(layer) is of.Dense:
                layout: Any = turn
                if channels:
                    layout = partial(turn_after_flattening, channels=channels)
                layers.append(_layer(layer, layout))
                channels = 0
            elif type(layer) in (of.Conv1D, of.Conv2D, of.Conv3D):
                layers.append(_layer(layer, turn))
                has_channels = True
            elif layer.weights or not type(layer).__module__.startswith(_WITHOUT_PARAMETERS):
                return None  # it may put what it is given into another order
        return layers

    def inputs(self, model: Any) -> Any:
        if not is_of_keras(model, "Layer"):
            return None
        try:
            return json.loads(json.dumps(model.get_build_config()))
        except Exception:  # whatever a class of the user's raises
            return None

    def complete(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        inputs: Any,
        undo: Callable[..., object],
    ) -> tuple[str, ...]:
        if is_of_keras(model, "Layer") and not model.built and self._lacks_some(model, shapes):
            if inputs is not None and _fits(model, inputs, shapes):
                undo(_restore_unbuilt(model))
                model.build_from_config(_with_tuples(inputs))
            elif not model.weights:
                raise ValueError("it is not built: call it on a batch first, as model(x)")
        # An optimizer makes its variables, all zeros, with the first step of ``fit``, for what is
        # trainable then: so it has them sooner only if it gets their values.
        optimizer: Any = getattr(model, "optimizer", None)
        there = _of_optimizer(shapes)
        if is_of_keras(optimizer, "Optimizer") and not optimizer.built and there:
            unbuild = _restore_unbuilt(optimizer)
            undo(unbuild)
            optimizer.build(model.trainable_variables)
            named = placing.list_named_tensors(self._framework, optimizer)
            if there != {f"optimizer.{name}" for name, _ in named}:
                unbuild()
        return ()

    def _lacks_some(self, model: Any, names: Iterable[str]) -> bool:
        """Return whether a file has tensors that a model has not, but for those of an optimizer."""
        mine = dict(placing.list_named_tensors(self._framework, model))
        return not {*names} - _of_optimizer(names) <= mine.keys()

    def optional_names(
        self, model: Any, mine: Mapping[str, Tensor], theirs: Set[str], *, is_strict: bool
    ) -> Set[str]:
        here, there = _of_optimizer(mine), _of_optimizer(theirs)
        if not is_of_keras(model, "Model"):
            return frozenset()
        is_of_another = _is_of_another(model, here, there)
        # What two optimizers call by one name need not be the same: the momentum of SGD is a sum of
        # gradients, and that of Adam a mean.
        if not is_strict and here and is_of_another:
            return there
        # As in Keras, the optimizer of a compiled model stays as it is if the file has no state of
        # it, and its state is passed over if the model is not compiled.
        # What every optimizer has, before its first step too.
        is_without = is_of_another and all(
            name.endswith((".iteration", ".learning_rate")) for name in there
        )
        return here | there if not here or is_without else frozenset()

    def state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        if not is_of_keras(optimizer, "Optimizer"):
            return None
        # By the order of the variables: their names have those of layers in them, which count on
        # from model to model.
        return {"class": _class_of(optimizer), "variables": self._variables_of(optimizer)}

    def prepare_state(self, optimizer: Any, state: Any) -> Callable[[], None]:
        if not optimizer.built:
            raise ValueError(
                "it has not been built: call optimizer.build(model.trainable_variables) first"
            )
        if not isinstance(state, Mapping) or state.keys() != {"class", "variables"}:
            raise ValueError(f"{describe(state)} is not a state of an optimizer of Keras'")
        variables, values = self._variables_of(optimizer), state["variables"]
        here = _class_of(optimizer), [(tuple(x.shape), x.dtype.name) for x in variables]
        there = state["class"], [(tuple(x.shape), x.dtype.name) for x in values]
        if here != there:
            raise ValueError(f"its class and variables: {here}, {there} in the state")
        framework = self._framework
        pairs = [
            (variable, moving.to(framework, x, framework.tensors.device_of(variable)))
            for variable, x in zip(variables, values, strict=True)
        ]

        def put() -> None:
            for variable, value in pairs:
                framework.models.write(variable, value)

        return put

    def _variables_of(self, optimizer: Any) -> list[tf.Variable]:
        named = placing.list_named_tensors(self._framework, optimizer)
        for name, x in named:
            if not isinstance(x, tf.Variable):
                cls = type(optimizer).__name__
                raise UnsupportedValueError(
                    f"save the state of the optimizer {cls}",
                    f"its {name} is not a variable, and nothing can be written to it",
                    f"tf.Variable(...) in {cls}.build",
                )
        # What is kept under two names is one variable.
        return list({id(x): x for _, x in named}.values())


def _of_optimizer(names: Iterable[str]) -> set[str]:
    """Return the names that are those of the optimizer of a compiled model."""
    return {name for name in names if name.startswith("optimizer.")}


def _is_of_another(model: Any, here: Set[str], there: Set[str]) -> bool:
    """Return whether a state is that of another optimizer than a model's, or of fewer variables."""
    # One that is still not built was not built for the file.
    return here != there or not getattr(getattr(model, "optimizer", None), "built", False)


def _restore_unbuilt(obj: Any) -> Callable[[], None]:
    """Return a function that makes a layer or an optimizer as it is now, before it is built.

    Building sets attributes, and adds to the containers in them.
    """
    keras: Any = sys.modules["keras"]
    tracker = sys.modules["keras.src.utils.tracking"].Tracker  # private; it knows all variables
    kept: dict[int, tuple[Any, Any]] = {}

    def keep(held: Any) -> None:
        x = getattr(held, "__wrapped__", held)  # of a dict that TensorFlow watches
        # An OrderedDict cannot be changed past its own methods.
        kinds = () if issubclass(type(x), OrderedDict) else (list, dict, set)
        base = next((kind for kind in kinds if issubclass(type(x), kind)), None)
        is_holder = base or isinstance(x, (tuple, keras.Layer, keras.Optimizer, tracker))
        if id(x) in kept or not is_holder:
            return
        kept[id(x)] = x, None if base is None else base(x)
        inner = x.values() if base is dict else x if base or isinstance(x, tuple) else ()
        for each in (*inner, getattr(held, "__dict__", None)):
            keep(each)

    def unbuild() -> None:
        for x, content in kept.values():
            # Past their own methods, which look for state to track.
            if content is not None:
                type(content).clear(x)
                (list.extend if type(content) is list else type(content).update)(x, content)

    keep(obj)
    return unbuild


def _with_tuples(config: Any) -> Any:
    """Return a build configuration with tuples for shapes, which are lists in JSON."""
    if isinstance(config, Mapping):
        return {key: _with_tuples(value) for key, value in config.items()}
    return tuple(map(_with_tuples, config)) if isinstance(config, list) else config


def _fits(model: Any, inputs: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a model, built for these inputs, has weights of shapes that a file has.

    It is built for a moment, and no weight gets memory: the inputs may be whatever a file says.
    """
    keras: Any = sys.modules["keras"]
    unbuild = _restore_unbuilt(model)
    found: Counter[tuple[int, ...]] = Counter()
    with warnings.catch_warnings(), keras.StatelessScope(initialize_variables=False):
        warnings.simplefilter("ignore")  # one says that it cannot be built
        try:
            model.build_from_config(_with_tuples(inputs))
            found.update(tuple(x.shape) for x in model.weights)
        except Exception:  # whatever a class of the user's raises
            return False
        finally:
            unbuild()
            # Private; Keras gives memory to what is in there at the end of its next scope.
            sys.modules["keras.src.backend.common.global_state"].set_global_attribute(
                "uninitialized_variables", []
            )
    return bool(found) and found <= Counter(shapes.values())


def _class_of(optimizer: Any) -> str:
    """Return the name of an optimizer's class, with those of the optimizers that it wraps."""
    inner = ", ".join(_class_of(each) for _, each in inner_optimizers(optimizer))
    name = type(optimizer).__name__
    return f"{name}({inner})" if inner else name


def _layer(layer: Any, layout: Any) -> Layer:
    bias = layer.bias
    return Layer(layer._kernel._value, None if bias is None else bias._value, layout)
