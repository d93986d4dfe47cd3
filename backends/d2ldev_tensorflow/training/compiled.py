"""Compiled Keras models: the loss that was given to ``compile``, and the model's own methods."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary, ref

import tensorflow as tf

from d2ldev import UnsupportedValueError
from d2ldev.framework import describe, warn
from d2ldev_tensorflow.models import is_of_keras


class CompiledLoss:
    """The loss of a compiled model, of all outputs and with their weights: ``compute_loss``.

    It leaves out the losses that the layers add. The means of losses that Keras keeps for its own
    ``fit`` stay as they are.

    Attributes:
        is_built: whether it was called. The first call makes the variables of these means.
    """

    is_built = False

    def __init__(self, model: Any) -> None:
        self._model = ref(model)  # the model keeps functions that were traced with the loss

    @property
    def reduction(self) -> str:
        """The reduction of a loss that returns no plain mean, if there is one."""
        model: Any = self._model()
        found = {getattr(each, "reduction", None) for each in tf.nest.flatten(model.loss)}
        return next((x for x in ("sum", "mean_with_sample_weight") if x in found), "mean")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        import keras

        model: Any = self._model()
        # In the scope Keras reads the variables from here.
        variables = (*model.variables, *model.metrics_variables)
        with keras.StatelessScope([(x, x.value) for x in variables]):
            loss = model.compute_loss(y=y_true, y_pred=y_pred, sample_weight=sample_weight)
            self.is_built = True
            return loss - sum(model.losses) if model.losses else loss


# The loss of each model, and the objects that another ``compile`` replaces.
_LOSSES: WeakKeyDictionary[Any, tuple[list[Any], CompiledLoss]] = WeakKeyDictionary()


def loss_of(model: Any) -> CompiledLoss | None:
    """Return the loss of a compiled model; None for a model that was compiled without one.

    The object stays the same until the model is compiled again. So functions that were traced with
    it stay valid.
    """
    if model.loss is None:
        return None
    # The first metric is the mean of the losses, which each ``compile`` makes.
    compiled_by = [model.loss, model.optimizer, *model.metrics[:1]]
    known, loss = _LOSSES.get(model, ([], None))
    if loss is None or [*map(id, known)] != [*map(id, compiled_by)]:
        loss = CompiledLoss(model)
        _LOSSES[model] = compiled_by, loss
    return loss


def check_own_methods(model: Any, *names: str) -> None:
    """Check that a model does not override methods that only Keras's own loops call.

    Raises:
        UnsupportedValueError: if a user's class overrides one of these methods.
    """
    if not is_of_keras(model, "Model"):
        return
    theirs = sys.modules["keras"].Model
    own = [name for name in names if getattr(type(model), name) is not getattr(theirs, name)]
    if own:
        raise UnsupportedValueError(
            f"train {describe(model)}",
            f"only Keras's own fit, evaluate and predict call its {', '.join(own)}",
            f"def training_step(self, batch), which returns the loss, in {type(model).__name__}; "
            "or model.fit(...)",
        )


def check_options(model: Any) -> None:
    """Warn about arguments of ``compile`` that only Keras's own ``fit`` uses."""
    own = "compile(...) without metrics, and fit(..., metrics=['accuracy'])"
    metrics = "compile_metrics" in model.metrics_names, own
    at_once = model.steps_per_execution != 1, "compile(...) without steps_per_execution"
    for name, (is_given, fix) in {"metrics": metrics, "steps_per_execution": at_once}.items():
        if is_given:
            warn(
                f"the Trainer leaves out {name}, which {describe(model)} was compiled with: only "
                f"Keras's own fit uses them\n  fix: {fix}"
            )
