"""What an optimizer of Keras' keeps for each variable that it trains: its slots.

Keras builds an optimizer once, for a fixed list of variables, and it takes gradients of any of
them. So one that is frozen and thawed keeps its slots. What is thawed that was frozen when the
optimizer was built gets its own later, in the same optimizer, of which the user may hold the
learning rate: https://github.com/keras-team/keras/issues/6405
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from d2ldev.errors import UnsupportedValueError, describe

# These are rebuilt by themselves, and hold no slots.
_NO_SLOTS = ("_variables", "_trainable_variables")


def trained_by(optimizer: Any) -> list[tf.Variable]:
    """The variables for which an optimizer was built, in its order."""
    return [_plain(x) for x in optimizer._trainable_variables] if optimizer.built else []


def as_keras_has_them(model: Any, variables: Iterable[tf.Variable]) -> list[Any]:
    """The variables of a model, as its optimizer is built for them."""
    own = {id(_plain(x)): x for x in model.variables}
    return [own.get(id(x), x) for x in variables]


def _plain(variable: Any) -> tf.Variable:
    return variable._value if isinstance(variable, keras.Variable) else variable


_is_trainable = attrgetter("trainable")


def flagged_in(model: Any) -> list[Any]:
    """What says whether it is trained: the layers of a model, and their variables.

    The variables of a ``tf.Module`` are trainable or not for ever.
    """
    if not isinstance(model, keras.Layer):
        return []
    return [*model._flatten_layers(), *model.variables]


def flags_of(flagged: Iterable[Any]) -> list[bool]:
    """What each of them says."""
    return list(map(_is_trainable, flagged))


def build_or_extend(optimizer: Any, model: Any) -> None:
    """Build an optimizer for what is trainable, or let one that is built train it, too.

    Raises:
        UnsupportedValueError: if it was built for another model, or would forget what it has
            learned; nothing has changed then, nor after an error of its own ``build``.
    """
    trainable = list(model.trainable_variables)
    if not optimizer.built:
        with _put_back_on_error(_Before.of_chain(optimizer)):
            optimizer.build(trainable)
        return
    known = {id(x) for x in trained_by(optimizer)}
    if known.isdisjoint(id(_plain(x)) for x in model.variables):
        name = type(optimizer).__name__
        raise UnsupportedValueError(
            f"train with the optimizer {name}",
            f"it was built for none of the variables of {describe(model)}",
            f"keras.optimizers.{name}(...), not built yet",
        )
    frozen_since = known - {id(_plain(x)) for x in trainable}
    if frozen_since:
        _check_can_change(optimizer)
    new = [x for x in trainable if id(_plain(x)) not in known]
    if new:
        rebuild(optimizer, [*optimizer._trainable_variables, *new])


def rebuild(optimizer: Any, variables: Sequence[Any]) -> Callable[[], None]:
    """Build an optimizer for these variables and no others; it keeps the slots of those it knew.

    Returns:
        What undoes it.

    Raises:
        UnsupportedValueError: if it would forget what it has learned; nothing has changed then, nor
            after an error of its own ``build``.
    """
    _check_can_change(optimizer)
    befores = _Before.of_chain(optimizer)
    with _put_back_on_error(befores):
        for before in befores:
            before.optimizer.built = False
            before.optimizer._trainable_variables_indices = {}
        optimizer.build(list(variables))
        if not all(before.merge() for before in befores):
            raise UnsupportedValueError(
                "train with other variables than at the beginning",
                f"{type(optimizer).__name__} was built for those, and keeps what it learns in a "
                "way of its own",
                "optimizer.build(net.trainable_variables) before anything is frozen",
            )
    return partial(_put_back, befores)


@contextmanager
def _put_back_on_error(befores: Sequence[_Before]) -> Iterator[None]:
    """A ``build`` that raises, or is interrupted, leaves an optimizer in pieces."""
    try:
        yield
    except BaseException:
        _put_back(befores)
        raise


def _put_back(befores: Iterable[_Before]) -> None:
    for before in befores:
        before.put_back()


def _check_can_change(optimizer: Any) -> None:
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise UnsupportedValueError(
            "train with other variables than at the beginning",
            "a MultiOptimizer takes the gradients of all that it was built for, and no others",
            "freeze and thaw before the run begins, or train with one optimizer",
        )


def _chain(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


class _Before(NamedTuple):
    """An optimizer as it was before it was built anew.

    Args:
        optimizer: itself.
        attributes: what it had, by name.
        variables: all of its own.
    """

    optimizer: Any
    attributes: dict[str, Any]
    variables: list[Any]

    @classmethod
    def of_chain(cls, optimizer: Any) -> list[_Before]:
        """Of an optimizer, and of those that it wraps."""
        return [
            # A ``build`` writes into that one.
            cls(
                x,
                vars(x) | {"_trainable_variables_indices": {**x._trainable_variables_indices}},
                list(x._variables),
            )
            for x in _chain(optimizer)
        ]

    def put_back(self) -> None:
        """Undo that it was built anew."""
        for name in vars(self.optimizer).keys() - self.attributes.keys():
            delattr(self.optimizer, name)
        for name, old in self.attributes.items():
            if name != "_variables":
                setattr(self.optimizer, name, old)
        _hold(self.optimizer, self.variables)

    def merge(self) -> bool:
        """Put what it had in the place of what it has made anew for the same.

        Returns:
            Whether there is such a place for all of it.
        """
        is_whole = True
        attributes = vars(self.optimizer)
        keys = [id(_plain(x)) for x in attributes["_trainable_variables"]]
        known = [id(_plain(x)) for x in self.attributes["_trainable_variables"]]
        made = self.optimizer._variables[len(self.variables) :]
        instead: dict[int, Any] = {}
        replaced: set[int] = set()
        for name, old in self.attributes.items():
            new = attributes.get(name)
            if new is old or name in _NO_SLOTS:
                continue
            if isinstance(old, keras.Variable) and isinstance(new, keras.Variable):
                setattr(self.optimizer, name, old)
                instead[id(new)] = old
                replaced.add(id(old))
            elif _are_slots(old, known) and _are_slots(new, keys):
                slots = dict(zip(known, old, strict=True))
                both = [slots.get(key, x) for key, x in zip(keys, new, strict=True)]
                setattr(self.optimizer, name, both)
                instead.update(zip(map(id, new), both, strict=True))
                replaced.update(map(id, old))
            elif any(isinstance(x, keras.Variable) for x in keras.tree.flatten(old)):
                is_whole = False
        # In Keras' order, as if it had been built for these at once.
        kept = [x for x in self.variables if id(x) not in replaced]
        _hold(self.optimizer, [*kept, *(instead.get(id(x), x) for x in made)])
        return is_whole


def _hold(optimizer: Any, variables: Sequence[Any]) -> None:
    """Let an optimizer have these variables of its own, and no others.

    The list in which TensorFlow tracks them can be appended to, and not be changed otherwise:
    https://github.com/tensorflow/tensorflow/issues/36916
    """
    tracker = vars(optimizer).pop("_tracker")
    optimizer._variables = []
    optimizer._variables.extend(variables)
    optimizer._tracker = tracker
    is_tracked, _ = tracker.config["variables"]
    tracker.config["variables"] = is_tracked, optimizer._variables
    tracker.stored_ids["variables"] = {id(x) for x in variables}


def _are_slots(value: Any, keys: Sequence[int]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(keys)
        and all(x is None or isinstance(x, keras.Variable) for x in value)
    )


def apply(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Take a step with the gradients of some of the variables that an optimizer knows."""
    with _averaging_only(optimizer, {id(_plain(x)) for x in variables}):
        optimizer.apply(gradients, variables)


@contextmanager
def _averaging_only(optimizer: Any, keys: set[int]) -> Iterator[None]:
    """An optimizer that averages variables writes the average into all that it knows.

    As ``BaseOptimizer.apply`` has it, at its end, in Keras' ``src/optimizers/base_optimizer.py``:
    it averages its ``_trainable_variables``, and not the variables that it was given.
    """
    averaging = [each for each in _chain(optimizer) if each.use_ema]
    names = "_trainable_variables", "_model_variables_moving_average"
    before = [{name: vars(each)[name] for name in names} for each in averaging]
    for each in averaging:
        is_trained = [id(_plain(x)) in keys for x in each._trainable_variables]
        for name in names:
            both = zip(vars(each)[name], is_trained, strict=True)
            vars(each)[name] = [x for x, is_one in both if is_one]
    try:
        yield
    finally:
        for each, attributes in zip(averaging, before, strict=True):
            vars(each).update(attributes)
