"""Training: steps of a model with tinygrad's gradients and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    NO_LABEL,
    WEIGHT_DECAY,
    Framework,
    Inputs,
    Learner,
    Objective,
    Signature,
    Training,
    TrainingSettings,
    describe,
    optimizer_refusal,
    place,
    read_signature,
    state_refusal,
)
from tinygrad import Tensor, dtypes, nn
from tinygrad.helpers import Context

from d2ldev_tinygrad.devices import NATIVES, compute
from d2ldev_tinygrad.models import TinygradModels


class TinygradTraining(Training):
    """Training with tinygrad."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: TrainingSettings) -> TinygradLearner:
        return TinygradLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        counted = y != NO_LABEL
        right = ((prediction.argmax(-1) == y) & counted).float().sum()
        number = counted.float().sum()
        return (right / number.maximum(1)).realize(), number.realize()

    def random_state(self, device: Device) -> Any:
        # So that they are there: the first call for a device makes its key.
        key, _ = Tensor._next_counter(NATIVES[device], 0)
        counter = Tensor._device_rng_counters[NATIVES[device]]
        return {"seed": Tensor._seed, "key": key.tolist(), "counter": counter.tolist()}

    def check_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        native = NATIVES[device]
        try:
            seed, pairs = int(state["seed"]), (state["key"], state["counter"])
            key, counter = (
                Tensor([int(each) for each in pair], dtype=dtypes.uint32, device=native).realize()
                for pair in pairs
            )
            if key.shape != (2,) or counter.shape != (2,):
                raise ValueError("a key and a counter have two numbers")
        except Exception as error:
            raise state_refusal("generator", str(error)) from error

        def restore() -> None:
            Tensor._seed = seed
            Tensor._device_seeds[native], Tensor._device_rng_counters[native] = key, counter

        return restore


class TinygradLearner(Learner[Tensor]):
    """A model of tinygrad in training."""

    def __init__(self, framework: Framework, model: Any, settings: TrainingSettings) -> None:
        super().__init__(settings)
        if not isinstance(model, TinygradModels.types) or isinstance(model, nn.optim.Optimizer):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "tinygrad's backend does not know its class",
                "@d2ldev_tinygrad.models.Model.register, before its class",
            )
        if settings.methods:
            raise UnsupportedValueError(
                f"train {describe(model)} with methods of its own",
                "tinygrad has no class for D2L's Module",
                "leave methods out",
            )
        self._framework = framework
        self._objective = Objective(framework, settings, LOSSES, divide)
        self._model, self._optimizer = model, settings.optimizer
        # Of the batches of a step: the gradients and the factors, and the reference of these.
        self._sums: list[Tensor] = []
        self._reference = 1.0
        if settings.optimizer is None:
            return
        if not (parameters := self._parameters()):
            raise UnsupportedValueError(
                f"train {describe(model)}", "there is nothing to train", "add an nn.Linear"
            )
        if isinstance(settings.optimizer, str) and settings.optimizer in OPTIMIZERS:
            self._optimizer = OPTIMIZERS[settings.optimizer](parameters, settings.lr)
        elif not isinstance(settings.optimizer, nn.optim.Optimizer):
            raise optimizer_refusal(
                settings.optimizer,
                "a tinygrad.nn.optim.Optimizer",
                module=nn.optim,
                path="tinygrad.nn.optim",
                arguments=f"tinygrad.nn.state.get_parameters(net), lr={settings.lr}",
                owns=lambda x: getattr(x, "__module__", "") == nn.optim.__name__,
            )
        else:
            device = framework.tensors.device_of(parameters[0])
            self._optimizer = place(framework, self._optimizer, device)
        compute(*nn.state.get_parameters(self._optimizer))

    # -- what place, save and load_into take ------------------------------------------------------

    def sync(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer, "sums": self._sums}

    def replace(self, components: dict[str, Any]) -> None:
        self._model, self._optimizer = components["model"], components["optimizer"]
        self._sums = components["sums"]

    @cached_property
    def signature(self) -> Signature:
        return read_signature(self._model.__call__)

    def modes(self) -> Any:
        return {name: x.is_param for name, x in self._tensors().items()}

    def check_modes(self, modes: Any) -> Callable[[], None]:
        tensors = self._tensors()
        if not isinstance(modes, dict) or modes.keys() != tensors.keys():
            raise state_refusal("model", "it has other tensors")

        def restore() -> None:
            for name, x in tensors.items():
                x.is_param_(modes[name])

        return restore

    # -- steps ------------------------------------------------------------------------------------

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        parameters = self._parameters()
        with Context(TRAINING=1):
            prediction = self._call(inputs)
            loss = self._compare(prediction, y)
            gradients = loss.gradient(*parameters)
        batch = self._objective.weigh(inputs, y)
        if not self.pending:
            self._reference = batch.whole
        factor = batch.relative(self.weight, self._reference)
        factor = factor if isinstance(factor, Tensor) else loss.detach().const_like(factor)
        gradients = [*(x * factor for x in gradients), factor]
        if self._sums:
            gradients = [x + each for x, each in zip(self._sums, gradients, strict=True)]
        # The sums, too, are tensors that ``place`` moves: with memory of their own. A sum of
        # constants would have no device.
        self._sums = [x.clone(loss.device) for x in gradients]
        loss, prediction = loss.detach(), prediction.detach()
        Tensor.realize(loss, prediction, *self._sums, *self._tensors().values())
        self.pending += 1
        if self.pending == self.settings.accumulate_grad_batches:
            self.flush()
        return loss, prediction

    def flush(self) -> None:
        if not self.pending:
            return
        *sums, total = self._sums
        # Computed here, because tinygrad would fuse the quotient with the square of the norm. A
        # small total has no square in float32.
        gradients = [(x / total).contiguous() for x in sums]
        self._sums, self.pending = [], 0
        if bound := self.settings.gradient_clip_val:
            squares = [(x * x).sum() for x in gradients]
            norm = sum(squares[1:], squares[0]).sqrt()
            gradients = [x * (bound / (norm + 1e-6)).minimum(1) for x in gradients]
        parameters = self._parameters()
        for x, gradient in zip(parameters, gradients, strict=True):
            x.grad = gradient.cast(x.dtype)
        # An optimizer of tinygrad takes gradients for all of its parameters, and changes all.
        frozen = [x for x in self._optimizer.params if not x.is_param]
        values = [Tensor(x.uop.clone()).realize() for x in frozen]
        for x in frozen:
            x.grad = x.zeros_like()
        with Context(TRAINING=1):
            self._optimizer.step()
        for x, value in zip(frozen, values, strict=True):
            x.uop = value.uop
        self._optimizer.zero_grad()

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with Context(TRAINING=0):
            prediction = self._call(inputs).detach()
            loss = self._compare(prediction, y).detach()
            Tensor.realize(loss, prediction)  # together: alone each computes the model
            return loss, prediction

    def predict(self, inputs: Inputs) -> Any:
        with Context(TRAINING=0):
            return self._call(inputs).detach().realize()

    def _call(self, inputs: Inputs) -> Tensor:
        inputs = self.signature.arrange(inputs)
        return self._model(**inputs) if isinstance(inputs, dict) else self._model(*inputs)

    def _compare(self, prediction: Tensor, y: Any) -> Tensor:
        loss, weight, wrong = self._objective.compare(prediction, y)
        weight = None if weight is None else weight.realize()
        found = loss, weight, tuple(x.realize() for x in wrong)
        loss, self.weight = self._objective.take(found, prediction, self.batch)
        return loss

    def check_labels(self) -> None:
        self._objective.check_labels()

    def _tensors(self) -> dict[str, Tensor]:
        return nn.state.get_state_dict(self._model)

    def _parameters(self) -> list[Tensor]:
        return [x for x in dict.fromkeys(self._tensors().values()) if x.is_param]


class AdaGrad(nn.optim.Optimizer):
    """The optimizer of Duchi, Hazan and Singer (2011), which tinygrad lacks."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, lr)
        self.squares = self._new_optim_param()

    def _step(self, params: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        updates = []
        for square, gradient in zip(self.squares, grads, strict=True):
            square.assign(square + gradient * gradient)
            updates.append(self.lr * gradient / (square.sqrt() + ADAGRAD_EPSILON))
        return updates, self.squares


OPTIMIZERS: dict[str, Callable[[list[Tensor], float], nn.optim.Optimizer]] = {
    "sgd": nn.optim.SGD,
    "momentum": lambda params, lr: nn.optim.SGD(params, lr, momentum=MOMENTUM),
    "adam": lambda params, lr: nn.optim.Adam(params, lr, *BETAS, eps=ADAM_EPSILON),
    "adamw": lambda params, lr: nn.optim.AdamW(
        params, lr, *BETAS, eps=ADAM_EPSILON, weight_decay=WEIGHT_DECAY
    ),
    "adagrad": AdaGrad,
}


# A loss returns its ``Learner.weight``, too.


def mean_squares(
    prediction: Tensor, y: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the mean of the squared errors."""
    prediction, y, shares, weight = _comparable(prediction, y, weights)
    return ((prediction - y).square() * shares).sum(), weight


def binary_entropies(
    prediction: Tensor, y: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the mean binary cross-entropy of logits."""
    prediction, y, shares, weight = _comparable(prediction, y, weights)
    value = prediction.detach()
    small = (-value.abs()).exp()
    # log(1 + small), by its series where the sum would lose the small digits.
    series = small * (1 - small * (1 / 2 - small * (1 / 3 - small * (1 / 4 - small / 5))))
    logarithms = (small < 0.1).where(series, (1 + small).log())
    losses = value.relu() - value * y + logarithms
    # Its gradient, which tinygrad would take from several terms, and wrongly where they are 0.
    losses = losses + (prediction - value) * (value.sigmoid() - y)
    return (losses * shares).sum(), weight


def entropies(
    prediction: Tensor, y: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the mean cross-entropy of the labels that are classes, and the other labels."""
    labels = y.cast(dtypes.int64)
    if y.dtype == dtypes.uint64:  # a great one stays great: -100 counts as no label
        greatest = dtypes.int64.max
        labels = (y > greatest).where(greatest, labels)
    is_class = (labels >= 0) & (labels < prediction.shape[-1])
    is_right, shares = is_class, is_class.cast(prediction.dtype)
    if weights is not None:
        is_right = is_class | (_extend(weights, y) == 0)
        shares = shares * _extend(weights, y).cast(prediction.dtype)
    others = is_right.where(NO_LABEL, labels)
    counted = (shares > 0).unsqueeze(-1)
    logarithms = counted.where(prediction, 0).log_softmax()
    classes = Tensor.arange(prediction.shape[-1])
    truth = (labels.unsqueeze(-1) == classes).where(logarithms, 0).sum(-1)
    shares, weight = _normalize(shares)
    return -(truth * shares).sum(), weight, (others.min(), others.max())


def divide(total: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
    """Return a ``WeightedLoss`` as a mean, and its weight."""
    weight = weight.detach() if isinstance(weight, Tensor) else total.detach().const_like(weight)
    weight = weight.cast(total.dtype)
    return total / (weight == 0).where(1, weight), weight


LOSSES = {"mse": mean_squares, "bce": binary_entropies, "cross_entropy": entropies}


def _comparable(
    prediction: Tensor, y: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return a prediction and ``y`` with 0 where their weight is 0, and the shares of the rest.

    The last value is the sum of the weights.
    """
    y = y.cast(prediction.dtype)
    if weights is None:
        return prediction, y, _normalize(prediction.detach().const_like(1))[0], None
    shares = _extend(weights, prediction).cast(prediction.dtype).expand(prediction.shape)
    counted = shares > 0
    return counted.where(prediction, 0), counted.where(y, 0), *_normalize(shares)


def _normalize(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights with the sum 1, if it is not 0, and the sum."""
    total = shares.sum()
    return shares / (total == 0).where(1, total), total


def _extend(weights: Tensor, x: Tensor) -> Tensor:
    """Return weights with as many axes as a tensor has."""
    return weights.reshape(*weights.shape, *(1,) * (x.ndim - weights.ndim))
