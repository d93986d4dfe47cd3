"""Steps of training of a Gluon block: ``autograd`` and ``gluon.Trainer``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from d2ldev import UnsupportedValueError
from d2ldev.framework import (
    Framework,
    Inputs,
    Learner,
    Objective,
    Signature,
    Tensor,
    TrainingSettings,
    Weighted,
    describe,
    place,
    read_signature,
    state_refusal,
)
from d2ldev_mxnet.framework import NumPySemantics, mx
from d2ldev_mxnet.training.losses import LOSSES, avoid_zero, divide
from d2ldev_mxnet.training.optimizers import make_optimizer

# Half of how many batches may be queued.
_IN_FLIGHT = 4


class MXNetLearner(Learner):
    """A Gluon block, hybridized or not, that a ``gluon.Trainer`` trains.

    Gluon's own losses give one number for each example; a loss here is their mean:
    ``lambda prediction, y: gluon.loss.L2Loss()(prediction, y).mean()``. Parameters that a step does
    not use stay as they are in it.
    """

    def __init__(self, framework: Framework, model: Any, settings: TrainingSettings) -> None:
        super().__init__(settings)
        if not isinstance(model, mx.gluon.Block):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is not a gluon.Block",
                "put the parameters into a gluon.Block",
            )
        self._framework = framework
        self._model = model
        self._queued: list[Tensor] = []  # the losses of the last batches
        self._sums: dict[int, Any] = {}  # of gradients, by the numbers of the parameters
        # Of the batches of a step: the sum of their factors, and the reference of these.
        self._total: Any = 0.0
        self._reference = 1.0
        parameters = self._parameters()
        _check_parameters(model, parameters, is_trained=settings.optimizer is not None)
        self._objective = Objective(framework, settings, LOSSES, divide)
        self._trainer = make_optimizer(framework, settings, parameters)

    # -- model and optimizer ----------------------------------------------------------------------

    def sync(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._trainer}

    def replace(self, components: dict[str, Any]) -> None:
        self.sync()
        self._model, self._trainer = components["model"], components["optimizer"]
        sums = self._sums, self._total
        sums = place(self._framework, sums, self._parameters()[0].list_ctx()[0])
        self._sums, self._total = sums

    @property
    def is_built(self) -> bool:
        return all(parameter._data is not None for parameter in self._parameters())

    def build(self, inputs: Inputs) -> None:
        self.predict(inputs)

    def _parameters(self) -> list[Any]:
        # In the order of the layers. MXNet's names count on, and differ between two equal models.
        return list(self._model.collect_params().values())

    # -- modes ------------------------------------------------------------------------------------

    def modes(self) -> list[str]:
        """Return what is done with the gradient of each parameter, in the order of the layers."""
        return [parameter.grad_req for parameter in self._parameters()]

    def check_modes(self, modes: Any) -> Callable[[], None]:
        parameters = self._parameters()
        is_list = isinstance(modes, list) and len(modes) == len(parameters)
        if not is_list or not all(request in ("null", "write", "add") for request in modes):
            raise state_refusal("model", f"{describe(modes)} are not modes of its parameters")

        def put() -> None:
            with NumPySemantics():
                for parameter, request in zip(parameters, modes, strict=True):
                    if parameter.grad_req != request:  # else its gradient would be another one
                        parameter.grad_req = request

        return put

    # -- inputs -----------------------------------------------------------------------------------

    @cached_property
    def signature(self) -> Signature:
        # A block takes its inputs by position only.
        model = self._model
        if type(model).forward is not mx.gluon.HybridBlock.forward:
            return read_signature(model.forward, by_position=True)
        # The block itself gives F and its own parameters.
        own = ("F", *model._reg_params)
        return read_signature(model.hybrid_forward, switches=own, by_position=True)

    # -- steps ------------------------------------------------------------------------------------

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics():
            for parameter in self._trainer._params:
                if parameter.grad_req == "add":
                    for gradient in parameter._grad or ():
                        # Not by ``Parameter.zero_grad``, which takes MXNet's old arrays only.
                        gradient[()] = 0
            loss, prediction = self._differentiate(inputs, y)
            if self.settings.accumulate_grad_batches == 1:
                self._update()
                return loss, prediction
            self._add(self._find_factor(inputs, y))
            self.pending += 1
            if self.pending == self.settings.accumulate_grad_batches:
                self._apply_sums()
        return loss, prediction

    def flush(self) -> None:
        if self.pending:
            self._apply_sums()

    def _apply_sums(self) -> None:
        """Take a step with the gradients of the batches since the last one."""
        with NumPySemantics():
            for number, total in self._sums.items():
                parameter = self._trainer._params[number]
                if parameter.grad_req != "null":
                    parameter.list_grad()[0][()] = total
                    parameter.list_data()[0]._fresh_grad = True
            self._update(self._total)
        self._sums, self.pending = {}, 0

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics(), mx.autograd.pause():
            return self._compute_losses(inputs, y, is_step=False)

    def predict(self, inputs: Inputs) -> Any:
        with NumPySemantics(), mx.autograd.pause():
            return self._compute_prediction(inputs)

    def _find_factor(self, inputs: Inputs, y: Any) -> Any:
        """Return the factor of the loss of a batch or a shard in a step, and add it up."""
        batch = self._objective.weigh(inputs, y, self.portion)
        if not self.pending:
            self._total, self._reference = 0.0, batch.whole
        factor = batch.relative(self.weight, self._reference)
        self._total = self._total + factor
        return factor

    def _add(self, factor: Any) -> None:
        """Add the gradients of this batch, times a factor, to those of the batches before it."""
        for number, parameter in enumerate(self._trainer._params):
            if parameter.grad_req != "null" and (x := parameter.list_data()[0])._fresh_grad:
                gradient = parameter.list_grad()[0].as_np_ndarray()
                if not isinstance(factor, float) or factor != 1:
                    gradient = gradient * factor
                self._sums[number] = gradient + self._sums.get(number, 0)
                x._fresh_grad = False

    def _differentiate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        """Compute the gradients of a batch; return its loss and its prediction."""
        with mx.autograd.record():
            loss, prediction = self._compute_losses(inputs, y, is_step=True)
        loss.backward()
        return loss, prediction

    def _update(self, total: Any = None) -> None:
        """Take a step with the gradients, divided by ``total`` unless it is None."""
        if total is not None and not (isinstance(total, float) and total == 1):
            is_array = isinstance(total, mx.np.ndarray)
            if is_array:
                total = avoid_zero(total)
            for gradient in self._list_fresh():
                # MXNet divides in place by an array of the same dtype only.
                gradient /= total.astype(gradient.dtype) if is_array else total
        if self.settings.gradient_clip_val:
            self._clip(self.settings.gradient_clip_val)
        # By 1: the loss is a mean already.
        self._trainer.update(1, ignore_stale_grad=True)

    def _compute_losses(self, inputs: Inputs, y: Any, *, is_step: bool) -> tuple[Tensor, Any]:
        if self.settings.methods is not None:
            found = self._objective.compute(self._model, *inputs, is_step=is_step)
            loss, self.weight = self._objective.take(found, None, self.batch)
            self._limit_queue(loss)
            return loss, None
        prediction = self._compute_prediction(inputs)
        y = Weighted(*map(_as_numpy, y)) if isinstance(y, Weighted) else _as_numpy(y)
        found = self._objective.compare(prediction, y)
        loss, self.weight = self._objective.take(found, prediction, self.batch)
        self._limit_queue(loss)
        return loss, prediction

    def _limit_queue(self, loss: Tensor) -> None:
        """Wait at every fourth batch for the loss of the batch four before.

        MXNet's queue takes operations, and their operands, until the memory of the host is full.
        """
        self._queued.append(loss)
        if len(self._queued) == 2 * _IN_FLIGHT:
            self._queued[_IN_FLIGHT - 1].wait_to_read()
            del self._queued[:_IN_FLIGHT]

    def check_labels(self) -> None:
        self._objective.check_labels()

    def _compute_prediction(self, inputs: Inputs) -> Any:
        return self._model(*[_as_numpy(x) for x in self.signature.arrange(inputs)])

    def _clip(self, largest: float) -> None:
        # gluon.utils.clip_global_norm would wait for the norm, and count stale gradients.
        gradients = self._list_fresh()
        norm = mx.np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = mx.np.minimum(largest / (norm + 1e-6), 1.0)
        for gradient in gradients:
            gradient *= factor

    def _list_fresh(self) -> list[Any]:
        """Return the gradients of the parameters that the batches of a step have used."""
        return [
            parameter.list_grad()[0].as_np_ndarray()
            for parameter in self._trainer._params
            if parameter.grad_req != "null" and parameter.list_data()[0]._fresh_grad
        ]


def _as_numpy(x: Any) -> Any:
    """Return an array of a loader as an array for a block, in the same memory.

    Without ``npx.set_np()``, Gluon's loaders yield MXNet's older arrays. Loaders with workers or
    pinned memory yield arrays in ``cpu_shared`` and ``cpu_pinned``. A hybridized block treats these
    as other devices than the CPU:
    https://github.com/apache/mxnet/blob/1.9.1/src/imperative/cached_op.cc
    """
    if isinstance(x, mx.nd.NDArray) and x.ctx.device_type in ("cpu_shared", "cpu_pinned"):
        x = mx.nd.from_dlpack(x.to_dlpack_for_read())
    return x.as_np_ndarray() if type(x) is mx.nd.NDArray else x


def _check_parameters(model: Any, parameters: list[Any], *, is_trained: bool) -> None:
    attempted = f"train the {type(model).__name__}"
    if is_trained and all(parameter.grad_req == "null" for parameter in parameters):
        raise UnsupportedValueError(
            attempted,
            "there is nothing to train: it has no parameter with a gradient",
            "net.collect_params().setattr('grad_req', 'write')",
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
