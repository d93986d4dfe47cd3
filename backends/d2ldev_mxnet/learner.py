"""The MXNet backend's ``learner``: an MLP that Gluon's trainer trains with Adam."""

from __future__ import annotations

from typing import Any

from d2ldev.device import Device
from d2ldev.interface import Backend, Step, Tensor
from d2ldev_mxnet.framework import NumPySemantics, mx


def make_learner(backend: Backend, device: Device) -> tuple[Any, Step]:
    """See ``Backend.learner``."""
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    with NumPySemantics():
        trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05})
    return {"model": net, "trainer": trainer}, _step


def _step(learner: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    with NumPySemantics():
        with mx.autograd.record():
            loss = ((learner["model"](x) - y) ** 2).mean()
        loss.backward()
        learner["trainer"].step(1)  # the loss is a mean already
    return learner, loss
