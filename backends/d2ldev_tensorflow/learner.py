"""The TensorFlow backend's ``Learner``: ``GradientTape``, Keras' optimizers, ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

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

_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": MOMENTUM}),
    "adam": ("Adam", {"beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": ADAM_EPSILON}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.0, "epsilon": ADAGRAD_EPSILON}),
}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    return tf.reduce_mean((prediction - y) ** 2)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=prediction)
    )


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


class TensorFlowLearner(Learner):
    """A Keras model or a ``tf.Module`` that a Keras optimizer trains."""

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        import keras  # not before it is needed: who computes without Keras need not have it

        if not isinstance(model, (tf.Module, keras.Layer)):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is neither a Keras model nor a tf.Module",
                "keras.Sequential([...])",
            )
        # Only Keras' layers are told that they are trained.
        is_layer = isinstance(model, keras.Layer)
        self._in_training, self._in_use = (
            ({"training": True}, {"training": False}) if is_layer else ({}, {})
        )
        self._loss = _LOSSES[settings.loss] if isinstance(settings.loss, str) else settings.loss
        self._device = next(iter(backend.placement(model).values()))
        with backend.on(self._device):
            self.replace({"model": model, "optimizer": self._made(model, settings)})

    def _made(self, model: Any, settings: Settings) -> Any:
        import keras

        optimizer = settings.optimizer
        if isinstance(optimizer, str):
            name, options = _OPTIMIZERS[optimizer]
            optimizer = getattr(keras.optimizers, name)(settings.lr, **options)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UnsupportedValueError(
                f"train with the optimizer {describe(optimizer)}",
                "it is no keras.optimizers.Optimizer",
                "optimizer=keras.optimizers.SGD(0.1), or optimizer='sgd'",
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        return self.backend.place(optimizer, self._device)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer}

    def replace(self, parts: dict[str, Any]) -> None:
        self._model, self._optimizer = parts["model"], parts["optimizer"]
        self._device = next(iter(self.backend.placement(self._model).values()))
        self._variables = list(self._model.trainable_variables)
        # Traced anew: a function that was traced holds the devices that it was traced on.
        self._step, self._evaluate = tf.function(self._train), tf.function(self._predict)

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        loss, prediction = self._step(inputs, y)
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        loss, prediction = self._evaluate(inputs, y)
        return loss, prediction

    def _train(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with tf.device(self.backend.native(self._device)):
            with tf.GradientTape() as tape:
                prediction = self._model(*inputs, **self._in_training)
                loss = self._loss(prediction, y)
            gradients = tape.gradient(loss, self._variables)
            if self.settings.gradient_clip_val:
                gradients, _ = tf.clip_by_global_norm(gradients, self.settings.gradient_clip_val)
            self._optimizer.apply(gradients, self._variables)
            return loss, prediction

    def _predict(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with tf.device(self.backend.native(self._device)):
            prediction = self._model(*inputs, **self._in_use)
            return self._loss(prediction, y), prediction

    def state(self) -> dict[str, Any]:
        return {
            "model": [tf.convert_to_tensor(v) for v in self._model.variables],
            "optimizer": [tf.convert_to_tensor(v) for v in self._optimizer.variables],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        saved = [*state["model"], *state["optimizer"]]
        variables = [*self._model.variables, *self._optimizer.variables]
        if [tuple(x.shape) for x in saved] != [tuple(v.shape) for v in variables]:
            raise CheckpointError(
                "restore a training state",
                "it is of another model or optimizer",
                "resume with the model and the optimizer that the run began with",
            )
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)
