"""The torch backend's ``Learner``: autograd, ``torch.nn.functional``'s losses, ``torch.optim``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.interface import Backend, Tensor
from d2ldev.nesting.walk import flatten
from d2ldev.operations.signatures import input_names
from d2ldev.training.learner import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    Learner,
    Settings,
    check_labels,
    check_loss,
    check_shapes,
)
from d2ldev_torch import training_state
from d2ldev_torch.modes import Modes

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=MOMENTUM),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr, BETAS, ADAM_EPSILON),
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr, eps=ADAGRAD_EPSILON),
}

# torch leaves out examples whose label is -100, unless it is told another one: elsewhere it is as
# wrong as any that is out of range.
_NO_LABEL = torch.iinfo(torch.int64).min
_PARTS = {"model", "optimizer", "frozen", "evaluation", "random"}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    check_shapes(prediction.shape, y.shape)
    return torch.nn.functional.mse_loss(prediction, y)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    check_labels(prediction.shape, y.shape, str(y.dtype).removeprefix("torch."))
    if y.dim() > 1:  # torch has the classes at axis 1
        prediction, y = prediction.flatten(0, -2), y.flatten()
    # torch wants labels of 64 bits; other frameworks make them with 32.
    return torch.nn.functional.cross_entropy(prediction, y.long(), ignore_index=_NO_LABEL)


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


class TorchLearner(Learner):
    """A ``torch.nn.Module`` that a ``torch.optim.Optimizer`` trains.

    The optimizer of a model with lazy modules is made in the first step, when they have shapes.
    The model is in training mode in ``step`` (but for modules in it that are frozen by
    ``eval()``), in evaluation mode in ``evaluate``, and, after ``parts``, in the mode in which it
    was handed over.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no torch.nn.Module",
                "put the parameters into a torch.nn.Module",
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UnsupportedValueError(
                f"train the {type(model).__name__}",
                "it has no parameter with requires_grad",
                "model.requires_grad_(True)",
            )
        self._loss = settings.loss_among(_LOSSES)
        self._optimizer: torch.optim.Optimizer | None = None
        is_lazy = any(torch.nn.parameter.is_lazy(p) for p in model.parameters())
        self._model, self._modes = model, Modes(model)
        if not (is_lazy and isinstance(settings.optimizer, str)):
            self._use(self._made(settings))

    def _made(self, settings: Settings) -> torch.optim.Optimizer:
        optimizer, parameters = settings.optimizer, list(self._model.parameters())
        if isinstance(optimizer, str):
            # All of them: a frozen one has no gradient, and may be thawed later.
            return _OPTIMIZERS[optimizer](parameters, lr=settings.lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedValueError(
                f"train with the optimizer {describe(optimizer)}",
                "it is no torch.optim.Optimizer",
                "optimizer=torch.optim.SGD(net.parameters(), lr=0.1), or optimizer='sgd'",
            )
        known = {id(parameter) for parameter in parameters}
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedValueError(
                f"train with the optimizer {type(optimizer).__name__}",
                f"none of its parameters is one of the {type(self._model).__name__}'s",
                f"torch.optim.{type(optimizer).__name__}(net.parameters()), of this very net",
            )
        placed: torch.optim.Optimizer = self.backend.place(optimizer, self._device())
        return placed

    def _use(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        # LBFGS computes the loss several times in a step, and has no other way of stepping.
        self._needs_closure = closure is not None and closure.default is inspect.Parameter.empty

    def _device(self) -> Device:
        return self.backend.device_of(next(self._model.parameters()))

    @property
    def parts(self) -> dict[str, Any]:
        self._modes.restore()
        return {"model": self._model, "optimizer": self._optimizer}

    @property
    def input_names(self) -> tuple[str, ...]:
        # What torch.compile makes takes anything, and gives it to the module that was compiled.
        return input_names(getattr(self._model, "_orig_mod", self._model).forward)

    def replace(self, parts: dict[str, Any]) -> None:
        if parts["model"] is not self._model:
            self._model, self._modes = parts["model"], Modes(parts["model"])
        if parts["optimizer"] is not None:
            self._use(parts["optimizer"])

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._modes.train()
        optimizer = self._optimizer
        if optimizer is None:
            loss, prediction = self._losses(inputs, y)
            self._use(self._made(self.settings))
            return self._descend(self._optimizer, loss, prediction)
        if self._needs_closure:
            return self._search(optimizer, inputs, y)
        optimizer.zero_grad()
        return self._descend(optimizer, *self._losses(inputs, y))

    def _losses(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        prediction = self._model(*inputs)
        loss = self._loss(prediction, y)
        check_loss(loss.shape if isinstance(loss, torch.Tensor) else None, loss)
        return loss, prediction

    def _descend(self, optimizer: Any, loss: Tensor, prediction: Any) -> tuple[Tensor, Any]:
        loss.backward()
        self._clip(optimizer)
        optimizer.step()
        return loss.detach(), self._detached(prediction)

    def _search(self, optimizer: Any, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        first: list[Any] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss, prediction = self._losses(inputs, y)
            loss.backward()
            self._clip(optimizer)
            if not first:
                first.extend((loss.detach(), self._detached(prediction)))
            return loss

        optimizer.step(closure)
        return first[0], first[1]

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.gradient_clip_val:
            # Of what it trains, which may be less than the model has: no one zeroes the others'.
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self.settings.gradient_clip_val)

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._modes.evaluate()
        with torch.no_grad():
            return self._losses(inputs, y)

    def state(self) -> dict[str, Any]:
        optimizer = self._optimizer
        state = {
            "model": training_state.state_of_model(self._model),
            "optimizer": optimizer and training_state.state_of_optimizer(optimizer, self._model),
            "frozen": training_state.frozen_in(self._model),
            "evaluation": self._modes.frozen,
            "random": training_state.random_state(self.backend.native(self._device())),
        }
        # Training goes on in the same memory.
        return self.backend.copy(state)  # type: ignore[no-any-return]

    def restore(self, state: Mapping[str, Any]) -> None:
        self._require_parts(state, _PARTS)
        saved = self.backend.copy({**state})
        native = self.backend.native(self._device())
        training_state.check_model(self._model, saved["model"])
        if self._optimizer is not None:
            training_state.check_optimizer(self._optimizer, self._model, saved["optimizer"])
        training_state.check_frozen(self._model, saved["frozen"])
        training_state.check_evaluation(self._model, saved["evaluation"])
        training_state.check_random_state(saved["random"], native)
        training_state.load_model(self._model, saved["model"])
        training_state.freeze(self._model, saved["frozen"])
        self._modes.freeze(saved["evaluation"])
        if self._optimizer is None and saved["optimizer"] is not None:
            self._use(self._made(self.settings))
        if self._optimizer is not None:
            training_state.load_optimizer(self._optimizer, saved["optimizer"])
        training_state.set_random_state(saved["random"], native)

    def _detached(self, prediction: Any) -> Any:
        """A prediction without what is needed to go back through it."""
        if isinstance(prediction, torch.Tensor):
            return prediction.detach()
        flat = flatten(prediction, self.backend.kinds, "take a step of training")
        return flat.unflatten({key: x.detach() for key, x in flat.tensors.items()})
