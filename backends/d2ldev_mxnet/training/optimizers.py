"""Gluon's trainers: those of the user, and those of optimizers that are given by name."""

from __future__ import annotations

import math
from typing import Any

from d2ldev import UnsupportedValueError
from d2ldev.framework import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    WEIGHT_DECAY,
    Framework,
    TrainingSettings,
    optimizer_refusal,
    place,
)
from d2ldev_mxnet.framework import NumPySemantics, mx


class Adam(mx.optimizer.Adam):
    """Adam that adds epsilon to the corrected root, as Kingma and Ba (2015) do.

    MXNet adds it before it corrects the root.
    """

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Take a step of one parameter, with the epsilon that MXNet has to be given for it."""
        steps = self._index_update_count.get(index, self.begin_num_update) + 1
        self.epsilon = ADAM_EPSILON * math.sqrt(1 - self.beta2**steps)
        super().update(index, weight, grad, state)


class AdamW(Adam):
    """Adam that shortens the weights beside its step; MXNet 1.9.1 adds that to the gradient."""

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Shorten the weights, and take a step of Adam."""
        weight *= 1 - self._get_lr(index) * WEIGHT_DECAY
        super().update(index, weight, grad, state)


_ADAM = {"beta1": BETAS[0], "beta2": BETAS[1]}
_OPTIMIZERS: dict[str, tuple[type[Any], dict[str, float]]] = {
    "sgd": (mx.optimizer.SGD, {}),
    "momentum": (mx.optimizer.SGD, {"momentum": MOMENTUM}),
    "adam": (Adam, _ADAM),
    "adamw": (AdamW, _ADAM),
    # MXNet adds it inside the root.
    "adagrad": (mx.optimizer.AdaGrad, {"eps": ADAGRAD_EPSILON**2}),
}


def make_optimizer(framework: Framework, settings: TrainingSettings, parameters: list[Any]) -> Any:
    """Return the ``gluon.Trainer`` of a training; None for a model that is only evaluated.

    Args:
        framework: places the user's trainer where the parameters are.
        settings: say which optimizer.
        parameters: the model's.
    """
    optimizer = settings.optimizer
    if optimizer is None:
        return None
    if isinstance(optimizer, mx.gluon.Trainer):
        _check_trainer(optimizer, parameters)
        optimizer.optimizer.allow_np_array = True
        return place(framework, optimizer, parameters[0].list_ctx()[0])
    with NumPySemantics():
        if isinstance(optimizer, str) and optimizer in _OPTIMIZERS:
            cls, options = _OPTIMIZERS[optimizer]
            optimizer = cls(learning_rate=settings.lr, **options)
        if isinstance(optimizer, mx.optimizer.Optimizer):
            # One that was made before ``npx.set_np()`` would refuse the arrays of most models.
            optimizer.allow_np_array = True
            return mx.gluon.Trainer(parameters, optimizer)
    raise optimizer_refusal(
        optimizer,
        "a gluon.Trainer or an mx.optimizer.Optimizer",
        module=mx.optimizer,
        path="mxnet.optimizer",
        arguments=f"learning_rate={settings.lr}",
        owns=_makes_optimizer,
    )


def _makes_optimizer(function: Any) -> bool:
    """Tell whether a function makes an optimizer; the base class takes no step."""
    made = function(learning_rate=0.01)
    base = mx.optimizer.Optimizer
    return isinstance(made, base) and type(made).update is not base.update


def _check_trainer(trainer: Any, parameters: list[Any]) -> None:
    known = {id(parameter) for parameter in parameters}
    if known.isdisjoint(map(id, trainer._params)):
        raise UnsupportedValueError(
            "train with a gluon.Trainer",
            "none of its parameters belongs to the model",
            "gluon.Trainer(net.collect_params(), ...) with the parameters of this net",
        )
    cls: Any = type(trainer)
    if cls.step is not mx.gluon.Trainer.step and cls.update is mx.gluon.Trainer.update:
        raise UnsupportedValueError(
            f"train with the {cls.__name__}",
            "its step() is its own, and fit, which has the mean of the gradients, calls update()",
            f"{cls.__name__}.update(self, batch_size, ignore_stale_grad=False), for what step does",
        )
    store = trainer._kvstore_params["kvstore"]
    if store is not None and (not isinstance(store, str) or "dist" in store):
        raise UnsupportedValueError(
            "train with a gluon.Trainer",
            "its parameters are updated in a KVStore, and not where the model is",
            "gluon.Trainer(net.collect_params(), ...) without a kvstore",
        )
