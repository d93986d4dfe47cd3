"""The reference backend's ``learner``: array-api-strict has no gradients: they are written out."""

from __future__ import annotations

from typing import Any

import array_api_strict as xp

from d2ldev.device import Device
from d2ldev.interface import Backend, Step, Tensor


def make_learner(backend: Backend, device: Device) -> tuple[Any, Step]:
    """See ``Backend.learner``: a linear model, trained with momentum."""
    net = backend.mlp([2, 1], device=device)
    (layer,) = net.layers
    return {"model": net, "velocity": {name: x * 0.0 for name, x in layer.items()}}, _step


def _step(learner: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    net = learner["model"]
    (layer,) = net.layers
    error = net(x) - y
    per_output = error * (2.0 / error.shape[0])
    gradients = {"weight": per_output.T @ x, "bias": xp.sum(per_output, axis=0)}
    velocity = {name: 0.9 * learner["velocity"][name] + gradients[name] for name in layer}
    moved = {name: layer[name] - 0.05 * velocity[name] for name in layer}
    return {"model": type(net)([moved], net.activation), "velocity": velocity}, xp.mean(error**2)
