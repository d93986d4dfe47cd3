"""Steps of training of a model that has a copy on each of several devices, or in each process.

Of several devices a parameter has an array on each, and a ``kvstore`` adds up its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    LEAST_WEIGHT,
    Framework,
    Inputs,
    Tensor,
    TrainingSettings,
    flatten,
    list_needed_tensors,
    shard_batch,
    unwrap_broadcasts,
)
from d2ldev_mxnet.files import check_progress, form_of, progress_of
from d2ldev_mxnet.framework import NumPySemantics, mx
from d2ldev_mxnet.models import keep_on
from d2ldev_mxnet.training.learner import MXNetLearner
from d2ldev_mxnet.training.losses import avoid_zero

if TYPE_CHECKING:
    from d2ldev.framework import Group
    from d2ldev_mxnet.servers import Servers


class MXNetParallelLearner(MXNetLearner):
    """A Gluon block whose parameters have an array on each of several devices while it is trained.

    The arrays on the first device are the user's own. ``sync`` takes the others away.
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
        self._contexts = [mx.Context(framework.devices.native(device)) for device in devices]
        self._store: Any = None  # while there are several arrays
        super().__init__(framework, model, settings)

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        self.sync()
        return super().evaluate(*unwrap_broadcasts((inputs, y), self._framework.state.kinds))

    def predict(self, inputs: Inputs) -> Any:
        self.sync()
        return super().predict(inputs)

    # -- a step -----------------------------------------------------------------------------------

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if not self.is_built:
            self.build(unwrap_broadcasts(inputs, self._framework.state.kinds))
        self._spread()
        return super().step(inputs, y)

    def _join_predictions(self, predictions: list[Any]) -> Any:
        """Return the prediction for a batch, of those for its shards."""
        first, kinds = self._contexts[0], self._framework.state.kinds
        flats = [flatten(each, kinds, "join predictions") for each in predictions]
        columns = zip(*(flat.tensors.values() for flat in flats), strict=True)
        whole = [
            mx.np.concatenate([x.as_in_ctx(first) for x in column]) if column[0].ndim else column[0]
            for column in columns
        ]
        return flats[0].unflatten(dict(zip(flats[0].tensors, whole, strict=True)))

    def _differentiate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        shards = shard_batch(
            self._framework, self._model, self.settings, (inputs, y), self._devices
        )
        found, predictions = [], []
        with mx.autograd.record():
            for shard in shards:
                if shard.number:
                    loss, prediction = self._compute_losses(*shard.operands, is_step=True)
                    found.append((loss, self.weight, shard.share))
                    predictions.append(prediction)
        losses, weights, shares = (list(each) for each in zip(*found, strict=True))
        first = self._contexts[0]
        if self.weight is not None:
            each = [x + share * LEAST_WEIGHT for x, share in zip(weights, shares, strict=True)]
            self.weight = avoid_zero(sum(x.as_in_ctx(first) for x in each))  # that of the batch
            shares = [x / self.weight.as_in_ctx(x.ctx) for x in each]
        with mx.autograd.record():
            losses = [loss * share for loss, share in zip(losses, shares, strict=True)]
        mx.autograd.backward(losses)
        self._add_up()
        loss = sum(each.as_in_ctx(first) for each in losses)
        return loss, self._join_predictions(predictions)

    def _add_up(self) -> None:
        """Give the first device the sums of the gradients on all devices."""
        keys, gradients = [], []
        for key, parameter in enumerate(self._trainer._params):
            arrays = [] if parameter.grad_req == "null" else parameter.list_data()
            used = [x._fresh_grad for x in arrays]
            if any(used):
                keys.append(key)
                gradients.append(parameter.list_grad())
                for x, gradient, is_used in zip(arrays, gradients[-1], used, strict=True):
                    if not is_used:  # the device had no example, or used others only
                        gradient[()] = 0
                    x._fresh_grad = x is arrays[0]
        self._store.pushpull(keys, gradients, out=[first for first, *_ in gradients])

    def _update(self, total: Any = None) -> None:
        super()._update(total)
        # Copied, and not updated on each device: some optimizers count updates, such as Nadam.
        for parameter in self._trainer._params:
            if parameter.grad_req != "null":
                first, *others = parameter.list_data()
                for x in others:
                    first.copyto(x)

    # -- one array and several --------------------------------------------------------------------

    def _spread(self) -> None:
        """Give each parameter an array on each device, with its values."""
        if self._store is not None:
            return
        self._store = mx.kv.create("device")
        if self._trainer._compression_params:
            self._store.set_gradient_compression(self._trainer._compression_params)
        with NumPySemantics(), mx.autograd.pause():
            for parameter in self._parameters():
                first = parameter._data[0]
                parameter._data[1:] = others = [first.copyto(x) for x in self._contexts[1:]]
                keep_on(parameter, self._contexts)
                if parameter._grad is not None:
                    parameter._grad[1:] = gradients = [mx.np.zeros_like(x) for x in others]
                    mx.autograd.mark_variables(others, gradients, parameter.grad_req)
            for key, parameter in enumerate(self._trainer._params):
                self._store.init(key, parameter.list_data()[0])

    def sync(self) -> dict[str, Any]:
        if self._store is not None:
            self._gather()
        return super().sync()

    def _gather(self) -> None:
        """Leave each parameter on the first device alone."""
        with NumPySemantics(), mx.autograd.pause():
            for parameter in self._parameters():
                first, *others = parameter.list_data()
                if not parameter._differentiable:  # a running statistic
                    # Not the mean itself, which may differ by rounding where no step changed it.
                    more = [x.as_in_ctx(first.ctx) - first for x in others]
                    first[()] = first + sum(more) / len(self._contexts)
                del parameter._data[1:]
                if parameter._grad is not None:
                    del parameter._grad[1:]
                keep_on(parameter, self._contexts[:1])
        self._store = None


class MXNetGroupLearner(MXNetLearner):
    """A Gluon block that this process and others train together, each with a copy of it."""

    def __init__(
        self,
        framework: Framework,
        model: Any,
        settings: TrainingSettings,
        group: Group,
        servers: Servers,
    ) -> None:
        super().__init__(framework, model, settings)
        self._group, self._servers = group, servers
        # Of the gradients and of ``_small``; empty until all have the parameters of rank 0.
        self._keys: list[int] = []
        # Whether each parameter is used here; ``_own_uses`` is the same as an array.
        self._used: list[bool] = []
        # The share of the last shard and the dtype of its loss, for which there is ``_head``.
        self._share: tuple[float, Any] | None = None

    def replace(self, components: dict[str, Any]) -> None:
        super().replace(components)
        self._keys, self._share = [], None

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if not self._keys:
            if not self.is_built:
                self.build(inputs)
            self._begin()
        return super().step(inputs, y)

    def flush(self) -> None:
        super().flush()
        # In each step it would cost a message.
        statistics = [x for x in self._parameters() if not x._differentiable]
        self._servers.spread([x.data() for x in statistics if x._data is not None])

    def sync(self) -> dict[str, Any]:
        # During a run, the group ends a process that waits for a lost one. After the run the
        # program would wait forever when it reads the model.
        self._servers.wait()
        return super().sync()

    def _begin(self) -> None:
        """Give all processes what rank 0 begins with."""
        parameters = self._trainer._params
        if any(x._data is None for x in parameters):
            raise UnsupportedValueError(
                f"train the {type(self._model).__name__} in {self._group.size} processes",
                "the optimizer has parameters that the model does not, and they have no shape yet",
                "name their shapes, such as Dense(8, in_units=3)",
            )
        components = {"model": self._model, "optimizer": self._trainer}
        found = list_needed_tensors(self._framework, components, "begin with the model of rank 0")
        arrays = [x for _, x in found if type(x) in (mx.nd.NDArray, mx.np.ndarray)]
        content = str([self._settings_in_common(), *((x.shape, str(x.dtype)) for x in arrays)])
        own = None if self._group.rank else progress_of(self._trainer)
        first, *_ = self._group.gather("the beginning of the first step", own, content)
        self._servers.spread(arrays)
        check_progress(self._trainer, first)()
        with NumPySemantics():
            self._join(parameters)
            self._keys = self._servers.keys([*(x.data() for x in parameters), self._small])

    def _settings_in_common(self) -> list[Any]:
        """Return the settings that must be the same in the optimizers of all processes."""
        own = self._trainer.optimizer
        multipliers = [(x.lr_mult, x.wd_mult) for x in self._trainer._params]
        scale = self._trainer._scale  # of the gradients
        return [form_of(self._trainer), own.lr_mult, own.wd_mult, multipliers, scale]

    def _join(self, parameters: list[Any]) -> None:
        """Let the gradients of biases and the like be views of one array, which is sent as one.

        A message costs more than the few numbers of such a gradient. The next numbers of the array
        say in how many processes each parameter is used. The last one is the sum of the factors.
        """
        context = parameters[0].list_ctx()[0]
        joins = {
            number: parameter
            for number, parameter in enumerate(parameters)
            if len(parameter.shape) == 1
            and parameter.grad_req != "null"
            and (parameter.dtype, parameter.list_ctx()) == ("float32", [context])
        }
        size = sum(parameter.shape[0] for parameter in joins.values())
        self._small = mx.np.zeros(size + len(parameters) + 1, ctx=context)
        self._users, self._whole = self._small[size:-1], self._small[-1:]
        self._views: dict[int, Any] = {}
        start = 0
        for number, parameter in joins.items():
            stop = start + parameter.shape[0]
            self._views[number] = parameter._grad[0] = view = self._small[start:stop]
            mx.autograd.mark_variables(parameter.list_data(), [view], parameter.grad_req)
            start = stop

    def _differentiate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with mx.autograd.record():
            loss, prediction = self._compute_losses(inputs, y, is_step=True)
        if self.settings.accumulate_grad_batches > 1:
            loss.backward()
            return loss, prediction
        factor = self._find_factor(inputs, y)
        if isinstance(factor, mx.np.ndarray):
            loss.backward(factor)
            return loss, prediction
        # Of this process's share of the loss, without an operation for the product.
        share = (factor, loss.dtype)
        if self._share != share:
            self._share, self._head = share, mx.np.array(*share, ctx=loss.ctx)
        loss.backward(self._head)
        return loss, prediction

    def _update(self, total: Any = None) -> None:
        if total is None and self.weight is not None:
            total = self._total  # else the shares of the shards add up to 1
        keys, gradients, used = [], [], []
        for number, parameter in enumerate(self._trainer._params):
            is_trained = parameter.grad_req != "null"
            used.append(is_trained and parameter.list_data()[0]._fresh_grad)
            if is_trained:
                gradient = parameter.list_grad()[0]
                if not used[-1]:
                    gradient[()] = 0
                if gradient is not self._views.get(number):
                    keys.append(self._keys[number])
                    gradients.append(gradient)
        if used != self._used:
            self._used, self._own_uses = used, mx.np.array(used, ctx=self._users.ctx)
        self._own_uses.copyto(self._users)
        if total is not None:
            self._whole[()] = total
        self._servers.add_up([*keys, self._keys[-1]], [*gradients, self._small])
        if not all(used):
            # Another process may use them, for its shard of the batch.
            for parameter, users in zip(self._trainer._params, self._users.tolist(), strict=True):
                if users:
                    parameter.list_data()[0]._fresh_grad = True
        # As a scalar: it divides the gradients of scalars, too.
        super()._update(None if total is None else self._whole.reshape(()))
