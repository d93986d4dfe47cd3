"""The torch backend's ``Learner``: autograd, ``torch.nn.functional``'s losses, ``torch.optim``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.interface import Backend, Tensor
from d2ldev.training.learner import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    Learner,
    Settings,
)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    # Labels of the other integer dtypes, which NumPy data has, are refused by torch.
    return torch.nn.functional.cross_entropy(prediction, y.long())


_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": torch.nn.functional.mse_loss,
    "cross_entropy": _cross_entropy,
}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=MOMENTUM),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr, BETAS, ADAM_EPSILON),
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr, eps=ADAGRAD_EPSILON),
}


class TorchLearner(Learner):
    """A ``torch.nn.Module`` that a ``torch.optim.Optimizer`` trains."""

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        if not isinstance(model, torch.nn.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no torch.nn.Module",
                "put the parameters into a torch.nn.Module",
            )
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = self._made(settings)
        self._loss = _LOSSES[settings.loss] if isinstance(settings.loss, str) else settings.loss

    def _made(self, settings: Settings) -> torch.optim.Optimizer:
        optimizer = settings.optimizer
        if isinstance(optimizer, str):
            return _OPTIMIZERS[optimizer](self._parameters, lr=settings.lr)
        if isinstance(optimizer, torch.optim.Optimizer):
            device = next(iter(self.backend.placement(self._model).values()))
            placed: torch.optim.Optimizer = self.backend.place(optimizer, device)
            return placed
        raise UnsupportedValueError(
            f"train with the optimizer {describe(optimizer)}",
            "it is no torch.optim.Optimizer",
            "optimizer=torch.optim.SGD(net.parameters(), lr=0.1), or optimizer='sgd'",
        )

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer}

    def replace(self, parts: dict[str, Any]) -> None:
        self._model, self._optimizer = parts["model"], parts["optimizer"]
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._model.train()
        self._optimizer.zero_grad()
        prediction = self._model(*inputs)
        loss = self._loss(prediction, y)
        loss.backward()
        if self.settings.gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.gradient_clip_val)
        self._optimizer.step()
        return loss.detach(), prediction.detach()

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._model.eval()
        with torch.no_grad():
            prediction = self._model(*inputs)
            return self._loss(prediction, y), prediction

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self._model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        before = self._model.state_dict()
        try:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            self._model.load_state_dict(before)
            raise CheckpointError(
                "restore a training state",
                f"it is of another model or optimizer: {error}",
                "resume with the model and the optimizer that the run began with",
            ) from error
        torch.set_rng_state(state["random"].cpu())
