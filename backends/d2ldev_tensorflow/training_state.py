"""What the next step of a TensorFlow ``Learner`` depends on, as a nesting, and back.

Variables go by their order: their names have those of layers in them, which count on from model to
model. A model that is not built yet has few of them, such as the seeds of its dropout: a state of
it is one of the beginning, and the initializers make the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.interface import Backend
from d2ldev.operations.placing import Inventory
from d2ldev_tensorflow import slots

State = Mapping[str, Any]


def state_of(backend: Backend, parts: Mapping[str, Any], is_built: bool) -> dict[str, Any]:
    """The model, the optimizer with its class, and whether they have all of their variables."""
    model, optimizer = (
        [tf.convert_to_tensor(x) for x in variables_of(backend, parts[part])]
        for part in ("model", "optimizer")
    )
    return {
        "built": is_built,
        "trainable": slots.flags_of(slots.flagged_in(parts["model"])),
        "model": model,
        "optimizer": {
            "class": _class_of(parts["optimizer"]),
            "trained": _trained(backend, parts),
            "variables": optimizer,
        },
    }


def _trained(backend: Backend, parts: Mapping[str, Any]) -> list[int]:
    """Which of the model's variables the optimizer was built for, by their number; -1 is another's.

    More than are trainable, where some were frozen since.
    """
    numbers = {id(x): i for i, x in enumerate(variables_of(backend, parts["model"]))}
    return [numbers.get(id(x), -1) for x in slots.trained_by(parts["optimizer"])]


def variables_of(backend: Backend, obj: Any) -> list[tf.Variable]:
    """All that a step may change: also the state of BatchNorm and of random generators."""
    entries = Inventory(backend, obj, "read a training state").entries
    unique = {id(x): x for _, x in entries}
    return [x for x in unique.values() if isinstance(x, tf.Variable)]


def _class_of(optimizer: Any) -> str:
    """Its name; of one that wraps another, with that one's."""
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None else f"{name}({_class_of(inner)})"


def taken(backend: Backend, optimizer: Any, saved: Any) -> dict[str, Any]:
    """A state as it is kept until there is a model for it; what can be checked is.

    Raises:
        CheckpointError: if it is no state, or one of another optimizer.
    """
    expected = {
        "built": bool,
        "trainable": (list, tuple),
        "model": (list, tuple),
        "optimizer": Mapping,
    }
    if not isinstance(saved, Mapping) or saved.keys() != expected.keys():
        raise _refusal(f"{describe(saved)} is none of a TensorFlow learner")
    for name, kind in expected.items():
        if not isinstance(saved[name], kind):
            raise _refusal(f"its {name} is {describe(saved[name])}")
    if any(type(flag) is not bool for flag in saved["trainable"]):
        raise _refusal("what it says of what is trainable is neither True nor False")
    of_optimizer = saved["optimizer"]
    here, there = _class_of(optimizer), of_optimizer.get("class")
    if here != there:
        raise _refusal(f"the optimizer is {here}, and {there!r} in the state")
    trained = of_optimizer.get("trained")
    if not isinstance(trained, (list, tuple)) or not all(type(i) is int for i in trained):
        raise _refusal(f"its optimizer was built for {describe(trained)}, and no list of numbers")
    return {
        "built": saved["built"],
        "trainable": list(saved["trainable"]),
        "model": _tensors(backend, "model", saved["model"]),
        "optimizer": {
            "class": there,
            "trained": list(trained),
            "variables": _tensors(backend, "optimizer", of_optimizer.get("variables")),
        },
    }


def _tensors(backend: Backend, part: str, saved: Any) -> list[Any]:
    """Tensors that nobody writes into, where they are."""
    if not isinstance(saved, (list, tuple)):
        raise _refusal(f"its {part} has {describe(saved)}, and no list of tensors")
    for i, x in enumerate(saved):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise _refusal(f"tensor {i} of its {part} is {describe(x)}")
    try:
        return [
            x if isinstance(x, tf.Tensor) else backend.asarray(x, device=backend.cpu())
            for x in saved
        ]
    except UnsupportedValueError as error:
        raise _refusal(f"its {part} has what is no tensor: {error}") from error


def putting(
    backend: Backend, parts: Mapping[str, Any], is_built: bool, saved: State
) -> Callable[[], None]:
    """What gives a model and an optimizer a state that was ``taken``.

    Raises:
        CheckpointError: if it is one of others.
    """
    if is_built and not saved["built"]:
        raise _refusal(
            "it was taken before the first batch had built the model, which has been built since: "
            "the initial values of its variables are in no state",
            "make the model anew, and do not call it before",
        )
    model, optimizer, of_optimizer = parts["model"], parts["optimizer"], saved["optimizer"]
    variables = variables_of(backend, model)
    _check("model", variables, saved["model"])
    flagged, flags = slots.flagged_in(model), saved["trainable"]
    if len(flags) != len(flagged):
        raise _refusal(f"it has {len(flags)} layers and variables, and the model {len(flagged)}")
    undo = _rebuild(backend, parts, of_optimizer["trained"])
    try:
        own = variables_of(backend, optimizer)
        _check("optimizer", own, of_optimizer["variables"])
        pairs = [
            (variable, backend.asarray(x, device=backend.device_of(variable)))
            for targets, tensors in ((variables, saved["model"]), (own, of_optimizer["variables"]))
            for variable, x in zip(targets, tensors, strict=True)
        ]
    except BaseException:
        undo()
        raise

    def put() -> None:
        for variable, value in pairs:
            backend._write(variable, value)
        for each, flag in zip(flagged, flags, strict=True):
            if each.trainable != flag:
                each.trainable = flag

    return put


def _rebuild(
    backend: Backend, parts: Mapping[str, Any], trained: Sequence[int]
) -> Callable[[], None]:
    """Build the optimizer for the variables that the state's was built for; returns what undoes it.

    A run that has thawed some began with fewer.
    """
    model, optimizer = parts["model"], parts["optimizer"]
    current = _trained(backend, parts)
    if current == trained:
        return lambda: None
    variables = variables_of(backend, model)
    if (
        -1 in current
        or len({*trained}) < len(trained)
        or not {*trained} <= {*range(len(variables))}
    ):
        raise _refusal(f"its optimizer was built for the variables {trained}, here for {current}")
    wanted = slots.as_keras_has_them(model, [variables[i] for i in trained])
    try:
        with backend.on(backend.device_of(variables[0])):
            return slots.rebuild(optimizer, wanted)
    except UnsupportedValueError as error:
        raise _refusal(f"its optimizer was built for other variables: {error}") from error


def _check(part: str, variables: Sequence[tf.Variable], saved: Sequence[Any]) -> None:
    if len(saved) != len(variables):
        raise _refusal(f"its {part} has {len(saved)} tensors, and {len(variables)} are expected")
    for i, (x, variable) in enumerate(zip(saved, variables, strict=True)):
        expected, found = ((tuple(each.shape), each.dtype.name) for each in (variable, x))
        if found != expected:
            raise _refusal(f"tensor {i} of its {part} is {found}, and {expected} is expected")


def _refusal(
    problem: str, fix: str = "resume with the model and the optimizer that the run began with"
) -> CheckpointError:
    return CheckpointError("restore a training state", problem, fix)
