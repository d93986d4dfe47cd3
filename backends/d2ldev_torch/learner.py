"""The torch backend's ``learner``: an MLP that Adam trains."""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.device import Device
from d2ldev.interface import Backend, Step, Tensor


def make_learner(backend: Backend, device: Device) -> tuple[Any, Step]:
    """See ``Backend.learner``."""
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.05)}, _step


def _step(learner: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    learner["optimizer"].zero_grad()
    loss = torch.nn.functional.mse_loss(learner["model"](x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    learner["optimizer"].step()
    return learner, loss.detach()
