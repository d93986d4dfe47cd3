"""Files: the layers of a ``keras.Sequential``, and the state of an optimizer.

Kernels are ``(*window, in, out)``. A convolution puts channels last. If a model flattens its input,
the input has the caller's order, which is the same in every framework.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from d2ldev import UnsupportedValueError
from d2ldev.framework import (
    Files,
    Framework,
    Layer,
    Tensor,
    describe,
    list_named_tensors,
    to,
    turn,
    turn_after_flattening,
)
from d2ldev_tensorflow.models import (
    all_optimizers,
    assign,
    find_slots,
    inner_optimizers,
    is_of_keras,
    list_trained,
    value_of,
)
from d2ldev_tensorflow.tensors import share_with_numpy

# Modules of Keras whose layers have no parameters, and keep the order of their input.
_WITHOUT_PARAMETERS = (
    *("keras.src.layers.activations.", "keras.src.layers.pooling."),
    *("keras.src.layers.core.input_layer", "keras.src.layers.regularization."),
)


class TensorFlowFiles(Files):
    """TensorFlow's tensors, Keras models and optimizers in files."""

    def __init__(self, framework: Framework) -> None:
        super().__init__(framework.tensors)
        self._framework = framework

    def borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        self.tensors.device_of(x)  # refuses a tensor without bytes, by name
        value = x.value() if isinstance(x, tf.Variable) else x
        return share_with_numpy(value)

    def adopt(self, array: np.ndarray[Any, Any], dtype: str, native: Any) -> Tensor:
        # The array's own dtype saves a copy.
        return self.tensors.from_data(array, None, native)

    def layers(self, model: Any) -> Sequence[Layer] | None:
        keras: Any = sys.modules.get("keras")
        is_keras = hasattr(keras, "Sequential")
        if not is_keras or type(model) is not keras.Sequential or not model.built:
            return None
        of = keras.layers
        layers = []
        channels = 0  # of the last axis before it was flattened, if it was
        has_channels = False
        for layer in model.layers:
            if getattr(layer, "data_format", None) == "channels_first":
                return None  # Keras's Flatten transposes these, and another layer may not
            if type(layer) is of.Flatten:
                if has_channels:
                    shape = layer.input.shape
                    channels = shape[-1] if len(shape) > 2 else 0  # or the layer flattens nothing
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
                return None  # the layer may reorder its input
        return layers

    def complete(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        undo: Callable[..., object],
        *,
        is_strict: bool,
    ) -> tuple[Collection[str], Collection[str]]:
        is_unbuilt = is_of_keras(model, "Layer") and not model.built
        if is_unbuilt and (is_strict or not model.weights) and self._lacks_some(model, shapes):
            raise ValueError("it is not built: call it on a batch first, as model(x)")
        # An optimizer makes its variables with the first step of ``fit``, all zeros, for the
        # variables that are trainable then. So it is built here only if the file has its values.
        optimizer: Any = getattr(model, "optimizer", None)
        there = _of_optimizer(shapes)
        if is_of_keras(optimizer, "Optimizer") and not optimizer.built and there:
            unbuild = _restore_unbuilt(optimizer)
            undo(unbuild)
            optimizer.build(model.trainable_variables)
            named = list_named_tensors(self._framework, optimizer)
            if there != {f"optimizer.{name}" for name, _ in named}:
                unbuild()
        return (), self._find_optional(model, there, is_strict=is_strict)

    def _lacks_some(self, model: Any, names: Iterable[str]) -> bool:
        """Return whether a model lacks tensors of a file, apart from its optimizer's."""
        mine = dict(list_named_tensors(self._framework, model))
        return not {*names} - _of_optimizer(names) <= mine.keys()

    def _find_optional(self, model: Any, there: Set[str], *, is_strict: bool) -> Set[str]:
        """Return the names of an optimizer's tensors that are left alone, here and in a file."""
        if not is_of_keras(model, "Model"):
            return frozenset()
        is_compiled = getattr(model, "optimizer", None) is not None
        named = list_named_tensors(self._framework, model) if is_compiled else ()
        here = _of_optimizer(name for name, _ in named)
        is_of_another = _is_of_another(model, here, there)
        # Two optimizers may use one name for different values: SGD's momentum is a sum, Adam's is a
        # mean of gradients.
        if not is_strict and here and is_of_another:
            return there
        # As in Keras, a compiled model keeps its optimizer's state if the file has none. The file's
        # state is ignored if the model is not compiled. Every optimizer has these two names, also
        # before its first step.
        is_without = is_of_another and all(
            name.endswith((".iteration", ".learning_rate")) for name in there
        )
        return here | there if not here or is_without else frozenset()

    def state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        if not _is_optimizer(optimizer):
            return None
        # The order of the variables identifies them. Their names contain names of layers, and Keras
        # numbers those through all models of a process.
        return {"class": _class_of(optimizer), "variables": self._variables_of(optimizer)}

    def list_parameters(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        # A ``MultiOptimizer`` has none of its own, and each optimizer inside it has some.
        lists = map(list_trained, all_optimizers(optimizer)) if _is_optimizer(optimizer) else ()
        found = {id(x): x for each in lists for x in each}.values()
        return [("", value_of(x)) for x in found]

    def prepare_state(
        self, optimizer: Any, state: Any, order: Sequence[int] | None = None
    ) -> Callable[[], None]:
        if not optimizer.built:
            raise ValueError(
                "it has not been built: call optimizer.build(model.trainable_variables) first"
            )
        if not isinstance(state, Mapping) or state.keys() != {"class", "variables"}:
            raise ValueError(f"{describe(state)} is not the state of a Keras optimizer")
        variables, values = self._variables_of(optimizer), state["variables"]
        if order is not None:
            values = _reorder(optimizer, variables, values, order)
        here = _class_of(optimizer), [(tuple(x.shape), x.dtype.name) for x in variables]
        there = state["class"], [(tuple(x.shape), x.dtype.name) for x in values]
        if here != there:
            raise ValueError(f"its class and variables: {here}, {there} in the state")
        framework = self._framework
        pairs = [
            (variable, to(framework, x, framework.tensors.device_of(variable)))
            for variable, x in zip(variables, values, strict=True)
        ]

        def put() -> None:
            for variable, value in pairs:
                assign(variable, value)

        return put

    def _variables_of(self, optimizer: Any) -> list[tf.Variable]:
        named = list_named_tensors(self._framework, optimizer)
        for name, x in named:
            if not isinstance(x, tf.Variable):
                cls = type(optimizer).__name__
                raise UnsupportedValueError(
                    f"save the state of the optimizer {cls}",
                    f"its {name} is not a variable, and nothing can be written to it",
                    f"tf.Variable(...) in {cls}.build",
                )
        # Two names may belong to one variable.
        return list({id(x): x for _, x in named}.values())


def _is_optimizer(x: Any) -> bool:
    return is_of_keras(x, "Optimizer")


def _reorder(
    optimizer: Any, variables: Sequence[Any], values: Sequence[Any], order: Sequence[int]
) -> list[Any]:
    """Return the values of a state for variables whose trained variables have another order.

    Raises:
        ValueError: if some of them may belong to several trained variables.
    """
    problem = "its variables are in another order: build it with them in the order of the file"
    slots: dict[int, tuple[int, int, str]] = {}
    for number, each in enumerate(all_optimizers(optimizer)):
        if len(list_trained(each)) != len(order):
            raise ValueError(problem)
        slots |= {key: (number, *slot) for key, slot in find_slots(each).items()}
    positions = {slots.get(id(x)): position for position, x in enumerate(variables)}
    found = []
    for position, x in enumerate(variables):
        if id(x) in slots:
            number, trained, name = slots[id(x)]
            position = positions[number, order[trained], name]
        elif x.shape.rank:
            raise ValueError(f"{problem}. Its {x.name} may belong to several")
        found.append(values[position])
    return found


def _of_optimizer(names: Iterable[str]) -> set[str]:
    """Return the names that belong to the optimizer of a compiled model."""
    return {name for name in names if name.startswith("optimizer.")}


def _is_of_another(model: Any, here: Set[str], there: Set[str]) -> bool:
    """Return whether a state belongs to another optimizer, or to fewer variables."""
    # An optimizer that is not built by now does not fit the file.
    return here != there or not getattr(getattr(model, "optimizer", None), "built", False)


def _restore_unbuilt(optimizer: Any) -> Callable[[], None]:
    """Return a function that returns an optimizer to its present state, not built.

    Building sets attributes, and adds to the containers in them.
    """
    keras: Any = sys.modules["keras"]
    tracker = sys.modules["keras.src.utils.tracking"].Tracker  # private; it has all variables
    kept: dict[int, tuple[Any, Any]] = {}

    def keep(held: Any) -> None:
        x = getattr(held, "__wrapped__", held)  # the dict inside TensorFlow's wrapper
        # An OrderedDict can only be changed through its own methods.
        kinds = () if issubclass(type(x), OrderedDict) else (list, dict, set)
        base = next((kind for kind in kinds if issubclass(type(x), kind)), None)
        is_holder = base or isinstance(x, (tuple, keras.Optimizer, tracker))
        if id(x) in kept or not is_holder:
            return
        kept[id(x)] = x, None if base is None else base(x)
        inner = x.values() if base is dict else x if base or isinstance(x, tuple) else ()
        for each in (*inner, getattr(held, "__dict__", None)):
            keep(each)

    def unbuild() -> None:
        for x, content in kept.values():
            # Not through their own methods, which look for state to track.
            if content is not None:
                type(content).clear(x)
                (list.extend if type(content) is list else type(content).update)(x, content)

    keep(optimizer)
    return unbuild


def _class_of(optimizer: Any) -> str:
    """Return the name of an optimizer's class, with the classes of the optimizers it wraps."""
    inner = ", ".join(_class_of(each) for _, each in inner_optimizers(optimizer))
    name = type(optimizer).__name__
    return f"{name}({inner})" if inner else name


def _layer(layer: Any, layout: Any) -> Layer:
    bias = layer.bias
    return Layer(value_of(layer.kernel), None if bias is None else value_of(bias), layout)
