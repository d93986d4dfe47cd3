"""Training steps of a model that has a copy on each of several devices, or in each process.

For several devices, ``tf.distribute.MirroredStrategy`` copies each variable to each device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    Framework,
    Inputs,
    Tensor,
    TrainingSettings,
    describe,
    shard_batch,
    unwrap_broadcasts,
)
from d2ldev_tensorflow.devices import OF_THE_HOST
from d2ldev_tensorflow.models import (
    all_optimizers,
    compute_at,
    find_unlisted_attributes,
    is_multiple,
    list_layers,
    list_statistics,
    list_trained,
    own_variables,
    set_value,
    value_of,
)
from d2ldev_tensorflow.strict import allow_mixing
from d2ldev_tensorflow.training.compiled import CompiledLoss
from d2ldev_tensorflow.training.learner import Scale, TensorFlowLearner
from d2ldev_tensorflow.training.optimizers import make_optimizer

if TYPE_CHECKING:
    from d2ldev.framework import Group


# A user may have numbered the seeds of the layers 0, 1, 2.
_SEED_STEP = 0x9E3779B9


class _LossOfShard:
    """A strategy in which a Keras loss is the mean over the examples of its own device.

    Keras divides its losses, and no other functions, by this number, so that their sum over the
    devices is right. d2ldev multiplies each loss by the share of the device instead.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        return 1


class _Strategy(_LossOfShard, tf.distribute.MirroredStrategy):
    """The strategy for several devices."""


class GroupStrategy(_LossOfShard, tf.distribute.MultiWorkerMirroredStrategy):
    """The strategy for several processes."""


class TensorFlowParallelLearner(TensorFlowLearner):
    """A Keras model whose variables have a copy on each of several devices during training.

    ``sync`` restores the model's own ``tf.Variable``s, with the trained values.
    """

    @property
    def takes_marks(self) -> bool:
        return True

    def __init__(
        self,
        framework: Framework,
        model: Any,
        settings: TrainingSettings,
        devices: Sequence[Device],
    ) -> None:
        self._devices = devices
        # Not the default: its numbers of device groups are shared by the strategies of a process.
        # A strategy for three devices would fail after one for two.
        is_virtual = framework.virtual_gpus is not None
        reduction = (
            tf.distribute.ReductionToOneDevice if is_virtual else tf.distribute.NcclAllReduce
        )
        self._strategy = _Strategy(
            [framework.devices.native(device) for device in devices], reduction()
        )
        self._single: list[tuple[Any, Any]] = []
        self._mirrored: dict[int, Any] = {}
        # The learner's own optimizer, which no other learner shares.
        super().__init__(framework, model, settings._replace(optimizer=make_optimizer(settings)))
        self.settings = settings

    def sync(self) -> dict[str, Any]:
        self._gather()
        return super().sync()

    def replace(self, components: dict[str, Any]) -> None:
        self._gather()
        for optimizer in all_optimizers(components["optimizer"]):
            _check_optimizer(optimizer, len(self._devices))
        super().replace(components)

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        self._gather()
        return super().evaluate(*unwrap_broadcasts((inputs, y), self._framework.state.kinds))

    def predict(self, inputs: Inputs) -> Any:
        self._gather()
        return super().predict(inputs)

    def _get_ready(self, device: Device | None) -> None:
        self._gather()
        super()._get_ready(device)
        for optimizer in all_optimizers(self._optimizer):  # its variables exist only now
            _check_optimizer(optimizer, len(self._devices))
        self._seeds = _list_seeds(self._framework, self._model)
        self._step = self._run_together(self._train, takes_shards=True)
        self._add = self._run_together(self._accumulate, takes_shards=True)
        self._apply = self._run_together(self._apply_sums, takes_shards=False)
        self._mirrored = {}

    def _run_together(
        self, method: Callable[..., Any], *, takes_shards: bool
    ) -> Callable[..., Any]:
        """Return a method that runs on all devices at once, each with its own operands.

        Args:
            method: a method of this learner.
            takes_shards: whether the last operand holds one ``(inputs, others)`` for each device.
                TensorFlow's per-replica values all need the same structure. Shards may have lists
                of other lengths, and lists of text.
        """

        def run(*operands: Any) -> Any:
            if not takes_shards:
                return self._strategy.run(method, operands)
            *others, shards = operands

            def run_shard(*others: Any) -> Any:
                context = tf.distribute.get_replica_context()
                inputs, target = shards[int(tf.get_static_value(context.replica_id_in_sync_group))]
                return method(*others, *inputs, target)

            return self._strategy.run(run_shard, tuple(others))

        traced = tf.function(partial(run), autograph=False)  # a partial, as in ``_trace``

        def call(*operands: Any) -> Any:
            self._spread()
            return traced(*operands)

        return call

    # -- a step -----------------------------------------------------------------------------------

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if not self._is_ready:
            self.build(unwrap_broadcasts(inputs, self._framework.state.kinds))
        loss = self.settings.loss
        if isinstance(loss, CompiledLoss) and not loss.is_built:
            self.evaluate(inputs, y)  # which makes variables, and these on one device
        shards = shard_batch(
            self._framework, self._model, self.settings, (inputs, y), self._devices, is_filled=True
        )
        number = sum(shard.number for shard in shards)
        _, whole = self._objective.weigh(inputs, y)
        if not self.pending:
            self._reference = whole
        own = []
        for (its_inputs, target), _, share in shards:
            scale = Scale.make(share * whole, whole, self._reference)
            own.append((self._make_operands(its_inputs), (target, scale)))
        with allow_mixing():
            loss, prediction = super().step((), own)
        with allow_mixing(), tf.device(self._framework.devices.native(self._device)):
            loss = self._add_shards(loss)
            if self.weight is not None:
                self.weight = self._add_shards(self.weight)
                loss /= tf.cast(self.weight, loss.dtype)
            whole = tf.nest.map_structure(lambda x: self._join_prediction(x, number), prediction)
            return loss, whole

    def _take(self, found: Any, prediction: Any) -> tuple[Any, Any]:
        *rest, labels = found
        results = self._strategy.experimental_local_results
        labels = tuple(x for each in labels for x in results(each))
        first = results(prediction)[0] if labels else None
        loss, self.weight = self._objective.take((*rest, labels), first, self.batch)
        return loss, prediction

    def _make_scale(self, inputs: Inputs, y: Any) -> None:
        return None  # each shard has its own

    def _add_shards(self, x: Any) -> Tensor:
        return tf.add_n(self._strategy.experimental_local_results(x))

    def _join_prediction(self, prediction: Any, number: int) -> Any:
        if prediction is None:
            return None
        shards = self._strategy.experimental_local_results(prediction)
        return tf.concat(shards, 0)[:number] if shards[0].shape.rank else shards[0]

    def _enter_device(self) -> AbstractContextManager[Any]:
        return nullcontext()  # each device has a scope of its own

    def _differentiate(self, scale: Scale | None, batch: tuple[Any, ...]) -> Any:
        """Return the products of each loss and its weight, and the weights; see the base class."""
        *inputs, (y, own) = batch
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        with _draw_own(self._seeds, tf.get_static_value(number)):
            (loss, weight, wrong), *rest, factor = self._compute_gradients(inputs, y, own)
        if weight is None:
            part = loss * tf.cast(own.own / own.whole, loss.dtype)
            return (part, None, wrong), *rest, self._choose_total(factor, weight)
        weight = own.weight(weight)
        return (loss * tf.cast(weight, loss.dtype), weight, wrong), *rest, factor

    def _update(self, gradients: list[Any], total: Tensor | None) -> None:
        context = tf.distribute.get_replica_context()
        used = [tf.convert_to_tensor(each) for each in gradients if each is not None]
        more = [] if total is None else [tf.cast(total, tf.float32)]
        whole = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, [*used, *more]))
        gradients = [None if each is None else next(whole) for each in gradients]
        if total is not None:
            gradients = self._take_mean(gradients, next(whole))
        if self.settings.gradient_clip_val:
            gradients = self._clip(gradients)
        self._optimizer.apply(gradients, self._variables)

    # -- one variable and several -----------------------------------------------------------------

    def _spread(self) -> None:
        """Give each variable a copy of its value on each device."""
        if self._single:
            return
        with tf.init_scope(), self._strategy.scope():
            for variable in _list_variables(self._model, self._optimizer):
                single = value_of(variable)
                if single is None:
                    continue
                self._single.append((variable, single))
                if id(variable) in self._mirrored:
                    mirrored = self._mirrored[id(variable)]
                    set_value(variable, mirrored)
                    mirrored.assign(single)
                else:
                    # Private: the strategy in force makes the variable with Keras's settings.
                    variable._initialize(tf.convert_to_tensor(single))
                    self._mirrored[id(variable)] = value_of(variable)
        self._settle(self._strategy, "")

    def _gather(self) -> None:
        """Restore the model's own variables, with the values of the first device."""
        if not self._single:
            return
        with tf.init_scope():
            for variable, single in self._single:
                first, *_ = self._strategy.experimental_local_results(value_of(variable))
                single.assign(first)
                set_value(variable, single)
        self._single = []
        self._settle(tf.distribute.get_strategy(), self._framework.devices.native(self._device))

    def _settle(self, strategy: Any, native: str) -> None:
        for layer in list_layers(self._model):
            compute_at(layer, native)
        for optimizer in all_optimizers(self._optimizer):
            compute_at(optimizer, native)
            # Private: Keras sets these three once, when an optimizer is made and built.
            optimizer._distribution_strategy = strategy
            # Its gradients are summed already. Not through ``__setattr__``, which looks for state.
            vars(optimizer).pop("_all_reduce_sum_gradients", None)
            if strategy is self._strategy:
                vars(optimizer)["_all_reduce_sum_gradients"] = list
            # By the names of variables, which have changed.
            optimizer._trainable_variables_indices = {
                optimizer._var_key(x): number for number, x in enumerate(list_trained(optimizer))
            }


class TensorFlowGroupLearner(TensorFlowLearner):
    """A model with a copy in each of several processes, whose gradients are summed.

    After a step, other state of layers is rank 0's, for example the statistics of a normalization.
    """

    def __init__(
        self,
        framework: Framework,
        model: Any,
        settings: TrainingSettings,
        group: Group,
        strategy: Any,
    ) -> None:
        self._rank = group.rank
        self._strategy = strategy
        super().__init__(framework, model, settings)

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        return super().step(inputs, (y, super()._make_scale(inputs, y)))

    def _make_scale(self, inputs: Inputs, y: Any) -> None:
        return None  # it is beside the target

    def _get_ready(self, device: Device | None) -> None:
        super()._get_ready(device)
        kept = [x for x in self._model.variables if not x.trainable]
        self._is_synchronized = False
        if self._is_layer:
            # The variables of a frozen layer do not change, and may be many.
            layers = list_layers(self._model)
            kept = [x for layer in layers for x in list_statistics(layer)]
            self._is_synchronized = any(getattr(each, "synchronized", False) for each in layers)
        self._kept = [x for x in map(_variable, kept) if x.dtype.is_floating]
        self._seeds = _list_seeds(self._framework, self._model)
        variables = _list_variables(self._model, self._optimizer)
        self._begin_as_first([*map(_variable, variables)])

    def _begin_as_first(self, variables: list[Any]) -> None:
        """Give variables the values that they have in the process with rank 0."""
        variables = [x for x in variables if x.dtype not in OF_THE_HOST]
        values = [tf.cast(x, _find_sent_dtype(x.dtype)) for x in variables]
        for variable, value in zip(
            variables, self._add_up(self._select_first(values)), strict=True
        ):
            variable.assign(tf.cast(value, variable.dtype))

    def _differentiate(self, scale: Scale | None, batch: tuple[Any, ...]) -> Any:
        if self._is_synchronized:  # these layers use the strategy that is in force
            return self._strategy.run(self._differentiate_shard, (batch,))
        return self._differentiate_shard(batch)

    def _differentiate_shard(self, batch: tuple[Any, ...]) -> Any:
        *inputs, (y, scale) = batch
        with self._enter_device():
            with _draw_own(self._seeds, self._rank):
                found, *rest, factor = self._compute_gradients(inputs, y, scale)
            return found, *rest, self._choose_total(factor, found[1])

    def _update(self, gradients: list[Any], total: Tensor | None) -> None:
        used = [each for each in gradients if each is not None]
        more = [] if total is None else [tf.cast(total, tf.float32)]
        whole = iter(self._add_up([*used, *more, *self._select_first(self._kept)]))
        gradients = [None if each is None else next(whole) for each in gradients]
        super()._update(gradients, None if total is None else next(whole))
        for variable, value in zip(self._kept, whole, strict=True):
            variable.assign(value)

    def _select_first(self, values: list[Any]) -> list[Any]:
        """Return values whose sums over the processes are rank 0's values."""
        return [x if self._rank == 0 else tf.zeros_like(x) for x in values]

    def _add_up(self, values: list[Any]) -> list[Any]:
        """Return the sums of tensors over the processes, on the device of the model."""
        extended = self._strategy.extended
        found: dict[int, Any] = {}
        with allow_mixing():
            with self._strategy.scope(), tf.device(extended.worker_devices[0]):
                for dtype in dict.fromkeys(x.dtype for x in values):  # one dtype in each message
                    numbers = [i for i, x in enumerate(values) if x.dtype == dtype]
                    sent = [_copy(values[i]) for i in numbers]
                    sums = extended.batch_reduce_to("SUM", [(x, x) for x in sent])
                    found.update(zip(numbers, sums, strict=True))
            with self._enter_device():
                results = self._strategy.experimental_local_results
                return [_copy(results(found[i])[0]) for i in range(len(values))]


@contextmanager
def _draw_own(seeds: Sequence[Any], number: int) -> Iterator[None]:
    """Let the layers draw other numbers in a block than on the other devices: masks of dropout.

    Otherwise each device begins with the same seeds. After the block the seeds are those of all
    devices again, and have counted the draws. So a run that resumes draws the same numbers.

    Args:
        seeds: the variables with the layers' seeds: see ``keras.random.SeedGenerator``.
        number: of the device, from 0; the first one draws with the seeds as they are.
    """
    # The second number of a seed counts the draws. Both have 32 bits.
    first = int(number) * _SEED_STEP % 2**31
    own = [tf.constant([first, 0], x.dtype) for x in seeds] if number else []
    for x, step in zip(seeds, own, strict=False):
        x.assign(x.value + step)
    try:
        yield
    finally:
        for x, step in zip(seeds, own, strict=False):
            x.assign(x.value - step)


def _list_seeds(framework: Framework, model: Any) -> list[Any]:
    """Return the variables with the seeds of a Keras model's layers, each once."""
    kind = sys.modules["keras"].random.SeedGenerator
    slots = [slot for layer in list_layers(model) for slot in framework.models.members(layer)]
    found = [slot.value.state for slot in slots if isinstance(slot.value, kind)]
    return list({id(x): x for x in found}.values())


def _variable(x: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable."""
    return x if isinstance(x, tf.Variable) else x.value


def _find_sent_dtype(dtype: Any) -> Any:
    """Return a dtype with the same numbers that TensorFlow can sum over processes."""
    if dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64):
        return dtype
    return tf.float64 if dtype.is_floating else tf.int64


def _copy(x: Any) -> Any:
    """Return a tensor, or an ``IndexedSlices``, on the device of the scope."""
    return tf.nest.map_structure(tf.identity, x, expand_composites=True)


def _list_variables(model: Any, optimizer: Any) -> list[Any]:
    """Return the variables of a model and of its optimizers, each once."""
    found = [*model.variables]
    for each in all_optimizers(optimizer):
        found += own_variables(each)
    return list({id(x): x for x in found}.values())


def _check_optimizer(optimizer: Any, number: int) -> None:
    """Refuse an optimizer that a mirrored strategy cannot run.

    A mirrored strategy changes no variable in a ``tf.cond``, and renames the user's variables.
    """
    is_averaged = getattr(optimizer, "use_ema", False)
    refused = {
        "ema_overwrite_frequency": is_averaged and optimizer.ema_overwrite_frequency,
        "gradient_accumulation_steps": getattr(optimizer, "gradient_accumulation_steps", None),
        "optimizers for some variables": is_multiple(optimizer),
        "variables that Keras does not list": any(find_unlisted_attributes(optimizer)),
    }
    for what, is_used in refused.items():
        if is_used:
            raise UnsupportedValueError(
                f"train on {number} devices with {describe(optimizer)}",
                f"tf.distribute.MirroredStrategy does not support its {what}",
                "leave these out, with Trainer(accumulate_grad_batches=...) for "
                "gradient_accumulation_steps; "
                "or num_gpus=1",
            )
