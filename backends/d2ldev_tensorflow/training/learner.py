"""Training steps of a Keras model or a ``tf.Module``, with ``GradientTape``, ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np
import tensorflow as tf

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    CPU,
    LEAST_WEIGHT,
    Framework,
    Inputs,
    Learner,
    Objective,
    Programs,
    Signature,
    Tensor,
    TrainingSettings,
    describe,
    join_keras_inputs,
    list_named_tensors,
    on,
    place,
    read_keras_signature,
    read_signature,
    state_refusal,
)
from d2ldev_tensorflow.devices import OF_THE_HOST
from d2ldev_tensorflow.models import (
    OF_PROGRAMS,
    all_optimizers,
    is_multiple,
    is_of_keras,
    list_layers,
    list_parameters,
    list_trained,
    set_value,
    value_of,
)
from d2ldev_tensorflow.training import compiled
from d2ldev_tensorflow.training.losses import LOSSES, divide, widen
from d2ldev_tensorflow.training.optimizers import is_scaling, make_optimizer
from d2ldev_tensorflow.training.precision import compute_in, find_policy


class TensorFlowLearner(Learner):
    """A Keras model or a ``tf.Module`` that a Keras optimizer trains.

    The first batch builds a Keras model that has no variables yet. Layers may be frozen and thawed
    between two steps: ``trainable`` counts from the next step on. So an optimizer is built for all
    variables that may be thawed. An optimizer that the user has built for some variables trains
    only these. With ``use_ema`` an optimizer averages, in each step, all variables that it was
    built for. As in Keras, that includes frozen ones.

    Python's ``if`` and ``for`` on tensors, in a ``tf.Module`` or a loss, need a ``@tf.function`` of
    their own.

    The model keeps traced functions, with the variables of an optimizer that is given by name. When
    that optimizer is gone, the next training's optimizer gets the variables, with its own values.
    """

    def __init__(self, framework: Framework, model: Any, settings: TrainingSettings) -> None:
        super().__init__(settings)
        is_layer = is_of_keras(model, "Layer")
        if not is_layer and not isinstance(model, tf.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is neither a Keras model nor a tf.Module",
                "keras.Sequential([...])",
            )
        self._framework = framework
        self._policy = find_policy(model, settings)
        # Of the gradients of the batches of a step, and of their factors.
        self._sums: tuple[list[Any], Tensor] | None = None
        # The reference of the factors of the batches of a step.
        self._reference = 1.0
        self._objective = Objective(framework, settings, LOSSES, divide)
        self._program: _Program | None = None
        optimizer = make_optimizer(settings)
        self._named = optimizer if isinstance(settings.optimizer, str) else None
        self.replace({"model": model, "optimizer": optimizer})

    # -- model and optimizer ----------------------------------------------------------------------

    def sync(self) -> dict[str, Any]:
        # The user may have built the model meanwhile.
        if not self._is_ready and self._has_variables():
            self._get_ready(None)
        return {"model": self._model, "optimizer": self._optimizer}

    def replace(self, components: dict[str, Any]) -> None:
        self._model, self._optimizer = components["model"], components["optimizer"]
        self._is_layer = is_of_keras(self._model, "Layer")
        # A module may take ``training``, as Keras layers do.
        self._is_told = self._is_layer or "training" in signature(self._model).parameters
        self._is_ready = False
        self.sync()

    @property
    def is_built(self) -> bool:
        return self._is_ready

    def build(self, inputs: Inputs) -> None:
        tensors = self._framework.tensors
        # A string array is not a tensor yet, and does not tell the model's device.
        operands = tf.nest.map_structure(
            lambda x: tf.constant(x) if isinstance(x, np.ndarray) else x,
            self._make_operands(inputs),
        )
        placed: list[Any] = [x for x in tf.nest.flatten(operands) if isinstance(x, tensors.types)]
        numbers = [x for x in placed if x.dtype not in OF_THE_HOST]
        device = tensors.device_of(numbers[0]) if numbers else CPU
        if not self._has_variables():
            with on(self._framework, device):
                self._call(operands, training=False)
        self._get_ready(device)

    def _has_variables(self) -> bool:
        return bool(self._model.built if self._is_layer else self._model.variables)

    def _get_ready(self, device: Device | None) -> None:
        """Prepare to train the variables that are trainable now, as Keras does in ``compile``.

        Args:
            device: the inputs' device, where a model without variables computes.
        """
        self._flagged = self._list_flagged()
        flags = _list_flags(self._flagged)
        is_trained = self._optimizer is not None
        self._variables = list(self._model.trainable_variables)
        if is_trained and not self._variables:
            raise UnsupportedValueError(
                f"train {describe(self._model)}",
                "there is nothing to train: it has no trainable variables",
                "model.trainable = True; Keras layers in a keras.Model, and not in a tf.Module",
            )
        variables = self._variables if is_trained else list(self._model.variables)
        for _, first in list_named_tensors(self._framework, variables)[:1]:
            device = self._framework.tensors.device_of(first)
        if device is None:  # the first batch gives it
            return
        self._device = device
        if is_trained:
            self._build(self._optimizer)
        if self._program is not None:
            self._program.users.pop(id(self), None)
        program = self._program = _find_programs(self._model).get(
            *self._list_dependencies(), self._make_program, self._take_program
        )
        program.users[id(self)] = self
        self._step, self._add, self._evaluate = program.step, program.accumulate, program.evaluate
        self._apply, self._forward = program.apply, program.forward
        runs_eagerly = getattr(self._model, "run_eagerly", False)
        if runs_eagerly:
            self._forward = self._compute_alone
        if runs_eagerly or self.settings.methods is not None:
            # The model's own methods may draw and print intermediate values, as in D2L.
            self._step, self._add = self._train, self._accumulate
            self._evaluate = self._measure
        self._sums = place(self._framework, self._sums, self._device)
        self._flags = flags
        self._is_ready = True

    def _list_dependencies(self) -> tuple[list[Any], Hashable]:
        """Return the objects and values that a traced function depends on.

        It also depends on the devices of variables.
        """
        model, settings, optimizer = self._model, self.settings, self._optimizer
        modules = list_layers(model) if self._is_layer else [model, *model.submodules]
        policies = tuple(x.dtype_policy.name for x in modules) if self._is_layer else ()
        # An optimizer given by name has a variable as its rate. Another's may be a schedule, which
        # the public name would call.
        rate = getattr(optimizer, "_learning_rate", None)
        by = [settings.optimizer] if self._is_named() else [optimizer, rate]
        how = settings.gradient_clip_val, settings.precision, settings.methods
        # The device of a model's variables is where it computes.
        where = None if model.variables else str(self._device)
        variables = tuple(map(id, self._variables))
        return [*modules, settings.loss, *by], (type(self), policies, variables, how, where)

    def _is_named(self) -> bool:
        return self._optimizer is not None and self._optimizer is self._named

    def _make_program(self) -> _Program:
        program = _Program(self._list_captured())
        if self._is_named():
            program.lend(self._optimizer)
        return program

    def _take_program(self, program: _Program) -> bool:
        """Return whether a kept program computes here, and lend it to the optimizer."""
        if [*map(id, program.tensors)] != [*map(id, self._list_captured())]:
            return False  # the model has been moved
        return not self._is_named() or program.lend(self._optimizer)

    def _list_captured(self) -> list[Any]:
        """Return the tensors whose devices a traced function has fixed."""
        objects = [self._model.variables]
        if not self._is_named() and self._optimizer is not None:
            objects.append(self._optimizer)
        found = list_named_tensors(self._framework, objects)
        return [getattr(x, "handle", x) for _, x in found]

    def _build(self, optimizer: Any) -> None:
        # A ``MultiOptimizer`` takes the gradients of all variables that it was built for.
        takes_all = is_multiple(optimizer)
        if not optimizer.built:
            with on(self._framework, self._device):
                optimizer.build(self._variables if takes_all else self._list_trainable())
        known = {id(x) for each in all_optimizers(optimizer) for x in list_trained(each)}
        wanted = {id(x) for x in self._variables}
        if not wanted <= known or (takes_all and wanted != known):
            name = type(optimizer).__name__
            raise UnsupportedValueError(
                f"train {describe(self._model)} with the optimizer {name}",
                f"it was built for other variables than the {len(wanted)} that are trainable now",
                f"keras.optimizers.{name}(...) that is not built yet",
            )
        # An optimizer given by name computes only in steps, in their scope. Its own scope would
        # refer back to it, and keep it in use until ``gc`` runs.
        placed = optimizer.variables if self._is_named() else optimizer
        place(self._framework, placed, self._device)

    def _list_trainable(self) -> list[Any]:
        """Return the variables that are trainable, or are only frozen."""
        if not self._is_layer:
            return self._variables
        found = {id(x) for x in self._variables}
        for layer in list_layers(self._model):
            found.update(id(x) for x in list_parameters(layer))
        return [x for x in self._model.variables if id(x) in found]

    # -- modes ------------------------------------------------------------------------------------

    def _list_flagged(self) -> list[Any]:
        """Return the objects with a ``trainable`` flag: a Keras model's layers and variables."""
        # The flags of a ``tf.Module``'s variables never change.
        return [*list_layers(self._model), *self._model.variables] if self._is_layer else []

    def modes(self) -> Any:
        return _list_flags(self._list_flagged())

    def check_modes(self, modes: Any) -> Callable[[], None]:
        flagged = self._list_flagged()
        is_list = isinstance(modes, list) and all(type(flag) is bool for flag in modes)
        if not is_list or len(modes) != len(flagged):
            raise state_refusal("model", f"{describe(modes)} is not a list of {len(flagged)} flags")

        def put() -> None:
            for each, flag in zip(flagged, modes, strict=True):
                if each.trainable != flag:
                    each.trainable = flag

        return put

    # -- inputs -----------------------------------------------------------------------------------

    @cached_property
    def signature(self) -> Signature:
        if self._is_layer:
            return read_keras_signature(self._model)
        return read_signature(self._model, switches=("training",))

    def _make_operands(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return inputs as the operands of a traced function."""
        inputs = self.signature.arrange(inputs)
        return (_Named(inputs),) if isinstance(inputs, dict) else tuple(inputs)

    # -- steps ------------------------------------------------------------------------------------

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self.build(inputs)
        # This check takes a microsecond for a model of ten layers.
        if not self.pending and _list_flags(self._flagged) != self._flags:
            self._get_ready(self._device)
        # As separate arguments, as in a loop by hand: TensorFlow inspects a tuple more slowly.
        if self.settings.accumulate_grad_batches == 1:
            return self._take(*self._step(*self._make_operands(inputs), y))
        scale = self._make_scale(inputs, y)
        operands = scale, *self._make_operands(inputs), y
        found, prediction, self._sums = self._add(self._sums, *operands)
        self.pending += 1
        if self.pending == self.settings.accumulate_grad_batches:
            self.flush()
        return self._take(found, prediction)

    def _take(self, found: Any, prediction: Any) -> tuple[Tensor, Any]:
        """Return the loss of a traced function and the prediction; note its weight and labels."""
        loss, self.weight = self._objective.take(found, prediction, self.batch)
        return loss, prediction

    def _make_scale(self, inputs: Inputs, y: Any) -> Scale | None:
        """Return the scale of the next batch."""
        batch = self._objective.weigh(inputs, y, self.portion)
        if not self.pending:
            self._reference = batch.whole
        return Scale.make(*batch, self._reference)

    def flush(self) -> None:
        if self.pending:
            assert self._sums is not None
            self._apply(*self._sums)
            self._sums, self.pending = None, 0

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self.build(inputs)
        return self._take(*self._evaluate(*self._make_operands(inputs), y))

    def check_labels(self) -> None:
        self._objective.check_labels()

    def predict(self, inputs: Inputs) -> Any:
        if not self._is_ready:
            self.build(inputs)
        return self._forward(*self._make_operands(inputs))

    def _compute_alone(self, *inputs: Any) -> Any:
        compiled.check_own_methods(self._model, "predict_step")
        with tf.device(self._framework.devices.native(self._device)):
            return self._compute_prediction(inputs, training=False)

    def _enter_device(self) -> AbstractContextManager[Any]:
        """Return the scope in which a step computes."""
        return tf.device(self._framework.devices.native(self._device))

    def _train(self, *batch: Any) -> tuple[Any, Any]:
        with self._enter_device():
            found, prediction, gradients, total = self._differentiate(None, batch)
            self._update(gradients, total)
            return found, prediction

    def _accumulate(self, sums: Any, scale: Scale | None, *batch: Any) -> tuple[Any, ...]:
        """Return the gradients' sums, too; None for a variable that no batch has used."""
        with self._enter_device():
            found, prediction, gradients, total = self._differentiate(scale, batch)
            # The gradient of an embedding has other rows in each batch.
            new = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
            if sums is not None:
                pairs = zip(sums[0], new, strict=True)
                new = [a if b is None else b if a is None else a + b for a, b in pairs]
                total += sums[1]
            return found, prediction, (new, total)

    def _apply_sums(self, sums: list[Any], total: Tensor) -> None:
        with self._enter_device():
            self._update(sums, total)

    def _differentiate(self, scale: Scale | None, batch: tuple[Any, ...]) -> Any:
        """Return what ``Objective`` finds, the prediction, the gradients and their factor.

        Args:
            scale: of the batch; without one, the factor is None, and counts as 1.
            batch: the inputs and the target.
        """
        *inputs, y = batch
        return self._compute_gradients(inputs, y, scale)

    def _compute_gradients(self, inputs: Sequence[Any], y: Any, scale: Scale | None) -> Any:
        with tf.GradientTape() as tape:
            found, prediction = self._compute_losses(inputs, y, training=True)
            loss, weight, _ = found
            part, factor = loss, None
            if scale is not None:
                factor = scale.factor(weight)
                part = loss * tf.cast(factor, loss.dtype)
            # The factor is 1, unless the optimizer scales float16.
            scaled = self._optimizer.scale_loss(part)
        return found, prediction, tape.gradient(scaled, self._variables), factor

    def _update(self, gradients: list[Any], total: Tensor | None) -> None:
        """Take a step with sums of gradients, divided by ``total`` unless it is None."""
        gradients = [*map(_add_up_rows, gradients)]
        if total is not None:
            gradients = self._take_mean(gradients, total)
        if self.settings.gradient_clip_val:
            gradients = self._clip(gradients)
        # In a replica Keras sums gradients by a function with a gradient of its own, even in a
        # single one. TensorFlow keeps that function forever, and with it the whole traced step:
        # https://github.com/tensorflow/tensorflow/issues/97697
        if tf.distribute.has_strategy() or is_scaling(self._optimizer):
            self._optimizer.apply(gradients, self._variables)
        else:
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda _: self._optimizer.apply(gradients, self._variables))

    def _take_mean(self, gradients: list[Any], total: Tensor) -> list[Any]:
        """Return sums of gradients, divided by the sum of their factors.

        In float16 a sum may be 0, of batches of weight 0.
        """
        return _scale(gradients, tf.math.divide_no_nan(tf.ones_like(total), total))

    def _choose_total(self, factor: Tensor, weight: Any) -> Tensor | None:
        """Return the factor of a shard; None if those of all shards of a step add up to 1."""
        is_alone = self.settings.accumulate_grad_batches == 1
        return None if is_alone and weight is None else factor

    def _measure(self, *batch: Any) -> tuple[Any, Any]:
        *inputs, y = batch
        with tf.device(self._framework.devices.native(self._device)):
            return self._compute_losses(inputs, y, training=False)

    def _compute_losses(self, inputs: Sequence[Any], y: Any, *, training: bool) -> tuple[Any, Any]:
        """Return what ``Objective`` finds, and the prediction."""
        if self.settings.methods is not None:
            return self._objective.compute(self._model, *inputs, is_step=training), None
        compiled.check_own_methods(self._model, "test_step", "compute_loss")
        prediction = self._compute_prediction(inputs, training=training)
        return self._compute_loss(prediction, y), prediction

    def _compute_prediction(self, inputs: Sequence[Any], *, training: bool) -> Any:
        """Return the prediction; in float32 after computing in fewer bits."""
        if self._policy is None:
            return self._call(inputs, training=training)
        with compute_in(self._policy, self._model, self.settings):
            prediction = self._call(inputs, training=training)
        return tf.nest.map_structure(
            lambda x: widen(x) if x.dtype in (tf.bfloat16, tf.float16) else x, prediction
        )

    def _call(self, inputs: Sequence[Any], *, training: bool) -> Any:
        mode = {"training": training} if self._is_told else {}
        first = inputs[0] if inputs else None
        given, named = ((), first.inputs) if isinstance(first, _Named) else (inputs, {})
        operands, options = join_keras_inputs(self._model, given, named)
        return self._model(*operands, **options, **mode)

    def _compute_loss(self, prediction: Any, y: Any) -> Any:
        """Return what ``Objective`` finds; the loss has the layers' own, as in Keras's ``fit``.

        The layers' own losses are a regularization.
        """
        loss, *rest = self._objective.compare(prediction, y)
        if added := self._model.losses if self._is_layer else []:
            loss = tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in added)])
        return loss, *rest

    def _clip(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients, clipped as ``torch.nn.utils.clip_grad_norm_`` clips them."""
        numbers = [getattr(each, "values", each) for each in gradients if each is not None]
        squares = [tf.reduce_sum(tf.cast(x, tf.float32) ** 2) for x in numbers]
        norm = tf.sqrt(tf.add_n(squares)) / self._optimizer.scale_loss(tf.ones(()))
        return _scale(gradients, tf.minimum(1.0, self.settings.gradient_clip_val / (norm + 1e-6)))


def _add_up_rows(gradient: Any) -> Any:
    """Return a gradient with one row for each token that a batch has used.

    That of an embedding has a row for each use. Keras squares each of these rows alone.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    tokens, places = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(tokens))
    return tf.IndexedSlices(sums, tokens, gradient.dense_shape)


def _scale(gradients: list[Any], factor: Tensor) -> list[Any]:
    return [x if x is None else tf.math.scalar_mul(tf.cast(factor, x.dtype), x) for x in gradients]


def _list_flags(flagged: list[Any]) -> list[bool]:
    return [each.trainable for each in flagged]


# -- traced functions -----------------------------------------------------------------------------


class _Named(NamedTuple):
    """Inputs by name, as one operand of a traced function.

    Args:
        inputs: the inputs.
    """

    inputs: dict[str, Any]


class Scale(NamedTuple):
    """The weights of a shard of a batch in a step, as scalars: see ``BatchWeight``.

    Args:
        own, whole: of the shard and of the batch, if all elements count alike.
        reference: the ``whole`` of the first batch of the step.
    """

    own: Tensor
    whole: Tensor
    reference: Tensor

    @classmethod
    def make(cls, *numbers: float) -> Scale:
        """Return tensors, so that a traced function holds for any numbers."""
        return cls(*(tf.constant(x, tf.float64) for x in numbers))

    def factor(self, weight: Any) -> Tensor:
        """Return the factor of the loss in the step, as ``BatchWeight.relative`` does."""
        return self.weight(weight) / self.reference

    def weight(self, weight: Any) -> Tensor:
        """Return the weight of the loss; 0 for a shard without examples."""
        if weight is None:
            return self.own
        is_there = tf.cast(self.own > 0, tf.float64)
        return tf.cast(weight, tf.float64) * is_there + self.own * LEAST_WEIGHT


class _Program:
    """The traced functions of all learners that train one model in one way.

    TensorFlow traces them with any learner, again for each shape. They hold neither learner nor
    model.

    Args:
        tensors: the variables' tensors, whose devices the functions have fixed. After a move the
            model has other tensors.

    Attributes:
        users: these learners, by their ids.
        slots, handles: the variables of an optimizer that is given by name, which the steps
            change, and their handles at the trace.
        optimizer: a reference to the optimizer that has them; None before the first one.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.slots: list[Any] = []
        self.handles: list[Any] = []
        self.optimizer: ref[Any] | None = None
        self.tensors = tensors
        self.users: WeakValueDictionary[int, TensorFlowLearner] = WeakValueDictionary()
        self.step = _trace(self.users, TensorFlowLearner._train)
        self.accumulate = _trace(self.users, TensorFlowLearner._accumulate)
        self.evaluate = _trace(self.users, TensorFlowLearner._measure)
        self.apply = _trace(self.users, TensorFlowLearner._apply_sums)
        self.forward = _trace(self.users, TensorFlowLearner._compute_alone)

    def lend(self, optimizer: Any) -> bool:
        """Give an optimizer the variables of the previous one, with its own values.

        Returns:
            False if the previous one is in use, or its variables have been moved.
        """
        variables = optimizer.variables
        if self.optimizer is None:
            self.slots = [value_of(each) for each in variables]
            self.handles = [each.handle for each in self.slots]
        is_in_use = self.optimizer is not None and self.optimizer() not in (None, optimizer)
        handles = [each.handle for each in self.slots]
        if is_in_use or [*map(id, handles)] != [*map(id, self.handles)]:
            return False
        for variable, slot in zip(variables, self.slots, strict=True):
            if (value := value_of(variable)) is not slot:
                slot.assign(value)
                set_value(variable, slot)
        self.optimizer = ref(optimizer)
        return True


def _find_programs(model: Any) -> Programs[_Program]:
    """Return the programs that a model keeps."""
    # Not through ``__setattr__``, which would track them. A ``CompiledLoss`` notes ``is_built``.
    ignored = "_called", "_variable_read", "is_built"
    return vars(model).setdefault(OF_PROGRAMS, Programs(4, ignored))


def _trace(users: WeakValueDictionary[int, TensorFlowLearner], method: Callable[..., Any]) -> Any:
    def call(*operands: Any) -> Any:
        # The learner that calls is one of them. Threads may add others meanwhile.
        user = next(x for each in users.valuerefs() if (x := each()) is not None)
        return method(user, *operands)

    # Without AutoGraph, as in Keras's own fit: it would wrap the errors of the code it converts.
    # TensorFlow counts the traces of one function in all objects together, and warns. It counts
    # each partial alone.
    return tf.function(partial(call), autograph=False)
