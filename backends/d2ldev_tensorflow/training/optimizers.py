"""Keras optimizers: optimizers that are given by name, and loss scaling."""

from __future__ import annotations

from typing import Any

from d2ldev.framework import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    WEIGHT_DECAY,
    TrainingSettings,
    optimizer_refusal,
)
from d2ldev_tensorflow.models import is_multiple

_ADAM = {"beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": ADAM_EPSILON}
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": MOMENTUM}),
    "adam": ("Adam", _ADAM),
    "adamw": ("Adam", {**_ADAM, "weight_decay": WEIGHT_DECAY, "name": "adamw"}),
    # Keras adds epsilon inside the root.
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.0, "epsilon": ADAGRAD_EPSILON**2}),
}


def make_optimizer(settings: TrainingSettings) -> Any:
    """Return the optimizer of a training; None for a model that is only evaluated."""
    import keras

    optimizer = settings.optimizer
    if optimizer is None:
        return None
    if isinstance(optimizer, str) and optimizer in _OPTIMIZERS:
        from d2ldev_tensorflow.training.adam import Adam

        name, options = _OPTIMIZERS[optimizer]
        cls = Adam if name == "Adam" else getattr(keras.optimizers, name)
        optimizer = cls(settings.lr, **options)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise optimizer_refusal(
            optimizer,
            "a keras.optimizers.Optimizer",
            module=keras.optimizers,
            path="keras.optimizers",
            arguments=str(settings.lr),
            owns=_makes_optimizer,
        )
    if settings.precision == "fp16" and not is_scaling(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _makes_optimizer(function: Any) -> bool:
    """Tell whether a function makes an optimizer; the base class takes no step."""
    import keras

    base = keras.optimizers.Optimizer
    return function is not base and isinstance(function(0.01), base)


def is_scaling(optimizer: Any) -> bool:
    """Return whether an optimizer scales the loss, which Keras permits only in a replica."""
    import keras

    parts = [optimizer, *(optimizer.optimizers if is_multiple(optimizer) else ())]
    return any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in parts)
