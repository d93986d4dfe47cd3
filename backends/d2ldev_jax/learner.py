"""The JAX backend's ``Learner``: ``jax.grad``, optax's optimizers, one jitted function per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

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

_OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=MOMENTUM),
    "adam": lambda lr: optax.adam(lr, *BETAS, eps=ADAM_EPSILON),
    "adagrad": lambda lr: optax.adagrad(lr, 0.0, ADAGRAD_EPSILON),
}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    return jnp.mean((prediction - y) ** 2)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(prediction, y))


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


class JaxLearner(Learner):
    """A ``flax.nnx.Module`` that an ``nnx.Optimizer`` trains.

    Between two steps the arrays are in a state of this object; ``parts`` puts them into the model
    and the optimizer, which is no copy.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        if not isinstance(model, nnx.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no flax.nnx.Module",
                "wrap linen modules by nnx.bridge.ToNNX, or write a flax.nnx.Module",
            )
        self._loss = _LOSSES[settings.loss] if isinstance(settings.loss, str) else settings.loss
        self.replace({"model": model, "optimizer": self._made(model, settings)})

    def _made(self, model: nnx.Module, settings: Settings) -> nnx.Optimizer[Any]:
        optimizer = settings.optimizer
        if isinstance(optimizer, str):
            optimizer = _OPTIMIZERS[optimizer](settings.lr)
        if isinstance(optimizer, optax.GradientTransformation):
            optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        if not isinstance(optimizer, nnx.Optimizer):
            raise UnsupportedValueError(
                f"train with the optimizer {describe(optimizer)}",
                "it is neither an optax.GradientTransformation nor an nnx.Optimizer",
                "optimizer=optax.sgd(0.1), or optimizer='sgd'",
            )
        # Its step counter is made on the default device.
        device = next(iter(self.backend.placement(model).values()))
        placed: nnx.Optimizer[Any] = self.backend.place(optimizer, device)
        return placed

    @property
    def parts(self) -> dict[str, Any]:
        nnx.update(self._model, self._model_state)
        nnx.update(self._optimizer, self._optimizer_state)
        return {"model": self._model, "optimizer": self._optimizer}

    def replace(self, parts: dict[str, Any]) -> None:
        self._model, self._optimizer = parts["model"], parts["optimizer"]
        self._model.eval()
        in_use = nnx.graphdef(self._model)
        self._model.train()
        in_training, self._model_state = nnx.split(self._model)
        optimizer, self._optimizer_state = nnx.split(self._optimizer)
        self._step = jax.jit(_make_step(in_training, optimizer, self._loss, self.settings))
        self._evaluate = jax.jit(_make_evaluation(in_use, self._loss))

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._model_state, self._optimizer_state, loss, prediction = self._step(
            self._model_state, self._optimizer_state, inputs, y
        )
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        loss, prediction = self._evaluate(self._model_state, inputs, y)
        return loss, prediction

    def state(self) -> dict[str, Any]:
        return {
            "model": nnx.to_pure_dict(self._model_state),
            "optimizer": nnx.to_pure_dict(self._optimizer_state),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        current = self.state()
        if jax.tree.map(_form, current) != jax.tree.map(_form, dict(state)):
            raise CheckpointError(
                "restore a training state",
                "it is of another model or optimizer",
                "resume with the model and the optimizer that the run began with",
            )
        nnx.replace_by_pure_dict(self._model_state, state["model"])
        nnx.replace_by_pure_dict(self._optimizer_state, state["optimizer"])


def _form(x: Any) -> tuple[Any, str]:
    return jnp.shape(x), str(jnp.result_type(x))


def _make_step(
    model_graph: Any, optimizer_graph: Any, loss: Callable[..., Any], settings: Settings
) -> Callable[..., Any]:
    def loss_and_prediction(model: Any, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        prediction = model(*inputs)
        return loss(prediction, y), prediction

    def step(model_state: Any, optimizer_state: Any, inputs: tuple[Any, ...], y: Any) -> Any:
        model = nnx.merge(model_graph, model_state)
        optimizer = nnx.merge(optimizer_graph, optimizer_state)
        gradient = nnx.value_and_grad(loss_and_prediction, has_aux=True)
        (value, prediction), gradients = gradient(model, inputs, y)
        if settings.gradient_clip_val:
            gradients = _clipped(gradients, settings.gradient_clip_val)
        optimizer.update(model, gradients)
        return nnx.state(model), nnx.state(optimizer), value, prediction

    return step


def _make_evaluation(model_graph: Any, loss: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(model_state: Any, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        prediction = nnx.merge(model_graph, model_state)(*inputs)
        return loss(prediction, y), prediction

    return evaluate


def _clipped(gradients: Any, largest: float) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    factor = jnp.minimum(1.0, largest / (norm + 1e-6))
    return jax.tree.map(lambda g: g * factor, gradients)
