"""Training: ``GradientTape``, Keras' optimizers, ``tf.function``; and ``tf.data``'s prefetching."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import tensorflow as tf

from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.framework import Framework, Learner, Settings, Tensor, Training
from d2ldev.framework.training import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    refused_state,
)
from d2ldev.operations import devices, placing
from d2ldev.operations.steps import check_labels, check_loss, check_shapes, input_names, loss_among
from d2ldev_tensorflow.models import inner_optimizers

_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": MOMENTUM}),
    "adam": ("Adam", {"beta_1": BETAS[0], "beta_2": BETAS[1], "epsilon": ADAM_EPSILON}),
    # Keras adds it below the root.
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.0, "epsilon": ADAGRAD_EPSILON**2}),
}
# What is never in a GPU's memory, and would stop ``tf.data`` on its way there.
_OF_THE_HOST = (tf.string, tf.variant, tf.resource)


class TensorFlowTraining(Training):
    """Training of Keras' models and ``tf.Module``s.

    Args:
        framework: whose they are.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: Settings) -> Learner:
        return TensorFlowLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        # What is only traced has no device yet: the tf.function's caller decides.
        is_traced = not tf.executing_eagerly()
        with nullcontext() if is_traced else self._at(prediction):
            rows = prediction.shape[:-1]
            if not (rows.is_fully_defined() and y.shape.is_fully_defined()):
                # What does not fit fails here, and would be broadcast below.
                y = tf.reshape(y, tf.shape(prediction)[:-1])
            found = tf.argmax(prediction, -1) == tf.cast(y, tf.int64)
            return tf.reduce_mean(tf.cast(found, tf.float32))

    def shapes(self, prediction: Tensor, y: Tensor) -> tuple[Any, Any]:
        logits, labels = prediction.shape, y.shape
        # What is not known while a function is traced is taken to fit.
        if logits.rank is None:
            logits = tf.TensorShape([] if labels.rank is None else labels).concatenate([None])
        return tuple(logits), tuple(logits[:-1] if labels.rank is None else labels)

    def prefetched(self, batches: Any, device: Device, depth: int) -> Any:
        if not isinstance(batches, tf.data.Dataset) or not all(
            isinstance(spec, tf.TensorSpec) and spec.dtype not in _OF_THE_HOST
            for spec in tf.nest.flatten(batches.element_spec)
        ):
            return None
        # TensorFlow's own threads go ahead, also where eager execution would wait for each batch.
        # They end with the iterator.
        if device is CPU:
            return batches.prefetch(depth)
        native = self._framework.devices.native(device)
        return batches.apply(tf.data.experimental.prefetch_to_device(native, depth))

    def random_state(self, device: Device) -> Any:
        generator = tf.random.get_global_generator()
        return {"algorithm": generator.algorithm, "state": generator.state.read_value()}

    def checked_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        generator = tf.random.get_global_generator()
        try:
            algorithm, numbers = state["algorithm"], state["state"]
            fits = numbers.shape == generator.state.shape and numbers.dtype == tf.int64
        except (AttributeError, KeyError, TypeError):
            algorithm, fits = None, False
        if algorithm != generator.algorithm or not fits:
            raise refused_state("generator", f"{describe(state)} is no state of TensorFlow's")
        return lambda: generator.reset(numbers)

    def _at(self, x: Tensor) -> AbstractContextManager[Any]:
        return devices.on(self._framework, self._framework.tensors.device_of(x))


class TensorFlowLearner(Learner):
    """A Keras model or a ``tf.Module`` that a Keras optimizer trains.

    A model that has no variables yet, as Keras allows, gets them from the first batch. Layers may
    be frozen and thawed between two steps: what ``trainable`` says counts from the next one on. So
    an optimizer is built for all that may be thawed. One that the user has built for some variables
    trains these and no others.

    Python's ``if`` and ``for`` on tensors, in a ``tf.Module`` or a loss, need a ``@tf.function`` of
    their own.
    """

    def __init__(self, framework: Framework, model: Any, settings: Settings) -> None:
        super().__init__(settings)
        import keras  # not before it is needed: who computes without Keras need not have it

        if not isinstance(model, (tf.Module, keras.Layer)):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is neither a Keras model nor a tf.Module",
                "keras.Sequential([...])",
            )
        self._framework = framework
        losses = {"mse": _mse, "cross_entropy": partial(_cross_entropy, framework.training)}
        self._loss = loss_among(settings, losses)
        self.replace({"model": model, "optimizer": _made(settings)})

    # -- model and optimizer ----------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer}

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
        self.sync()

    def sync(self) -> None:
        # The user may have built the model meanwhile.
        if not self._is_ready and self._has_variables():
            self._get_ready()

    @property
    def is_built(self) -> bool:
        return self._is_ready

    def build(self, inputs: tuple[Any, ...]) -> None:
        if not self._has_variables():
            device = self._framework.tensors.device_of(tf.nest.flatten(inputs)[0])
            with devices.on(self._framework, device):
                self._call(inputs, self._in_use)
        self._get_ready()

    def _has_variables(self) -> bool:
        return bool(self._model.built if self._is_layer else self._model.variables)

    def _get_ready(self) -> None:
        tensors = placing.named_tensors(self._framework, self._model)
        device_of = self._framework.tensors.device_of
        self._device = next((device_of(x) for _, x in tensors), None)
        self._flagged = _flagged_in(self._model) if self._is_layer else []
        self._take_trainable()
        self._is_ready = True

    def _take_trainable(self) -> None:
        """Train what is trainable now, as Keras does when a model is compiled."""
        flags = _flags_of(self._flagged)
        self._variables = list(self._model.trainable_variables)
        if not self._variables or self._device is None:
            raise UnsupportedValueError(
                f"train {describe(self._model)}",
                "it has no trainable variables",
                "layers whose trainable is True; those of Keras in a keras.Model, no tf.Module",
            )
        self._build_optimizer(self._device)
        # Traced anew: a function that was traced holds the devices that it was traced on. Without
        # AutoGraph, as in Keras' own fit: it would wrap the errors of what it converts. TensorFlow
        # counts the traces of a method in all its objects, and warns; those of a partial it does
        # not mix up.
        self._step = tf.function(partial(self._train), autograph=False)
        self._evaluate = tf.function(partial(self._predict), autograph=False)
        self._flags = flags

    def _build_optimizer(self, device: Device) -> None:
        optimizer = self._optimizer
        # A ``MultiOptimizer`` takes the gradients of all that it was built for.
        takes_all = hasattr(optimizer, "_inner_optimizers")
        if not optimizer.built:
            with devices.on(self._framework, device):
                optimizer.build(self._variables if takes_all else self._may_be_trained())
        known = {id(_plain(x)) for x in optimizer._trainable_variables}
        wanted = {id(_plain(x)) for x in self._variables}
        if not wanted <= known or (takes_all and wanted != known):
            name = type(optimizer).__name__
            raise UnsupportedValueError(
                f"train {describe(self._model)} with the optimizer {name}",
                f"it was built for {len(known)} variables, and these are {len(wanted)} others"
                if wanted.isdisjoint(known)
                else "it was built for other variables than are trainable now",
                f"keras.optimizers.{name}(...), not built yet; before what is frozen is thawed",
            )
        placing.place(self._framework, optimizer, device)

    def _may_be_trained(self) -> list[Any]:
        """Return what is trainable, and what would be if nothing were frozen."""
        if not self._is_layer:
            return self._variables
        found = {id(x) for x in self._variables}
        for layer in self._model._flatten_layers():
            found.update(id(x) for x in layer._trainable_variables)
        return [x for x in self._model.variables if id(x) in found]

    # -- modes ------------------------------------------------------------------------------------

    def modes(self) -> Any:
        # Of a ``tf.Module`` the variables are trainable or not for ever.
        return _flags_of(_flagged_in(self._model)) if self._is_layer else []

    def checked_modes(self, modes: Any) -> Callable[[], None]:
        flagged = _flagged_in(self._model) if self._is_layer else []
        is_list = isinstance(modes, list) and all(type(flag) is bool for flag in modes)
        if not is_list or len(modes) != len(flagged):
            raise refused_state(
                "model", f"{describe(modes)} does not say what of {len(flagged)} is trainable"
            )

        def put() -> None:
            for each, flag in zip(flagged, modes, strict=True):
                if each.trainable != flag:
                    each.trainable = flag

        return put

    # -- inputs -----------------------------------------------------------------------------------

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

    # -- steps ------------------------------------------------------------------------------------

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self.build(inputs)
        # A microsecond, for a model of ten layers.
        if _flags_of(self._flagged) != self._flags:
            self._take_trainable()
        # One by one, as in a loop of one's own: a tuple takes TensorFlow longer to look through.
        loss, prediction = self._step(*inputs, y)
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self.build(inputs)
        loss, prediction = self._evaluate(*inputs, y)
        return loss, prediction

    def _train(self, *batch: Any) -> tuple[Tensor, Any]:
        *inputs, y = batch
        with tf.device(self._framework.devices.native(self._device)):
            with tf.GradientTape() as tape:
                prediction = self._call(inputs, self._in_training)
                loss = self._whole_loss(prediction, y)
                # Times 1 but in an optimizer that works around the range of float16.
                scaled = self._optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self._variables)
            if self.settings.gradient_clip_val:
                gradients = self._clipped(gradients)
            with _averaging_only(self._optimizer, self._variables):
                self._optimizer.apply(gradients, self._variables)
            return loss, prediction

    def _predict(self, *batch: Any) -> tuple[Tensor, Any]:
        *inputs, y = batch
        with tf.device(self._framework.devices.native(self._device)):
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
        """Return the loss with what layers add to it, such as regularization, as Keras' ``fit``."""
        loss = self._loss(prediction, y)
        check_loss(getattr(loss, "shape", None), loss)
        added = self._model.losses if self._is_layer else []
        return tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in added)]) if added else loss

    def _clipped(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients, shortened as ``torch.nn.utils.clip_grad_norm_`` does it."""
        # That of an embedding has a row for each use: its norm is not that of their sums.
        dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        squares = [tf.reduce_sum(tf.cast(g, tf.float32) ** 2) for g in dense if g is not None]
        norm = tf.sqrt(tf.add_n(squares)) / self._optimizer.scale_loss(tf.ones(()))
        factor = tf.minimum(1.0, self.settings.gradient_clip_val / (norm + 1e-6))
        return [None if g is None else g * tf.cast(factor, g.dtype) for g in dense]


# -- models ---------------------------------------------------------------------------------------


def _takes_training(module: tf.Module) -> bool:
    """Return whether a module is told, as Keras' layers are, that it is trained."""
    return "training" in inspect.signature(module).parameters


def _flagged_in(model: Any) -> list[Any]:
    """Return what says whether it is trained: the layers of a Keras model, and their variables."""
    return [*model._flatten_layers(), *model.variables]


_is_trainable = attrgetter("trainable")


def _flags_of(flagged: list[Any]) -> list[bool]:
    return list(map(_is_trainable, flagged))


# -- optimizers -----------------------------------------------------------------------------------


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


def _plain(variable: Any) -> tf.Variable:
    """Return TensorFlow's variable in one of Keras'."""
    return variable if isinstance(variable, tf.Variable) else variable._value


@contextmanager
def _averaging_only(optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Have an optimizer that averages variables write into these, and into none that is frozen.

    ``BaseOptimizer`` averages at the end of a step all that it was built for, and not what it was
    given: ``_backend_apply_gradients`` in Keras' ``src/optimizers/base_optimizer.py``.
    """
    names = "_trainable_variables", "_model_variables_moving_average"
    keys = {id(_plain(x)) for x in variables}
    averaging = [each for each in (optimizer, *_inner(optimizer)) if each.use_ema]
    before = [{name: vars(each)[name] for name in names} for each in averaging]
    for each in averaging:
        is_trained = [id(_plain(x)) in keys for x in each._trainable_variables]
        for name in names:
            both = zip(vars(each)[name], is_trained, strict=True)
            vars(each)[name] = [x for x, is_one in both if is_one]
    try:
        yield
    finally:
        for each, attributes in zip(averaging, before, strict=True):
            vars(each).update(attributes)


def _inner(optimizer: Any) -> list[Any]:
    return [inner for _, inner in inner_optimizers(optimizer)]


# -- losses ---------------------------------------------------------------------------------------


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    if not prediction.shape.is_compatible_with(y.shape):
        check_shapes(prediction.shape, y.shape)
    prediction = _wide(prediction)
    return tf.reduce_mean((prediction - tf.cast(y, prediction.dtype)) ** 2)


def _cross_entropy(training: Training, prediction: Tensor, y: Tensor) -> Tensor:
    check_labels(*training.shapes(prediction, y), y.dtype.name)
    if y.dtype not in (tf.int32, tf.int64):
        y = tf.cast(y, tf.int64)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=_wide(prediction))
    )


def _wide(prediction: Tensor) -> Tensor:
    """Return float32 of float16 and bfloat16: a mean over a batch needs more digits."""
    return tf.cast(prediction, tf.float32) if prediction.dtype.size < 4 else prediction
