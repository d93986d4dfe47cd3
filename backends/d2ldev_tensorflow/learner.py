"""The TensorFlow backend's ``Learner``: ``GradientTape``, Keras' optimizers, ``tf.function``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

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
    check_loss,
    check_shapes,
)
from d2ldev_tensorflow import labels, slots, training_state

_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": MOMENTUM}),
    "adam": ("Adam", {"beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": ADAM_EPSILON}),
    # Keras adds it below the root.
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.0, "epsilon": ADAGRAD_EPSILON**2}),
}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    if not prediction.shape.is_compatible_with(y.shape):
        check_shapes(prediction.shape, y.shape)
    prediction = _wide(prediction)
    return tf.reduce_mean((prediction - tf.cast(y, prediction.dtype)) ** 2)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    labels.check(prediction, y)
    if y.dtype not in (tf.int32, tf.int64):
        y = tf.cast(y, tf.int64)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=_wide(prediction))
    )


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


def _wide(prediction: Tensor) -> Tensor:
    """A mean over a batch needs more digits than bfloat16 and float16 have."""
    return tf.cast(prediction, tf.float32) if prediction.dtype.size < 4 else prediction


class TensorFlowLearner(Learner):
    """A Keras model or a ``tf.Module`` that a Keras optimizer trains.

    A model that has no variables yet, as Keras allows, gets them from the first batch. Layers may
    be frozen and thawed between two steps: what ``trainable`` says counts from the next one on.

    Python's ``if`` and ``for`` on tensors, in a ``tf.Module`` or a loss, need a ``@tf.function`` of
    their own.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        import keras  # not before it is needed: who computes without Keras need not have it

        if not isinstance(model, (tf.Module, keras.Layer)):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is neither a Keras model nor a tf.Module",
                "keras.Sequential([...])",
            )
        self._loss = settings.loss_among(_LOSSES)
        # A state that waits for the first batch, which builds the model; that is not trained
        # without it.
        self._pending: training_state.State | None = None
        self._flags: list[bool] | None = None
        self.replace({"model": model, "optimizer": _made(settings)})

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer}

    @property
    def input_names(self) -> tuple[str, ...]:
        if not self._takes_list:
            return input_names(self._model.call if self._is_layer else self._model)
        inputs = self._inputs
        if isinstance(inputs, Mapping):
            return tuple(inputs)
        several = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        return tuple(getattr(each, "name", "") for each in several)

    @property
    def takes_mapping(self) -> bool:
        return self._takes_list and isinstance(self._inputs, Mapping)

    @property
    def _inputs(self) -> Any:
        """A functional model's inputs, nested as they were given; a Sequential has only a list."""
        model = self._model
        return model.input if hasattr(model, "input") else model.inputs

    def replace(self, parts: dict[str, Any]) -> None:
        import keras

        self._model, self._optimizer = parts["model"], parts["optimizer"]
        # Functional, that is: a list of them is one argument.
        self._takes_list = isinstance(self._model, keras.Model) and hasattr(self._model, "inputs")
        self._is_layer = isinstance(self._model, keras.Layer)
        takes_training = self._is_layer or _takes_training(self._model)
        self._in_training = {"training": True} if takes_training else {}
        self._in_use = {"training": False} if takes_training else {}
        self._is_ready = False
        if self._is_built() and self._pending is None:
            self._get_ready()

    def _is_built(self) -> bool:
        """Whether the model has its variables."""
        return bool(self._model.built if self._is_layer else self._model.variables)

    def _get_ready(self) -> None:
        """Have all that a step needs, once there is a model: the state that waits for one, too."""
        if self._pending is None:
            self._prepare()
            self._is_ready = True
        else:
            self._put(self._pending)

    def _put(self, saved: training_state.State) -> None:
        """Give the model and the optimizer a state, or refuse it, and be no readier than before."""
        is_built = self._is_built()
        if is_built and not self._is_ready:
            self._prepare()
        training_state.putting(self.backend, self.parts, is_built, saved)()
        # What is trained, and the slots for it, may be others now.
        self._pending = self._flags = None
        self._is_ready = is_built

    def _prepare(self) -> None:
        """Build the optimizer, where the model is, and trace anew."""
        self._device = next(iter(self.backend.placement(self._model).values()), None)
        self._take_trainable()

    def _take_trainable(self) -> None:
        """Train what is trainable now, as Keras does when a model is compiled."""
        flagged = slots.flagged_in(self._model)
        self._variables = list(self._model.trainable_variables)
        if not self._variables:
            raise UnsupportedValueError(
                f"train {describe(self._model)}",
                "it has no trainable variables",
                "layers whose trainable is True; those of Keras in a keras.Model, no tf.Module",
            )
        with self.backend.on(self._device):
            slots.build_or_extend(self._optimizer, self._model)
        self.backend.place(self._optimizer, self._device)
        # Traced anew: a function that was traced holds the devices that it was traced on. Without
        # AutoGraph, as in Keras' own fit: it would wrap the errors of what it converts. TensorFlow
        # counts the traces of a method in all its objects, and warns; those of a partial it does
        # not mix up.
        self._step = tf.function(partial(self._train), autograph=False)
        self._evaluate = tf.function(partial(self._predict), autograph=False)
        self._flagged, self._flags = flagged, slots.flags_of(flagged)

    def _build(self, inputs: tuple[Any, ...]) -> None:
        """Have the model make its variables, on the device of the batch."""
        device = self.backend.device_of(tf.nest.flatten(inputs)[0])
        with self.backend.on(device):
            self._call(inputs, self._in_use)
        self._get_ready()

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self._build(inputs)
        # A microsecond, for a model of ten layers.
        if slots.flags_of(self._flagged) != self._flags:
            self._take_trainable()
        # One by one, as in a loop of one's own: a tuple takes TensorFlow longer to look through.
        loss, prediction = self._step(*inputs, y)
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self._build(inputs)
        loss, prediction = self._evaluate(*inputs, y)
        return loss, prediction

    def _train(self, *batch: Any) -> tuple[Tensor, Any]:
        *inputs, y = batch
        with tf.device(self.backend.native(self._device)):
            with tf.GradientTape() as tape:
                prediction = self._call(inputs, self._in_training)
                loss = self._whole_loss(prediction, y)
                # Times 1 but in an optimizer that works around the range of float16.
                scaled = self._optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self._variables)
            if self.settings.gradient_clip_val:
                gradients = self._clipped(gradients)
            slots.apply(self._optimizer, gradients, self._variables)
            return loss, prediction

    def _predict(self, *batch: Any) -> tuple[Tensor, Any]:
        *inputs, y = batch
        with tf.device(self.backend.native(self._device)):
            prediction = self._call(inputs, self._in_use)
            return self._whole_loss(prediction, y), prediction

    def _call(self, inputs: Sequence[Any], mode: dict[str, bool]) -> Any:
        if len(inputs) == 1 or not self._takes_list:
            return self._model(*inputs, **mode)
        if self.takes_mapping:
            names = ", ".join(f"{name!r}: ..." for name in self.input_names)
            raise UnsupportedValueError(
                f"train {describe(self._model)}",
                f"its inputs have names, and a batch has {len(inputs)} without these",
                f"yield {{{names}, 'y': y}}, or ({{{names}}}, y), from the data",
            )
        return self._model(list(inputs), **mode)

    def _whole_loss(self, prediction: Any, y: Any) -> Tensor:
        """The loss with what the layers add to it, such as regularization, as Keras' ``fit``."""
        loss = self._loss(prediction, y)
        check_loss(getattr(loss, "shape", None), loss)
        added = self._model.losses if self._is_layer else []
        return tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in added)]) if added else loss

    def _clipped(self, gradients: list[Any]) -> list[Any]:
        """The gradients, shortened as ``torch.nn.utils.clip_grad_norm_`` does it."""
        # That of an embedding has a row for each use: its norm is not that of their sums.
        dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        squares = [tf.reduce_sum(tf.cast(g, tf.float32) ** 2) for g in dense if g is not None]
        norm = tf.sqrt(tf.add_n(squares)) / self._optimizer.scale_loss(tf.ones(()))
        factor = tf.minimum(1.0, self.settings.gradient_clip_val / (norm + 1e-6))
        return [None if g is None else g * tf.cast(factor, g.dtype) for g in dense]

    def state(self) -> dict[str, Any]:
        if self._pending is not None:
            return training_state.taken(self.backend, self._optimizer, self._pending)
        if not self._is_ready and self._is_built():  # by the user, meanwhile
            self._get_ready()
        return training_state.state_of(self.backend, self.parts, self._is_ready)

    def restore(self, state: Mapping[str, Any]) -> None:
        saved = training_state.taken(self.backend, self._optimizer, state)
        if saved["built"] and not self._is_built():
            self._pending = saved
        else:
            self._put(saved)


def _made(settings: Settings) -> Any:
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
    return optimizer


def _takes_training(module: tf.Module) -> bool:
    """Whether a module is told, as Keras' layers are, that it is trained."""
    return "training" in inspect.signature(module).parameters
