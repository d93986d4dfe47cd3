"""Training: ``autograd``, Gluon blocks, ``gluon.Trainer``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.framework import Framework, Learner, Settings, Tensor, Training, Weighted
from d2ldev.framework.training import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    WEIGHT_DECAY,
    state_refusal,
    tell_epoch,
)
from d2ldev.operations.parallel import PartSampler, sharded_copy
from d2ldev.operations.placing import place
from d2ldev.operations.steps import (
    check_labels,
    check_loss,
    check_shapes,
    check_weights,
    input_names,
    loss_among,
    own_loss,
)
from d2ldev_mxnet.framework import NumPySemantics, mx


class AdamW(mx.optimizer.Adam):
    """Adam with a decay of the weights beside the gradient; MXNet 1.9.1 has it inside only."""

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Shorten the weights, and take a step of Adam."""
        weight *= 1 - self._get_lr(index) * WEIGHT_DECAY
        super().update(index, weight, grad, state)


_ADAM = {"beta1": BETAS[0], "beta2": BETAS[1], "epsilon": ADAM_EPSILON}
_OPTIMIZERS: dict[str, tuple[type[Any], dict[str, float]]] = {
    "sgd": (mx.optimizer.SGD, {}),
    "momentum": (mx.optimizer.SGD, {"momentum": MOMENTUM}),
    "adam": (mx.optimizer.Adam, _ADAM),
    "adamw": (AdamW, _ADAM),
    # MXNet adds it inside the root.
    "adagrad": (mx.optimizer.AdaGrad, {"eps": ADAGRAD_EPSILON**2}),
}
# The range of drawn seeds. ``mx.random.seed`` silently takes the low 32 bits of any number.
_SEEDS = range(2**31 - 1)


class MXNetTraining(Training):
    """Steps of training, accuracy, and MXNet's random numbers.

    Gluon's loaders shuffle with ``np.random``, whose state d2ldev keeps.
    """

    sharded_types = (mx.gluon.data.DataLoader,)

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def sharded(self, loader: Any, rank: int, size: int) -> Any:
        parts = PartSampler(loader._batch_sampler, rank, size)
        parts.sampler = getattr(loader._batch_sampler, "_sampler", parts.sampler)
        return sharded_copy(
            loader,
            mx.gluon.data.DataLoader,
            parts,
            _batch_sampler=parts,
            _iter=None,  # batches that ``auto_reload`` has read ahead
        )

    def begin_epoch(self, loader: Any, epoch: int) -> None:
        batches = loader._batch_sampler
        # That of Gluon's own batches, else of the user's.
        sampler = getattr(batches, "_sampler", getattr(batches, "sampler", None))
        if tell_epoch(epoch, loader, batches, sampler):
            loader.clean()  # what ``auto_reload`` has read ahead is of another epoch

    def learner(self, model: Any, settings: Settings) -> Learner:
        return MXNetLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        with NumPySemantics():
            found = mx.np.argmax(prediction, axis=-1)
            labels = y.as_np_ndarray().astype("int64")
            return (found == labels).astype("float32").mean()

    def random_state(self, device: Device) -> int:
        # MXNet's generators cannot be read. So they are given a new seed, which is drawn from them:
        # a run that goes on from here and one that is continued from here draw the same, and so
        # does the whole run when it is repeated.
        with NumPySemantics():
            seed = int(mx.np.random.randint(_SEEDS.start, _SEEDS.stop))
        mx.random.seed(seed)
        return seed

    def checked_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        if type(state) is not int or state not in _SEEDS:
            raise state_refusal("generator", f"{describe(state)} is no state of one")
        return lambda: mx.random.seed(state)


class MXNetLearner(Learner):
    """A Gluon block, hybridized or not, that a ``gluon.Trainer`` trains.

    Gluon's own losses give one number for each example; a loss here is their mean:
    ``lambda prediction, y: gluon.loss.L2Loss()(prediction, y).mean()``. Parameters that a step does
    not use stay as they are in it.
    """

    def __init__(self, framework: Framework, model: Any, settings: Settings) -> None:
        super().__init__(settings)
        if not isinstance(model, mx.gluon.Block):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no gluon.Block",
                "put the parameters into a gluon.Block",
            )
        self._framework = framework
        self._model = model
        self._sums: dict[int, Any] = {}  # of gradients, by the numbers of the parameters
        _check_parameters(model, self._parameters(), is_trained=settings.optimizer is not None)
        self._loss = loss_among(settings, _LOSSES)
        self._trainer = self._made(settings)

    def _made(self, settings: Settings) -> Any:
        optimizer = settings.optimizer
        parameters = self._parameters()
        if optimizer is None:  # the model is only evaluated
            return None
        if isinstance(optimizer, mx.gluon.Trainer):
            _check_trainer(optimizer, parameters)
            return place(self._framework, optimizer, parameters[0].list_ctx()[0])
        with NumPySemantics():
            if isinstance(optimizer, str):
                cls, options = _OPTIMIZERS[optimizer]
                optimizer = cls(learning_rate=settings.lr, **options)
            if isinstance(optimizer, mx.optimizer.Optimizer):
                return mx.gluon.Trainer(parameters, optimizer)
        raise UnsupportedValueError(
            f"train with the optimizer {describe(optimizer)}",
            "it is neither a gluon.Trainer nor an mx.optimizer.Optimizer",
            "optimizer=gluon.Trainer(net.collect_params(), 'sgd'), or optimizer='sgd'",
        )

    @property
    def parts(self) -> dict[str, Any]:
        self.sync()
        return {"model": self._model, "optimizer": self._trainer}

    def replace(self, parts: dict[str, Any]) -> None:
        self.sync()
        self._model, self._trainer = parts["model"], parts["optimizer"]
        self._sums = place(self._framework, self._sums, self._parameters()[0].list_ctx()[0])

    @property
    def input_names(self) -> tuple[str, ...]:
        model = self._model
        if type(model).forward is not mx.gluon.HybridBlock.forward:
            return input_names(model.forward)
        # The block itself gives F and its own parameters.
        _namespace, *names = input_names(model.hybrid_forward) or (None,)
        return tuple(name for name in names if name not in model._reg_params)

    # -- steps ------------------------------------------------------------------------------------

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics():
            for parameter in self._trainer._params:
                if parameter.grad_req == "add":
                    for gradient in parameter._grad or ():
                        # As ParameterDict.zero_grad; Parameter's own knows only old arrays.
                        gradient[()] = 0
            loss, prediction = self._differentiated(inputs, y)
            if self.settings.accumulate == 1:
                self._update()
                return loss, prediction
            self._add()
            self.pending += 1
            if self.pending == self.settings.accumulate:
                self.flush()
        return loss, prediction

    def _differentiated(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        """Compute the gradients of a batch; return its loss and its prediction."""
        with mx.autograd.record():
            loss, prediction = self._losses(inputs, y, is_step=True)
        loss.backward()
        return loss, prediction

    def flush(self) -> None:
        if not self.pending:
            return
        with NumPySemantics():
            for number, total in self._sums.items():
                parameter = self._trainer._params[number]
                if parameter.grad_req != "null":
                    parameter.list_grad()[0][()] = total / self.pending
                    parameter.list_data()[0]._fresh_grad = True
            self._update()
        self._sums, self.pending = {}, 0

    def _update(self) -> None:
        if self.settings.gradient_clip_val:
            self._clip(self.settings.gradient_clip_val)
        # By 1: the loss is a mean already.
        self._trainer.update(1, ignore_stale_grad=True)

    def _add(self) -> None:
        """Add the gradients that this batch has made to those of the batches before it."""
        for number, parameter in enumerate(self._trainer._params):
            if parameter.grad_req != "null" and (x := parameter.list_data()[0])._fresh_grad:
                gradient = parameter.list_grad()[0].as_np_ndarray()
                self._sums[number] = gradient + self._sums.get(number, 0)
                x._fresh_grad = False

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with NumPySemantics(), mx.autograd.pause():
            return self._losses(inputs, y, is_step=False)

    def predict(self, inputs: tuple[Any, ...]) -> Any:
        with NumPySemantics(), mx.autograd.pause():
            return self._predicted(inputs)

    def _predicted(self, inputs: tuple[Any, ...]) -> Any:
        return self._model(*[_as_numpy(x) for x in inputs])

    def _losses(self, inputs: tuple[Any, ...], y: Any, *, is_step: bool) -> tuple[Tensor, Any]:
        if self.settings.methods is not None:
            return own_loss(self._model, self.settings.methods, *inputs, is_step=is_step), None
        prediction = self._predicted(inputs)
        y = Weighted(*map(_as_numpy, y)) if isinstance(y, Weighted) else _as_numpy(y)
        loss = self._loss(prediction, y)
        shape = loss.shape if isinstance(loss, mx.np.ndarray) else None
        check_loss(shape, loss, self.settings.loss)
        return loss, prediction

    def _clip(self, largest: float) -> None:
        # gluon.utils.clip_global_norm would wait for the norm, and count stale gradients.
        gradients = [
            parameter.list_grad()[0].as_np_ndarray()
            for parameter in self._trainer._params
            if parameter.grad_req != "null" and parameter.list_data()[0]._fresh_grad
        ]
        norm = mx.np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        factor = mx.np.minimum(largest / (norm + 1e-6), 1.0)
        for gradient in gradients:
            gradient *= factor

    # -- resuming ---------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        return all(parameter._data is not None for parameter in self._parameters())

    def build(self, inputs: tuple[Any, ...]) -> None:
        self.predict(inputs)

    def modes(self) -> list[str]:
        """Return what is done with the gradient of each parameter, in the order of the layers."""
        return [parameter.grad_req for parameter in self._parameters()]

    def checked_modes(self, modes: Any) -> Callable[[], None]:
        parameters = self._parameters()
        is_list = isinstance(modes, list) and len(modes) == len(parameters)
        if not is_list or not all(request in ("null", "write", "add") for request in modes):
            raise state_refusal("model", f"{describe(modes)} are no modes of its parameters")

        def put() -> None:
            with NumPySemantics():
                for parameter, request in zip(parameters, modes, strict=True):
                    if parameter.grad_req != request:  # else its gradient would be another one
                        parameter.grad_req = request

        return put

    def _parameters(self) -> list[Any]:
        # In the order of the layers: by MXNet's names, which count on, two models differ.
        return list(self._model.collect_params().values())


def _mse(prediction: Tensor, y: Tensor, weights: Any = None) -> Tensor:
    check_shapes(prediction.shape, y.shape)
    prediction, y = _counted(prediction, y, weights)
    return _mean((prediction - y) ** 2, weights)


def _cross_entropy(prediction: Tensor, y: Tensor, weights: Any = None) -> Tensor:
    check_labels(prediction.shape, y.shape, np.dtype(y.dtype).name)
    prediction, y = _counted(prediction, y, weights)
    if y.dtype not in (np.int32, np.int64):
        # MXNet compares in the dtype of labels, in which 200 may be -56:
        # https://github.com/apache/mxnet/issues/16964
        y = y.astype("int64")
    classes = prediction.shape[-1]
    if weights is None:
        return _mean_cross_entropy(classes, threading.get_ident())(prediction, y)
    return _mean(_cross_entropies(mx, prediction, y, classes), weights)


def _cross_entropies(space: Any, prediction: Any, y: Any, classes: int) -> Any:
    """Return the loss of each example, by MXNet's functions of arrays or by those of symbols."""
    picked = space.npx.pick(space.npx.log_softmax(prediction, axis=-1), y, axis=-1)
    # A label that is out of range was taken for the nearest class. Checking for such labels would
    # wait for the device: instead their losses are divided by 0. (Beside a number, ``where`` has
    # the gradient of what it left out: https://github.com/apache/mxnet/issues/17893)
    return -(picked / (space.np.mod(y, classes) == y))


@lru_cache
def _mean_cross_entropy(classes: int, _thread: int) -> Any:
    """Return a block that computes the mean cross-entropy as one call of MXNet's.

    Each thread has its own, because two must not be in one block.
    """
    # With a prefix, MXNet's counter of names stays where it is.
    block = mx.gluon.nn.HybridLambda(
        lambda space, prediction, y: _cross_entropies(space, prediction, y, classes).mean(),
        prefix="",
    )
    block.hybridize()
    return block


def _bce(prediction: Tensor, y: Tensor, weights: Any = None) -> Tensor:
    check_shapes(prediction.shape, y.shape)
    prediction, y = _counted(prediction, y, weights)
    # By comparison, because ``abs`` and ``relu`` have the gradient 0 at 0. MXNet's softrelu is
    # log(1 + exp(x)), which is 0 where that is small.
    is_positive = (prediction >= 0).astype(prediction.dtype)
    size = prediction * (2 * is_positive - 1)
    return _mean(prediction * (is_positive - y) + mx.np.log1p(mx.np.exp(-size)), weights)


def _counted(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    """Return both as 0 where the weight is: 0 times an infinite loss would be no number."""
    if weights is None:
        return prediction, y
    check_weights(y.shape, weights.shape)
    counts = (weights != 0).reshape((*weights.shape, *[1] * (y.ndim - weights.ndim)))
    rows = counts.reshape((*counts.shape, *[1] * (prediction.ndim - y.ndim)))
    parts = (rows, prediction), (counts, y)
    return tuple(mx.np.where(which, x, mx.np.zeros_like(x)) for which, x in parts)


def _mean(losses: Tensor, weights: Any) -> Tensor:
    if weights is None:
        return losses.mean()
    losses, weights = losses.reshape((*weights.shape, -1)).mean(-1), weights.astype(losses.dtype)
    total = weights.sum()
    return (losses * weights).sum() / (total + (total == 0))  # 0 where all weights are


_LOSSES = {"mse": _mse, "cross_entropy": _cross_entropy, "bce": _bce}


def _as_numpy(x: Any) -> Any:
    """Return an array of the loader's as one that a block takes, on the same memory.

    Gluon's loaders give arrays of the old kind where ``npx.set_np()`` was not called. Those with
    workers or pinned memory give arrays in ``cpu_shared`` and ``cpu_pinned``, which to a hybridized
    block are other devices than the CPU:
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


def _check_trainer(trainer: Any, parameters: list[Any]) -> None:
    known = {id(parameter) for parameter in parameters}
    if known.isdisjoint(map(id, trainer._params)):
        raise UnsupportedValueError(
            "train with a gluon.Trainer",
            "none of its parameters is one of the model's",
            "gluon.Trainer(net.collect_params(), ...), of this very net",
        )
    store = trainer._kvstore_params["kvstore"]
    if store is not None and (not isinstance(store, str) or "dist" in store):
        raise UnsupportedValueError(
            "train with a gluon.Trainer",
            "its parameters are updated in a KVStore, and not where the model is",
            "gluon.Trainer(net.collect_params(), ...) without a kvstore",
        )
