"""The MXNet backend's ``Learner``: ``autograd``, Gluon's losses, ``gluon.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.interface import Backend, Tensor
from d2ldev.training.learner import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    Learner,
    Settings,
)
from d2ldev_mxnet.framework import NumPySemantics, mx

_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("sgd", {}),
    "momentum": ("sgd", {"momentum": MOMENTUM}),
    "adam": ("adam", {"beta1": BETAS[0], "beta2": BETAS[1], "epsilon": ADAM_EPSILON}),
    # MXNet adds it below the root.
    "adagrad": ("adagrad", {"eps": ADAGRAD_EPSILON**2}),
}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    return ((prediction - y) ** 2).mean()


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    return -mx.npx.pick(mx.npx.log_softmax(prediction, axis=-1), y, axis=-1).mean()


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


class MXNetLearner(Learner):
    """A Gluon block that a ``gluon.Trainer`` trains."""

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        if not isinstance(model, mx.gluon.Block):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no gluon.Block",
                "put the parameters into a gluon.Block",
            )
        self._loss = _LOSSES[settings.loss] if isinstance(settings.loss, str) else settings.loss
        self._model = model
        self._trainer = self._made(settings)
        self._find_gradients()

    def _made(self, settings: Settings) -> Any:
        optimizer, parameters = settings.optimizer, self._model.collect_params()
        if isinstance(optimizer, str):
            name, options = _OPTIMIZERS[optimizer]
            with NumPySemantics():
                return mx.gluon.Trainer(parameters, name, {"learning_rate": settings.lr, **options})
        if isinstance(optimizer, mx.optimizer.Optimizer):
            with NumPySemantics():
                return mx.gluon.Trainer(parameters, optimizer)
        if isinstance(optimizer, mx.gluon.Trainer):
            device = next(iter(self.backend.placement(self._model).values()))
            return self.backend.place(optimizer, device)
        raise UnsupportedValueError(
            f"train with the optimizer {describe(optimizer)}",
            "it is neither a gluon.Trainer nor an mx.optimizer.Optimizer",
            "optimizer=gluon.Trainer(net.collect_params(), 'sgd'), or optimizer='sgd'",
        )

    def _find_gradients(self) -> None:
        parameters = self._model.collect_params().values()
        self._trained = [p for p in parameters if p.grad_req != "null"]

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._trainer}

    def replace(self, parts: dict[str, Any]) -> None:
        self._model, self._trainer = parts["model"], parts["optimizer"]
        self._find_gradients()

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics():
            with mx.autograd.record():
                prediction = self._model(*inputs)
                loss = self._loss(prediction, y)
            loss.backward()
            if self.settings.gradient_clip_val:
                self._clip(self.settings.gradient_clip_val)
            self._trainer.step(1)  # the loss is a mean already
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics():
            prediction = self._model(*inputs)
            return self._loss(prediction, y), prediction

    def _clip(self, largest: float) -> None:
        # gluon.utils.clip_global_norm would wait for the norm.
        gradients = [parameter.list_grad()[0].as_np_ndarray() for parameter in self._trained]
        norm = mx.np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = mx.np.minimum(1.0, largest / (norm + 1e-6))
        for gradient in gradients:
            gradient *= factor

    def state(self) -> dict[str, Any]:
        updater = self._trainer._updaters[0]
        optimizer = self._trainer.optimizer
        return {
            "model": {p.name: p.data() for p in self._model.collect_params().values()},
            "optimizer": dict(updater.states),
            "counts": dict(optimizer._index_update_count),
            "updates": optimizer.num_update,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        parameters = list(self._model.collect_params().values())
        saved = list(state["model"].values())
        if [x.shape for x in saved] != [p.shape for p in parameters]:
            raise CheckpointError(
                "restore a training state",
                "it is of another model",
                "resume with the model that the run began with",
            )
        with NumPySemantics():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.set_data(value)
        optimizer = self._trainer.optimizer
        updater = self._trainer._updaters[0]
        updater.states.update(state["optimizer"])
        updater.states_synced.update(dict.fromkeys(state["optimizer"], True))
        optimizer._index_update_count.update(state["counts"])
        optimizer.num_update = state["updates"]
