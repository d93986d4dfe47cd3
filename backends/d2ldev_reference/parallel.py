"""Several devices: the gradients of the parts of a batch are added up on the first device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_strict as xp

from d2ldev.device import Device
from d2ldev.framework import Framework, Learner, Parallel, Settings, Tensor, Weighted
from d2ldev.operations import moving
from d2ldev.operations.parallel import Part, parts_to_train_on
from d2ldev_reference.models import MLP
from d2ldev_reference.training import ReferenceLearner, each_of


class ReferenceParallel(Parallel):
    """Training on several devices.

    Args:
        framework: whose MLPs are trained.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: Settings, devices: Sequence[Device]) -> Learner:
        return ReferenceParallelLearner(self._framework, model, settings, devices)


class ReferenceParallelLearner(ReferenceLearner):
    """The reference backend's MLP, of which each device has a copy for the length of a step."""

    def __init__(
        self, framework: Framework, model: Any, settings: Settings, devices: Sequence[Device]
    ) -> None:
        super().__init__(framework.tensors, model, settings)
        self._framework = framework
        self._devices = devices

    def _differentiated(
        self, model: MLP, inputs: tuple[Any, ...], y: Any
    ) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        first = self._devices[0]
        found = []
        parts = parts_to_train_on(self._framework, (inputs, y), self._devices)
        for device, share, part in zip(self._devices, self._shares(y, parts), parts, strict=True):
            if part.number:
                there = moving.to(self._framework, model, device)
                results = super()._differentiated(there, *part.operands)
                found.append((share, moving.to(self._framework, results, first)))
        share, (loss, prediction, gradients) = found[0]
        loss, gradients = loss * share, each_of(lambda x: x * share, gradients)
        for share, (more, next_prediction, next_gradients) in found[1:]:
            loss = loss + more * share
            prediction = xp.concat([prediction, next_prediction])
            gradients = each_of(lambda a, b, s=share: a + b * s, gradients, next_gradients)
        return loss, prediction, gradients

    def _shares(self, y: Any, parts: list[Part]) -> list[float]:
        """Return what share of the loss of a batch each part of it has."""
        if not isinstance(y, Weighted):
            return [part.share for part in parts]
        total = float(xp.sum(y.weights)) or 1.0  # the loss is 0 where all weights are
        return [float(xp.sum(part.operands[1].weights)) / total for part in parts]
