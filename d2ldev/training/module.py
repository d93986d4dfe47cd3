"""D2L's ``Module`` and ``DataModule``: the parts of a training that the model or the data define.

Source: D2L, section 3.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from d2ldev.errors import UnsupportedValueError, describe, text_of
from d2ldev.typing import DataModule, Metrics

if TYPE_CHECKING:
    from typing_extensions import TypeIs

METHODS = ("training_step", "validation_step")


def has_state_outside(model: Any) -> bool:
    """Tell whether a method for steps takes ``params`` and ``state``, as the book's do in JAX.

    Such a model holds no parameters: ``trainer.state`` has them.
    """
    return any(_operands_of(getattr(model, name, None)) >= {"params", "state"} for name in METHODS)


def _operands_of(method: Any) -> set[str]:
    try:
        return set(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return set()


def read_arguments(frame: FrameType, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a frame's method for ``save_hyperparameters``.

    The book calls ``save_hyperparameters`` without arguments, so they come from the frame.

    Args:
        frame: the frame of the method.
        ignore: names to leave out.
    """
    left_out = {*ignore, "self"}
    return {
        name: value
        for name, value in frame.f_locals.items()
        if name not in left_out and not name.startswith("_")
    }


def is_data_module(data: object) -> TypeIs[DataModule]:
    """Return whether data is a D2L ``DataModule``, which has loaders."""
    return callable(getattr(data, "train_dataloader", None))


def find_loader(data: Iterable[Any] | DataModule, *names: str) -> Iterable[Any]:
    """Return the batches of a ``DataModule`` for one use, and other data itself.

    Args:
        data: the data of ``Trainer.validate`` or ``Trainer.predict``.
        names: the methods that return such batches. The first one that it has is called.

    Raises:
        UnsupportedValueError: if a ``DataModule`` lacks all of them.
    """
    for name in names:
        if callable(getattr(data, name, None)):
            batches: Iterable[Any] = getattr(data, name)()
            return batches
    if is_data_module(data):
        raise UnsupportedValueError(
            f"go through data={describe(data)}",
            f"it has no {' and no '.join(names)}",
            f"def {names[-1]}(self): ..., or data={type(data).__name__}().train_dataloader()",
        )
    return data


def find_own_settings(
    model: Any,
    loss: Any,
    optimizer: Any,
    metrics: Metrics,
    *,
    trainer: Any,
) -> dict[str, Any]:
    """Return ``loss``, ``optimizer`` and ``methods`` for ``backend.learner``.

    Args:
        model: a placed model. A D2L ``Module`` has ``training_step(batch)``,
            ``validation_step(batch)``, ``loss(prediction, y)`` or ``configure_optimizers()``.
        loss, optimizer: the arguments of ``fit``. None takes the model's own, and stays None
            without one.
        metrics: the argument of ``fit``; an error with a ``training_step``.
        trainer: becomes ``model.trainer`` for these methods.

    Raises:
        UnsupportedValueError: if an argument would be ignored, or a method cannot be called.
    """
    in_step, in_evaluation = (callable(getattr(model, name, None)) for name in METHODS)
    configures = callable(getattr(model, "configure_optimizers", None))
    if configures or in_step:
        restore_loss(model)
    methods = None
    if in_step or in_evaluation:
        methods = METHODS if in_evaluation else (METHODS[0],) * 2
        _check_methods(model, methods, loss, metrics)
    if configures or methods is not None:
        model.trainer = trainer
    if optimizer is None and configures:
        optimizer = model.configure_optimizers()
        if optimizer is None:
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "its configure_optimizers returned None",
                "return the framework's own optimizer from it",
            )
    if loss is None:
        method = getattr(model, "loss", None) if configures or in_step else None
        loss = "mse" if methods is not None else method if callable(method) else None
    return {"loss": loss, "optimizer": optimizer, "methods": methods}


def restore_loss(model: Any) -> None:
    """Restore a model's method ``loss`` if an attribute that is None hides it.

    Keras sets that attribute: https://github.com/keras-team/keras/blob/master/keras/src/trainers/trainer.py
    """
    method = getattr(type(model), "loss", None)
    if callable(method) and getattr(model, "loss", None) is None:
        model.loss = method.__get__(model)


def _check_methods(model: Any, methods: Sequence[str], loss: Any, metrics: Metrics) -> None:
    name = type(model).__name__
    attempted = f"train the {name}, which has a {methods[-1]} of its own,"
    if loss is not None or metrics:
        what = "loss" if loss is not None else "metrics"
        raise UnsupportedValueError(
            f"{attempted} with {what}={describe(loss if loss is not None else metrics)}",
            "these methods return the loss, and no prediction to compare",
            f"leave {what}= out, or use a model without {' and '.join(METHODS)}",
        )
    operands = ("params", "batch", "state") if has_state_outside(model) else ("batch",)
    for method in methods:
        try:
            inspect.signature(getattr(model, method)).bind(*operands)
        except (AttributeError, TypeError) as error:
            raise UnsupportedValueError(
                attempted,
                f"{name}.{method} cannot be called with a batch: {text_of(error)}",
                f"def {method}(self, {', '.join(operands)}): ...",
            ) from error
