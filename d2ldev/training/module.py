"""D2L's ``Module`` and ``DataModule``: what of a training the model and the data say themselves.

Source: D2L, section 3.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from d2ldev.errors import UnsupportedValueError, describe, text_of
from d2ldev.typing import DataModule

if TYPE_CHECKING:
    from typing_extensions import TypeIs

METHODS = ("training_step", "validation_step")


def arguments_of(frame: FrameType, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the method that a frame runs, as ``save_hyperparameters`` has them.

    The book's ``super().__init__(); self.save_hyperparameters()`` passes none.
    """
    left_out = {*ignore, "self"}
    return {
        name: value
        for name, value in frame.f_locals.items()
        if name not in left_out and not name.startswith("_")
    }


def is_data_module(data: object) -> TypeIs[DataModule]:
    """Tell whether data is a D2L ``DataModule``, which has loaders."""
    return callable(getattr(data, "train_dataloader", None))


def loader_of(data: Iterable[Any] | DataModule, *names: str) -> Iterable[Any]:
    """Return the batches that a ``DataModule`` has for a use; other data as it is.

    Args:
        data: of ``Trainer.validate`` or ``Trainer.predict``.
        names: of its methods, of which the first one that it has is called.

    Raises:
        UnsupportedValueError: if it has none of them.
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


def own_settings(
    model: Any,
    loss: Any,
    optimizer: Any,
    metrics: Sequence[Any],
    *,
    trainer: Any,
    operands: Sequence[str] = ("batch",),
) -> dict[str, Any]:
    """Return ``loss``, ``optimizer`` and ``methods`` for ``backend.learner``.

    Args:
        model: placed already. ``training_step(batch)``, ``validation_step(batch)``,
            ``loss(prediction, y)`` and ``configure_optimizers()`` of a D2L ``Module`` are used.
        loss, optimizer: None is the model's own; None comes back if it has none.
        metrics: a model with its own ``training_step`` cannot have any.
        trainer: what these methods find as ``model.trainer``.
        operands: the names of what the first two of them are called with.

    Raises:
        UnsupportedValueError: if something of that would be ignored, or cannot be called.
    """
    in_step, in_evaluation = (callable(getattr(model, name, None)) for name in METHODS)
    configures = callable(getattr(model, "configure_optimizers", None))
    if configures or in_step:
        uncover_loss(model)
    methods = None
    if in_step or in_evaluation:
        methods = METHODS if in_evaluation else (METHODS[0],) * 2
        _check_methods(model, methods, loss, metrics, operands)
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
        own = getattr(model, "loss", None) if configures or in_step else None
        loss = "mse" if methods is not None else own if callable(own) else None
    return {"loss": loss, "optimizer": optimizer, "methods": methods}


def uncover_loss(model: Any) -> None:
    """Give a model back its method ``loss``, which an attribute that is None hides.

    Keras sets it: https://github.com/keras-team/keras/blob/master/keras/src/trainers/trainer.py
    """
    method = getattr(type(model), "loss", None)
    if callable(method) and getattr(model, "loss", None) is None:
        model.loss = method.__get__(model)


def _check_methods(
    model: Any,
    methods: Sequence[str],
    loss: Any,
    metrics: Sequence[Any],
    operands: Sequence[str],
) -> None:
    name = type(model).__name__
    attempted = f"train the {name}, which has a {methods[-1]} of its own,"
    if loss is not None or metrics:
        what = "loss" if loss is not None else "metrics"
        raise UnsupportedValueError(
            f"{attempted} with {what}={describe(loss if loss is not None else metrics)}",
            "what these methods return is the loss, and they give no prediction to compare",
            f"leave {what}= out, or use a model without {' and '.join(METHODS)}",
        )
    for method in methods:
        try:
            inspect.signature(getattr(model, method)).bind(*operands)
        except (AttributeError, TypeError) as error:
            raise UnsupportedValueError(
                attempted,
                f"{name}.{method} cannot be called with a batch: {text_of(error)}",
                f"def {method}(self, {', '.join(operands)}): ...",
            ) from error
