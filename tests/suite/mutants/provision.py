"""Set-up for the conformance suite: what mutants are trained with besides an MLP.

``array_api_strict`` has no layers, so that dropout, masks and freezing are written out here.
"""

from __future__ import annotations

import dataclasses

from d2ldev_reference import provision
from d2ldev_reference.models import MLP
from d2ldev_reference.training import ReferenceLearner

samples = provision.samples


class Network(MLP):
    """An MLP that is trained with dropout, and whose first layer can be frozen."""


class Masked(MLP):
    """An MLP of whose outputs some are masked."""

    def __call__(self, x, mask):
        """Map both to ``(n, 3)``."""
        return super().__call__(x) * mask


class NetworkLearner(ReferenceLearner):
    """Trains networks too, and has masked models predict."""

    @property
    def input_names(self):
        return ("x", "mask") if isinstance(self.parts["model"], Masked) else ("x",)

    def step(self, inputs, y):
        before = self.parts["model"]
        if isinstance(before, Masked):
            return self.evaluate(inputs, y)
        if not isinstance(before, Network):
            return super().step(inputs, y)
        loss, prediction = super().step(self.dropped(inputs), y)
        layers = self.parts["model"].layers
        if self.framework.is_frozen:
            layers = [before.layers[0], *layers[1:]]
        self.replace({**self.parts, "model": dataclasses.replace(before, layers=layers)})
        return loss, prediction

    def dropped(self, inputs):
        """Return the inputs without some of their numbers."""
        (x,) = inputs
        return (x * self.framework.backend.rand(x.shape, device=x.device),)

    def modes(self):
        return self.framework.is_frozen

    def checked_modes(self, modes):
        def set_modes():
            self.framework.is_frozen = modes

        return set_modes


def networks(backend):
    """Return a network."""

    def network(device):
        backend.framework.is_frozen = False
        net = backend.mlp([4, 8, 2], device=device)
        return Network(net.layers, net.activation)

    return {"network": network}


def freezables(backend):
    """Return a network, and what freezes its first layer."""

    def freeze(_net, is_frozen):
        backend.framework.is_frozen = is_frozen

    return {"first layer": (networks(backend)["network"], freeze)}


def masked_models(backend):
    """Return a masked model."""
    return {"masked": lambda device: Masked(backend.mlp([3, 3], device=device).layers)}
