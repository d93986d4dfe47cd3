"""The JAX backend's ``learner``: an MLP of flax that optax's Adam trains."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from d2ldev.device import Device
from d2ldev.interface import Backend, Step, Tensor


def make_learner(backend: Backend, device: Device) -> tuple[Any, Step]:
    """See ``Backend.learner``."""
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    optimizer = nnx.Optimizer(net, optax.adam(0.05), wrt=nnx.Param)
    # Its step counter is made on the default device.
    return backend.place({"model": net, "optimizer": optimizer}, device), _step


def _mean_squared_error(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return jnp.mean((net(x) - y) ** 2)


def _step(learner: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    loss, gradients = nnx.value_and_grad(_mean_squared_error)(learner["model"], x, y)
    learner["optimizer"].update(learner["model"], gradients)
    return learner, loss
