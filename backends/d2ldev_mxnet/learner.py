"""The MXNet backend's ``Learner``: ``autograd``, Gluon blocks, ``gluon.Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.interface import Backend, Tensor
from d2ldev.operations.signatures import input_names
from d2ldev.training.learner import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    Learner,
    Settings,
    check_labels,
    check_loss,
    check_shapes,
)
from d2ldev_mxnet.framework import NumPySemantics, mx
from d2ldev_mxnet.training_state import (
    Restoration,
    check_random_state,
    random_state,
    state_of,
)

_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("sgd", {}),
    "momentum": ("sgd", {"momentum": MOMENTUM}),
    "adam": ("adam", {"beta1": BETAS[0], "beta2": BETAS[1], "epsilon": ADAM_EPSILON}),
    # MXNet adds it below the root.
    "adagrad": ("adagrad", {"eps": ADAGRAD_EPSILON**2}),
}

_PARTS = {"model", "gradients", "optimizer", "random"}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    check_shapes(prediction.shape, y.shape)
    return ((prediction - y) ** 2).mean()


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    check_labels(prediction.shape, y.shape, np.dtype(y.dtype).name)
    picked = mx.npx.pick(mx.npx.log_softmax(prediction, axis=-1), y, axis=-1)
    if y.dtype not in (np.int32, np.int64):
        # MXNet compares in the dtype of labels, in which 200 may be -56:
        # https://github.com/apache/mxnet/issues/16964
        y = y.astype("int64")
    # A label that is out of range was taken for the nearest class. It is not asked whether there is
    # one, which would wait for the device: what belongs to it is divided by 0. (Beside a number,
    # ``where`` has the gradient of what it left out: https://github.com/apache/mxnet/issues/17893)
    return -(picked / (y >= 0) / (y < prediction.shape[-1])).mean()


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


class MXNetLearner(Learner):
    """A Gluon block, hybridized or not, that a ``gluon.Trainer`` trains.

    Gluon's own losses give one for each example, of which a loss is the mean:
    ``lambda prediction, y: gluon.loss.L2Loss()(prediction, y).mean()``. Parameters that a step does
    not use stay as they are in it.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        if not isinstance(model, mx.gluon.Block):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no gluon.Block",
                "put the parameters into a gluon.Block",
            )
        _check_parameters(model)
        self._loss = settings.loss_among(_LOSSES)
        self._model = model
        self.replace({"model": model, "optimizer": self._made(settings)})

    def _made(self, settings: Settings) -> Any:
        optimizer = settings.optimizer
        # In the order of the layers: by MXNet's names, which count on, two models differ.
        parameters = list(self._model.collect_params().values())
        if isinstance(optimizer, mx.gluon.Trainer):
            return self._placed(optimizer, parameters)
        with NumPySemantics():
            if isinstance(optimizer, str):
                name, options = _OPTIMIZERS[optimizer]
                return mx.gluon.Trainer(parameters, name, {"learning_rate": settings.lr, **options})
            if isinstance(optimizer, mx.optimizer.Optimizer):
                return mx.gluon.Trainer(parameters, optimizer)
        raise UnsupportedValueError(
            f"train with the optimizer {describe(optimizer)}",
            "it is neither a gluon.Trainer nor an mx.optimizer.Optimizer",
            "optimizer=gluon.Trainer(net.collect_params(), 'sgd'), or optimizer='sgd'",
        )

    def _placed(self, trainer: Any, parameters: list[Any]) -> Any:
        known = {id(parameter) for parameter in parameters}
        if not any(id(parameter) in known for parameter in trainer._params):
            raise UnsupportedValueError(
                "train with a gluon.Trainer",
                f"none of its parameters is one of the {type(self._model).__name__}'s",
                "gluon.Trainer(net.collect_params(), ...), of this very net",
            )
        store = trainer._kvstore_params["kvstore"]
        if store is not None and (not isinstance(store, str) or "dist" in store):
            raise UnsupportedValueError(
                "train with a gluon.Trainer",
                "its parameters are updated in a KVStore, and not where the model is",
                "gluon.Trainer(net.collect_params(), ...) without a kvstore",
            )
        context = parameters[0].list_ctx()[0]
        return self.backend.place(trainer, context)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._trainer}

    @property
    def input_names(self) -> tuple[str, ...]:
        model = self._model
        if type(model).forward is not mx.gluon.HybridBlock.forward:
            return input_names(model.forward)
        # The block itself gives F and its own parameters.
        _namespace, *names = input_names(model.hybrid_forward) or (None,)
        return tuple(name for name in names if name not in model._reg_params)

    def replace(self, parts: dict[str, Any]) -> None:
        self._model, self._trainer = parts["model"], parts["optimizer"]
        self._summed = [p for p in self._trainer._params if p.grad_req == "add"]

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics():
            for parameter in self._summed:
                # As ParameterDict.zero_grad; Parameter's own knows only arrays of the old kind.
                parameter.list_grad()[0][()] = 0
            with mx.autograd.record():
                loss, prediction = self._losses(inputs, y)
            loss.backward()
            if self.settings.gradient_clip_val:
                self._clip(self.settings.gradient_clip_val)
            # By 1: the loss is a mean already.
            self._trainer.step(1, ignore_stale_grad=True)
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics(), mx.autograd.pause():
            return self._losses(inputs, y)

    def _losses(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        # Gluon's loaders give arrays of the old kind where npx.set_np() was not called.
        prediction = self._model(*[_as_numpy(x) for x in inputs])
        loss = self._loss(prediction, _as_numpy(y))
        check_loss(loss.shape if isinstance(loss, mx.np.ndarray) else None, loss)
        return loss, prediction

    def _clip(self, largest: float) -> None:
        # gluon.utils.clip_global_norm would wait for the norm, and count what is stale.
        gradients = [
            parameter.list_grad()[0].as_np_ndarray()
            for parameter in self._trainer._params
            if parameter.grad_req != "null" and parameter.data()._fresh_grad
        ]
        norm = mx.np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = mx.np.minimum(largest / (norm + 1e-6), 1.0)
        for gradient in gradients:
            gradient *= factor

    def state(self) -> dict[str, Any]:
        # Training goes on in the same memory.
        state = self.backend.copy(state_of(self._model, self._trainer))
        return {**state, "random": random_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._require_parts(state, _PARTS)
        restoration = Restoration(self._model, self._trainer, state)
        check_random_state(state["random"])
        restoration.carry_out()
        mx.random.seed(state["random"])


def _as_numpy(x: Any) -> Any:
    return x.as_np_ndarray() if type(x) is mx.nd.NDArray else x


def _check_parameters(model: Any) -> None:
    parameters = list(model.collect_params().values())
    attempted = f"train the {type(model).__name__}"
    if all(parameter.grad_req == "null" for parameter in parameters):
        raise UnsupportedValueError(
            attempted, "it has no parameter with a gradient", "parameter.grad_req = 'write'"
        )
    for parameter in parameters:
        if parameter._data is None and not parameter._deferred_init:
            raise UnsupportedValueError(
                attempted, f"its {parameter.name} is not initialised", "net.initialize()"
            )
        if any(not isinstance(array, mx.np.ndarray) for array in parameter._data or ()):
            raise UnsupportedValueError(
                attempted,
                f"its {parameter.name} is one of MXNet's old arrays, mx.nd.NDArray",
                "npx.set_np(), before net.initialize()",
            )
