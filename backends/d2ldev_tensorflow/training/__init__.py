"""Training: ``GradientTape``, Keras optimizers, ``tf.function``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from d2ldev import Device
from d2ldev.framework import (
    NO_LABEL,
    Framework,
    Learner,
    Tensor,
    Training,
    TrainingSettings,
    describe,
    state_refusal,
)
from d2ldev_tensorflow.devices import place_of
from d2ldev_tensorflow.training import compiled
from d2ldev_tensorflow.training.datasets import ShardedDataset
from d2ldev_tensorflow.training.losses import widen_labels

_log = logging.getLogger("d2ldev")


class TensorFlowTraining(Training):
    """Training of Keras models and ``tf.Module``s."""

    loader_types = (tf.data.Dataset,)

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def shard_loader(self, loader: Any, rank: int, size: int) -> Any:
        return ShardedDataset(loader, rank, size)

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        if settings.optimizer is not None:
            if settings.methods is None:
                compiled.check_own_methods(model, "train_step", "test_step", "compute_loss")
            if getattr(model, "compiled", False):
                compiled.check_options(model)
        from d2ldev_tensorflow.training.learner import TensorFlowLearner  # only training needs it

        return TensorFlowLearner(self._framework, model, settings)

    def defaults(self, model: Any) -> tuple[Any, Any]:
        if not getattr(model, "compiled", False):
            return super().defaults(model)
        name, loss, optimizer = describe(model), model.loss, model.optimizer
        _log.info("%s: compiled with loss=%r and optimizer=%r", name, loss, optimizer)
        return compiled.loss_of(model), optimizer

    def module_class(self, methods: type) -> type:
        class Module(methods, tf.keras.Model):
            """D2L's ``Module`` as a Keras model, whose ``call`` is ``forward``."""

            training: bool | None = None

            def call(self, X: Any, *args: Any, training: bool | None = None) -> Any:  # noqa: N803
                self.training = training
                return self.forward(X, *args)

        return Module

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # A traced tensor has no device yet: the caller of the traced function chooses it.
        with tf.device(place_of(prediction)):
            found = tf.argmax(prediction, -1)
            # While a function is traced, unknown lengths would be broadcast.
            labels = tf.reshape(widen_labels(y), tf.shape(found))
            is_right = tf.reduce_sum(tf.cast(found == labels, tf.float32))
            counted = tf.reduce_sum(tf.cast(labels != NO_LABEL, tf.float32))
            return is_right / tf.maximum(counted, 1.0), counted

    def random_state(self, device: Device) -> Any:
        generator = tf.random.get_global_generator()
        return {"algorithm": generator.algorithm, "state": generator.state.read_value()}

    def check_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        generator = tf.random.get_global_generator()
        try:
            algorithm, numbers = state["algorithm"], state["state"]
            fits = numbers.shape == generator.state.shape and numbers.dtype == tf.int64
        except (AttributeError, KeyError, TypeError):
            algorithm, fits = None, False
        if algorithm != generator.algorithm or not fits:
            raise state_refusal("generator", f"{describe(state)} is not a state of TensorFlow's")
        return lambda: generator.reset(numbers)
