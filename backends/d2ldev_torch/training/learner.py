"""Training steps: autograd, the losses of ``torch.nn.functional``, and ``torch.optim``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

import torch

from d2ldev import D2LDevError, UnsupportedValueError
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
    Tensor,
    TrainingSettings,
    describe,
    flatten,
    map_tensors,
    optimizer_refusal,
    place,
    read_signature,
    state_refusal,
    text_of,
)
from d2ldev_torch.devices import NATIVE_CPU
from d2ldev_torch.models import original, plain_name
from d2ldev_torch.training import widen_labels

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=MOMENTUM),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr, BETAS, ADAM_EPSILON),
    "adamw": lambda parameters, lr: torch.optim.AdamW(
        parameters, lr, BETAS, ADAM_EPSILON, WEIGHT_DECAY
    ),
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr, eps=ADAGRAD_EPSILON),
}


# A named loss returns its ``Learner.weight``, too.


def _makes_optimizer(function: Any) -> bool:
    """Tell whether a function makes an optimizer; the base class makes none."""
    parameter = torch.zeros(1, 1, requires_grad=True)
    return isinstance(function([parameter], lr=0.01), torch.optim.Optimizer)


def _mse(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    return _compare_numbers(torch.nn.functional.mse_loss, prediction, y, weights)


def _cross_entropy(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any, Any]:
    """Return the mean over the labels that are classes; 0 without any."""
    y = widen_labels(y)  # torch requires labels of 64 bits; other frameworks make 32
    if weights is None and y.is_cpu:
        # The kernel of the CPU refuses a wrong label itself. A mask takes 45 of the 390 us of a
        # step of a small MLP.
        with suppress(IndexError):
            loss, number = _mean_cross_entropy(prediction, y)
            if number == y.numel():
                return loss, number, ()
    shape = y.shape
    if weights is not None:
        prediction, y = _mask_uncounted(prediction, y, weights)
    # A CUDA kernel that meets another label makes the GPU unusable. So no other label reaches it.
    is_class = y == y.clamp(0, prediction.shape[-1] - 1)
    wrong = torch.where(is_class, NO_LABEL, y).aminmax() if y.numel() else ()
    known = torch.where(is_class, y, NO_LABEL)
    # In a row that does not count, the derivative of an infinite logit would be NaN.
    prediction = torch.where(is_class[..., None], prediction, 0)
    if weights is None:
        loss, number = _mean_cross_entropy(prediction, known)
        return loss, number, wrong
    if y.dim() > 1:  # torch requires the classes at axis 1
        prediction = prediction.flatten(0, -2)
    losses = torch.nn.functional.cross_entropy(
        prediction, known.flatten(), ignore_index=NO_LABEL, reduction="none"
    ).reshape(shape)
    weights = weights.reshape(*weights.shape, *[1] * (y.dim() - weights.dim())) * is_class
    return *_take_mean(losses, weights), wrong


def _mean_cross_entropy(prediction: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    """Return the mean over the labels other than ``NO_LABEL``, 0 without any, and their number."""
    if y.dim() > 1:
        prediction, y = prediction.flatten(0, -2), y.flatten()
    # As ``torch.nn.functional.cross_entropy``, which does not return the number.
    logarithms = torch.nn.functional.log_softmax(prediction, -1)
    if not y.is_cpu:
        total, number = _nll_loss(logarithms, y, None, _SUM, NO_LABEL)
        return total / number.clamp(min=1), number
    mean, number = _nll_loss(logarithms, y, None, _MEAN, NO_LABEL)
    number = number.item()  # here it waits for nothing, and saves operations
    return mean if number else mean.nan_to_num(0.0), number


_nll_loss = torch.ops.aten.nll_loss_forward.default
_MEAN, _SUM = 1, 2  # the numbers of the reductions in torch's operators


def _bce(prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any]:
    function = torch.nn.functional.binary_cross_entropy_with_logits
    return _compare_numbers(function, prediction, y, weights)


def _compare_numbers(
    function: Callable[..., Tensor], prediction: Tensor, y: Tensor, weights: Any
) -> tuple[Tensor, Any]:
    """Return the mean of a loss that compares each number of a prediction with one of ``y``."""
    if weights is None:
        return function(prediction, y.to(prediction.dtype)), None
    prediction, y = _mask_uncounted(prediction, y, weights)
    losses = function(prediction, y.to(prediction.dtype), reduction="none")
    return _take_mean(losses, weights)


def _mask_uncounted(prediction: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with 0 where the weight is 0: 0 times an infinite loss would be NaN."""
    left_out = (weights == 0).reshape(*weights.shape, *[1] * (y.dim() - weights.dim()))
    rows = left_out.reshape(*left_out.shape, *[1] * (prediction.dim() - y.dim()))
    return prediction.masked_fill(rows, 0), y.masked_fill(left_out, 0)


def _take_mean(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of losses, 0 if all weights are 0, and the sum of the weights."""
    number = losses.numel() / max(1, weights.numel())  # of losses for each weight
    losses, weights = losses.reshape(*weights.shape, -1).mean(-1), weights.to(losses.dtype)
    # The digits of bfloat16 would not suffice.
    total = weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))
    mean, total = _divide((losses * weights).sum(), total)
    return mean, total * number


def _divide(total: Any, weight: Any) -> tuple[Any, Tensor]:
    """Return a ``WeightedLoss`` as a mean, and its weight: see ``Objective``."""
    if not isinstance(total, torch.Tensor):
        return total, weight
    dtype = torch.promote_types(total.dtype, torch.float32)
    weight = torch.as_tensor(weight, dtype=dtype, device=total.device).detach()
    return total / (weight + (weight == 0)), weight


_LOSSES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "mse": _mse,
    "cross_entropy": _cross_entropy,
    "bce": _bce,
}


_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@lru_cache
def needs_closure(cls: Any) -> bool:
    """Return whether a class of optimizers computes the loss several times a step, as LBFGS."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def list_trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plainly(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return modules or parameters by their names without ``torch.compile``."""
    return [(plain_name(name), each) for name, each in named]


class TorchLearner(Learner):
    """A ``torch.nn.Module`` that a ``torch.optim.Optimizer`` trains.

    The first step makes the optimizer of a model with lazy modules, which have shapes only then.
    ``step`` puts the model into training mode, without the modules that ``eval()`` has frozen.
    ``evaluate`` puts it into evaluation mode. ``sync`` restores the mode that it had before.
    """

    def __init__(self, framework: Framework, model: Any, settings: TrainingSettings) -> None:
        super().__init__(settings)
        self._framework = framework
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is not a torch.nn.Module",
                "put the parameters into a torch.nn.Module",
            )
        is_trained = settings.optimizer is not None
        if is_trained and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UnsupportedValueError(
                f"train the {type(model).__name__}",
                "there is nothing to train: it has no parameter with requires_grad",
                "model.requires_grad_(True)",
            )
        self._objective = Objective(framework, settings, _LOSSES, _divide)
        # Of the batches of a step: the sum of their factors, and the reference of these.
        self._total: Any = 1.0
        self._reference = 1.0
        self._model = model
        self._narrow = _PRECISIONS.get(settings.precision)
        is_scaled = is_trained and self._narrow is torch.float16
        self._scaler = self._make_scaler() if is_scaled else None
        self._was_training = model.training
        self._frozen = self._list_in_mode(is_training=False) if model.training else []
        self._thawed = [] if model.training else self._list_in_mode(is_training=True)
        self._optimizer: torch.optim.Optimizer | None = None
        if is_trained and not (isinstance(settings.optimizer, str) and self._is_lazy()):
            self._optimizer = self._make_optimizer()

    def _is_lazy(self) -> bool:
        return any(torch.nn.parameter.is_lazy(p) for p in self._model.parameters())

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer, parameters = self.settings.optimizer, list(self._model.parameters())
        if self._scaler is not None and any(
            p.requires_grad and p.dtype is torch.float16 for p in parameters
        ):
            raise UnsupportedValueError(
                f"train the {type(self._model).__name__} with precision='fp16'",
                "its parameters are float16, and trained parameters have to be float32",
                "net.float(), before the optimizer is made",
            )
        if isinstance(optimizer, str) and optimizer in _OPTIMIZERS:
            # All parameters: a frozen one has no gradient, and may be thawed later.
            return _OPTIMIZERS[optimizer](parameters, lr=self.settings.lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise optimizer_refusal(
                optimizer,
                "a torch.optim.Optimizer",
                module=torch.optim,
                path="torch.optim",
                arguments=f"net.parameters(), lr={self.settings.lr}",
                owns=_makes_optimizer,
            )
        cls: type = type(optimizer)
        name = cls.__name__
        for setting, is_simple in (
            (
                f"accumulate_grad_batches={self.settings.accumulate_grad_batches}",
                self.settings.accumulate_grad_batches == 1,
            ),
            ("precision='fp16'", self.settings.precision != "fp16"),
        ):
            if not is_simple and needs_closure(cls):
                raise UnsupportedValueError(
                    f"train with the optimizer {name} and {setting}",
                    "it computes the loss of a batch several times in a step",
                    f"leave out {setting}, or optimizer='sgd'",
                )
        known = {id(parameter) for parameter in parameters}
        if not any(id(p) in known for p in list_trained(optimizer)):
            raise UnsupportedValueError(
                f"train with the optimizer {name}",
                f"none of its parameters belongs to the {type(self._model).__name__}",
                f"torch.optim.{name}(net.parameters()) with the parameters of this net",
            )
        device = self._framework.tensors.device_of(parameters[0])
        placed: torch.optim.Optimizer = place(self._framework, optimizer, device)
        return placed

    def _make_scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler for the device of the model."""
        return torch.amp.GradScaler(self._place_of(()).type)

    def sync(self) -> dict[str, Any]:
        if self._was_training:
            self._train()
        else:
            self._evaluate()
            self._put(self._thawed, is_training=True)
        components: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}
        if self._scaler is not None:
            components["scaler"] = self._scaler.state_dict()
        return components

    def replace(self, components: dict[str, Any]) -> None:
        self._model, self._optimizer = components["model"], components["optimizer"]
        if isinstance(self._total, torch.Tensor):
            self._total = self._total.to(self._place_of(()))
        if self._scaler is not None:
            self._scaler = self._make_scaler()
            self._scaler.load_state_dict(components["scaler"])

    @cached_property
    def signature(self) -> Signature:
        # A module that passes all inputs on has the inputs of the module inside of it.
        model = original(self._model)
        found = read_signature(model.forward)
        while not found.names and isinstance(
            inner := getattr(model, "module", None), torch.nn.Module
        ):
            model = original(inner)
            found = read_signature(model.forward)
        return found

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if self._optimizer is None:
            self.build(inputs)
        if not self._model.training:
            self._train()
        optimizer: Any = self._optimizer
        cls: type = type(optimizer)
        if needs_closure(cls):
            return self._search(optimizer, inputs, y)
        if not self.pending:
            optimizer.zero_grad()
        found = self._differentiate(inputs, y)
        self.pending += 1
        if self.pending == self.settings.accumulate_grad_batches:
            self.flush()
        return found

    def _search(self, optimizer: Any, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        """Take a step of an optimizer that computes the loss several times; return the first."""
        results: list[tuple[Tensor, Any]] = []

        def compute_anew() -> Tensor:
            optimizer.zero_grad()
            results.append(self._differentiate(inputs, y))
            loss = self._of_the_whole_batch(results[-1][0])
            self._take_mean(optimizer)
            self._clip(optimizer)
            del results[1:]
            return loss

        optimizer.step(compute_anew)
        return results[0]

    def flush(self) -> None:
        if not self.pending:
            return
        optimizer: Any = self._optimizer
        self._take_mean(optimizer)
        if self._scaler is None:
            self._clip(optimizer)
            optimizer.step()
        else:
            self._scaler.unscale_(optimizer)
            self._clip(optimizer)
            self._scaler.step(optimizer)
            self._scaler.update()
        self.pending = 0

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        self._evaluate()
        with torch.no_grad():
            return self._compute_losses(inputs, y, is_step=False)

    def predict(self, inputs: Inputs) -> Any:
        self._evaluate()
        with torch.no_grad():
            return self._compute_prediction(inputs)

    def _differentiate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        """Add the gradients of a batch to the present ones; return its loss and prediction."""
        loss, prediction = self._compute_losses(inputs, y, is_step=True)
        is_alone = self.settings.accumulate_grad_batches == 1
        self._backward(loss if is_alone else loss * self._find_factor(inputs, y))
        # Without the graph of the backward pass.
        return loss.detach(), self._map_prediction(torch.Tensor.detach, prediction)

    def _find_factor(self, inputs: Inputs, y: Any) -> Any:
        """Return the factor of the loss of a batch or a shard in a step, and add it up."""
        batch = self._objective.weigh(inputs, y, self.portion)
        if not self.pending:
            self._total, self._reference = 0.0, batch.whole
        self._factor = batch.relative(self.weight, self._reference)
        self._total = self._total + self._factor
        return self._factor

    def _take_mean(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the sums of gradients by the sum of the factors."""
        if isinstance(self._total, torch.Tensor) or self._total != 1:
            for parameter in list_trained(optimizer):
                if parameter.grad is not None:
                    parameter.grad /= self._total

    def _lacks_variance(self, inputs: Inputs) -> bool:
        """Return whether a batch has one example, and the model normalizes batches."""
        flat = flatten(inputs, self._framework.state.kinds, "train")
        lengths = {len(x) for x in flat.tensors.values() if x.dim()}
        return lengths == {1} and any(
            each.statistics == "local" for each in self._framework.parallel.batch_norms(self._model)
        )

    def _backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _of_the_whole_batch(self, loss: Tensor) -> Tensor:
        """Return the loss of a whole batch for an optimizer that uses the loss."""
        return loss

    def _compute_prediction(self, inputs: Inputs) -> Any:
        return self._call(inputs) if self._narrow is None else self._narrowly(inputs)

    def _call(self, inputs: Inputs) -> Any:
        inputs = self.signature.arrange(inputs)
        return self._model(**inputs) if isinstance(inputs, dict) else self._model(*inputs)

    def _compute_losses(self, inputs: Inputs, y: Any, *, is_step: bool) -> tuple[Tensor, Any]:
        try:
            if self.settings.methods is not None:
                found = self._objective.compute(self._model, *inputs, is_step=is_step)
                loss, self.weight = self._objective.take(found, None, self.batch)
                return loss, None
            prediction = self._compute_prediction(inputs)
        except ValueError as error:
            is_ours = isinstance(error, D2LDevError)
            if is_ours or not is_step or not self._lacks_variance(inputs):
                raise
            raise UnsupportedValueError(
                "train on a batch of one example",
                f"the model has batch normalizations, and torch says: {text_of(error)}",
                "drop_last=True in the loader, where the last batch has one example",
            ) from error
        found = self._objective.compare(prediction, y)
        loss, self.weight = self._objective.take(found, prediction, self.batch)
        return loss, prediction

    def check_labels(self) -> None:
        self._objective.check_labels()

    def _narrowly(self, inputs: Inputs) -> Any:
        """Compute the prediction in fewer bits, and return it in float32."""
        with torch.autocast(self._place_of(inputs).type, self._narrow):
            prediction = self._call(inputs)
        return self._map_prediction(
            lambda x: x.float() if x.dtype is self._narrow else x, prediction
        )

    def _place_of(self, inputs: Inputs) -> torch.device:
        """Return torch's device of the model; without parameters, of the first input."""
        first = next(self._model.parameters(), None)
        if first is not None:
            return first.device
        return self._place_of_inputs(inputs)

    def _place_of_inputs(self, inputs: Inputs) -> torch.device:
        """Return torch's device of the inputs; some, such as lengths, may stay on the CPU."""
        flat = flatten(inputs, self._framework.state.kinds, "train")
        found = [x.device for x in flat.tensors.values()]
        return next((device for device in found if device != NATIVE_CPU), NATIVE_CPU)

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.gradient_clip_val:
            # Only the optimizer's parameters: nothing resets the gradients of others.
            torch.nn.utils.clip_grad_norm_(list_trained(optimizer), self.settings.gradient_clip_val)

    def _map_prediction(self, function: Callable[[Tensor], Tensor], prediction: Any) -> Any:
        """Return a nesting with a function's result for each tensor in it."""
        if isinstance(prediction, torch.Tensor):
            return function(prediction)
        return map_tensors(
            function, prediction, self._framework.state.kinds, "compute a prediction"
        )

    # -- modes ------------------------------------------------------------------------------------

    # ``Module.train()`` puts all inner modules into training mode. A user may have put some into
    # evaluation mode to freeze them, for example batch normalization in fine-tuning. These stay in
    # it. Or all but some, such as dropout that is to go on in use. ``sync`` puts these back. A step
    # only checks the model's own flag.

    def _train(self) -> None:
        if self._model.training:
            return
        self._model.train()
        self._put(self._frozen, is_training=False)

    def _evaluate(self) -> None:
        if self._model.training:
            self._frozen = self._list_in_mode(is_training=False)
        if self._model.training or self._thawed:
            self._model.eval()

    def _put(self, names: Collection[str], *, is_training: bool) -> None:
        chosen = set(names)
        for name, module in _plainly(self._model.named_modules()) if chosen else ():
            if name in chosen:
                module.training = is_training

    def _list_in_mode(self, *, is_training: bool) -> list[str]:
        modules = _plainly(self._model.named_modules())
        return [name for name, module in modules if module.training == is_training]

    # -- resuming ---------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        return self._optimizer is not None and not self._is_lazy()

    def build(self, inputs: Inputs) -> None:
        # In evaluation mode, which changes no running mean.
        self.predict(inputs)
        if self._optimizer is None and self.settings.optimizer is not None:
            self._optimizer = self._make_optimizer()

    def modes(self) -> dict[str, list[str]]:
        parameters = _plainly(self._model.named_parameters())
        is_training = self._model.training
        return {
            "frozen": [name for name, parameter in parameters if not parameter.requires_grad],
            "evaluation": self._list_in_mode(is_training=False) if is_training else self._frozen,
        }

    def check_modes(self, modes: Any) -> Callable[[], None]:
        known = {
            "frozen": [name for name, _ in _plainly(self._model.named_parameters())],
            # Without the model itself, which is trained.
            "evaluation": [name for name, _ in _plainly(self._model.named_modules()) if name],
        }
        for key, names in known.items():
            found = modes.get(key) if isinstance(modes, Mapping) else None
            if not isinstance(found, list) or not all(name in names for name in found):
                raise state_refusal("model", f"{key} is {describe(found)}")

        def put() -> None:
            for name, parameter in _plainly(self._model.named_parameters()):
                # Not by ``requires_grad_``, which refuses a parameter without a shape.
                parameter.requires_grad = name not in modes["frozen"]
            is_training = self._model.training
            self._model.eval()
            self._frozen = modes["evaluation"]
            if is_training:
                self._train()

        return put
