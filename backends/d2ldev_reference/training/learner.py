"""Training: steps with gradients that are written out, because array-api-strict has none.

It trains only the reference backend's own MLP. So you can try training without a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import array_api_strict as xp

from d2ldev import UnsupportedValueError
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
    read_signature,
)
from d2ldev_reference.models import MLP, Layers
from d2ldev_reference.tensors import with_axes
from d2ldev_reference.training import widen_labels

# The derivative of an activation, computed from its result.
_DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda a: xp.astype(a > 0, a.dtype),
    "tanh": lambda a: 1 - a * a,
    "sigmoid": lambda a: a * (1 - a),
}

_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad")


class ReferenceLearner(Learner):
    """Train the reference backend's MLP, with gradients that are written out."""

    def __init__(self, framework: Framework, model: Any, settings: TrainingSettings) -> None:
        super().__init__(settings)
        self._framework = framework
        is_written = isinstance(settings.loss, str) and settings.methods is None
        if not isinstance(model, MLP) or not is_written:
            raise UnsupportedValueError(
                f"train {describe(model)} with the loss {describe(settings.loss)}",
                "without a framework only d2ldev's own MLP has gradients",
                "net = backend.mlp([2, 1]); loss='mse', or D2LDEV_BACKEND=torch",
            )
        if settings.optimizer is not None and str(settings.optimizer) not in _OPTIMIZERS:
            raise UnsupportedValueError(
                f"train with the optimizer {describe(settings.optimizer)}",
                f"array-api-strict has no optimizers; d2ldev has {', '.join(_OPTIMIZERS)}",
                "another backend has others: D2LDEV_BACKEND=torch",
            )
        self._model = model
        names = ("mse", "cross_entropy", "bce")
        self._objective = Objective(framework, settings, dict.fromkeys(names, self._measure))
        # Of the batches of a step: the sum of their factors, and the reference of these.
        self._total, self._reference = 0.0, 1.0
        kept = ("first", "second", "sums")[: 3 if settings.accumulate_grad_batches > 1 else 2]
        self._optimizer: dict[str, Any] = {name: self._zeros() for name in kept} | {"steps": 0}

    def _zeros(self) -> Layers:
        return each_of(lambda x: x * 0.0, self._model.layers)

    def sync(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer}

    @cached_property
    def signature(self) -> Signature:
        return read_signature(self._model, by_position=True)

    def replace(self, components: dict[str, Any]) -> None:
        self._model, self._optimizer = components["model"], components["optimizer"]

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        loss, prediction, gradients = self._differentiate(self._model, inputs, y)
        factor = self._find_factor(inputs, y)
        gradients = each_of(lambda x: x * factor, gradients)
        if self.settings.accumulate_grad_batches == 1:
            self._update(self._clip(self._take_mean(gradients)))
            return loss, prediction
        sums = each_of(lambda a, b: a + b, self._optimizer["sums"], gradients)
        self._optimizer = {**self._optimizer, "sums": sums}
        self.pending += 1
        if self.pending == self.settings.accumulate_grad_batches:
            self.flush()
        return loss, prediction

    def _find_factor(self, inputs: Inputs, y: Any) -> float:
        """Return the factor of the loss of a batch or a shard in a step, and add it up."""
        batch = self._objective.weigh(inputs, y, self.portion)
        if not self.pending:
            self._total, self._reference = 0.0, batch.whole
        factor: float = batch.relative(self.weight, self._reference)
        self._total += factor
        return factor

    def _take_mean(self, sums: Layers) -> Layers:
        """Return the gradients of a step, of the sums over its batches."""
        return each_of(lambda x: x / self._total, sums)

    def _differentiate(self, model: MLP, inputs: Inputs, y: Any) -> tuple[Tensor, Tensor, Layers]:
        """Return the loss of a model, its prediction, and the gradients of its parameters."""
        *activations, prediction = model.outputs(*self.signature.arrange(inputs))
        loss, error = self._loss(prediction, y)
        return loss, prediction, self._gradients(model, activations, error)

    def flush(self) -> None:
        if self.pending:
            self._update(self._clip(self._take_mean(self._optimizer["sums"])))
            self._optimizer = {**self._optimizer, "sums": self._zeros()}
            self.pending = 0

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        prediction = self.predict(inputs)
        return self._loss(prediction, y)[0], prediction

    def predict(self, inputs: Inputs) -> Any:
        return self._model(*self.signature.arrange(inputs))

    def _loss(self, prediction: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        """Return the loss and its derivative by the prediction; note the weight of the loss."""
        found = self._objective.compare(prediction, y)
        loss, self.weight = self._objective.take(found, prediction, self.batch)
        return loss, self._error

    def check_labels(self) -> None:
        self._objective.check_labels()

    def _measure(self, prediction: Tensor, y: Tensor, weights: Any) -> tuple[Tensor, Any, Any]:
        """Return a named loss for ``Objective``; keep its derivative by the prediction."""
        losses, errors, counts = self._losses(prediction, y)
        wrong = () if counts is None else self._find_wrong(y, weights, counts)
        if weights is not None:
            weights = xp.astype(weights, losses.dtype)
            if counts is not None:
                weights = counts * with_axes(weights, counts.ndim)
        elif counts is not None:
            weights = counts
        if weights is None:
            self._error = errors / losses.size
            return xp.mean(losses), None, wrong
        total = xp.sum(weights)
        # Of all elements, as without weights.
        weight = float(total) * (losses.size / weights.size)
        # The share of each loss in the mean.
        total = xp.where(total == 0, xp.ones_like(total), total)  # the loss is 0 then
        parts = weights / total * (weights.size / losses.size)
        parts = with_axes(parts, losses.ndim)
        rows = parts if errors.ndim == losses.ndim else xp.expand_dims(parts, axis=-1)
        self._error = _times(errors, rows)
        return xp.sum(_times(losses, parts)), weight, wrong

    def _find_wrong(self, y: Tensor, weights: Any, counts: Tensor) -> tuple[Tensor, ...]:
        """Return the least and the greatest label outside the classes, or ``NO_LABEL``."""
        is_right = counts != 0
        if weights is not None:
            is_right = is_right | (with_axes(xp.astype(weights, counts.dtype), y.ndim) == 0)
        y = widen_labels(y)
        others = xp.where(is_right, xp.full_like(y, NO_LABEL), y)
        return (xp.min(others), xp.max(others)) if y.size else ()

    def _losses(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the losses, their derivatives by the prediction, and which losses count.

        The third value is 1 for a loss that counts, and 0 for another one. None is for losses that
        all count.
        """
        if self.settings.loss == "cross_entropy":
            return self._cross_entropy(prediction, y)
        y = xp.astype(y, prediction.dtype)
        if self.settings.loss == "mse":
            difference = prediction - y
            return difference * difference, 2.0 * difference, None
        small = xp.exp(-xp.abs(prediction))
        losses = xp.maximum(prediction, xp.zeros_like(prediction)) - prediction * y
        larger = xp.where(prediction < 0, small, xp.ones_like(small))
        return losses + xp.log1p(small), larger / (1 + small) - y, None

    def _cross_entropy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = prediction - xp.max(prediction, axis=-1, keepdims=True)
        logarithms = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
        classes = xp.arange(prediction.shape[-1], device=y.device)
        is_class = xp.expand_dims(widen_labels(y), axis=-1) == classes
        truth = xp.astype(is_class, prediction.dtype)
        losses = -xp.sum(truth * logarithms, axis=-1)
        counts = xp.astype(xp.any(is_class, axis=-1), prediction.dtype)
        return losses, xp.exp(logarithms) - truth, counts

    def _gradients(self, model: MLP, activations: list[Tensor], error: Tensor) -> Layers:
        """Return the gradients of a model's parameters, from its prediction's error back."""
        gradients = []
        error, activations = _rows(error), [_rows(x) for x in activations]
        for layer, x in zip(reversed(model.layers), reversed(activations), strict=True):
            gradients.append({"weight": error.T @ x, "bias": xp.sum(error, axis=0)})
            error = (error @ layer["weight"]) * _DERIVATIVES[model.activation](x)
        return gradients[::-1]

    def _clip(self, gradients: Layers) -> Layers:
        if not self.settings.gradient_clip_val:
            return gradients
        squares = [xp.sum(g * g) for layer in gradients for g in layer.values()]
        norm = float(sum(squares)) ** 0.5
        factor = min(1.0, self.settings.gradient_clip_val / (norm + 1e-6))
        return each_of(lambda x: x * factor, gradients)

    def _update(self, gradients: Layers) -> None:
        before = self._optimizer
        steps = before["steps"] + 1
        updated = each_of(
            partial(self._update_parameter, steps),
            self._model.layers,
            gradients,
            before["first"],
            before["second"],
        )
        layers, first, second = (each_of(itemgetter(i), updated) for i in range(3))
        self._model = MLP(layers, self._model.activation)
        self._optimizer = {**before, "first": first, "second": second, "steps": steps}

    def _update_parameter(
        self, steps: int, x: Tensor, gradient: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a parameter and its two moments after one step."""
        lr = self.settings.lr
        if self.settings.optimizer == "sgd":
            return x - lr * gradient, first, second
        if self.settings.optimizer == "momentum":
            first = MOMENTUM * first + gradient
            return x - lr * first, first, second
        if self.settings.optimizer == "adagrad":
            second = second + gradient * gradient
            return x - lr * gradient / (xp.sqrt(second) + ADAGRAD_EPSILON), first, second
        if self.settings.optimizer == "adamw":
            x = x * (1 - lr * WEIGHT_DECAY)
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
        unbiased = xp.sqrt(second / (1 - BETAS[1] ** steps)) + ADAM_EPSILON
        return x - lr * (first / (1 - BETAS[0] ** steps)) / unbiased, first, second


def _times(x: Tensor, weights: Tensor) -> Tensor:
    """Return a product that is 0 for a weight of 0: 0 times infinity is NaN."""
    return xp.where(weights == 0, xp.zeros_like(x), x * weights)


def each_of(function: Callable[..., Any], *layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return layers with the results of a function, called with the values of each name."""
    return [
        {name: function(*(layer[name] for layer in together)) for name in together[0]}
        for together in zip(*layers, strict=True)
    ]


def _rows(x: Tensor) -> Tensor:
    """Return a matrix with all rows of a tensor."""
    return xp.reshape(x, (-1, x.shape[-1]))
