"""The area ``parallel``: training on several devices, and in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from d2ldev import Device
from d2ldev.framework import Framework, Learner, Parallel, TrainingSettings

if TYPE_CHECKING:
    from d2ldev.framework import Group


class ReferenceParallel(Parallel):
    """Training on several devices, and in several processes."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        from d2ldev_reference.training.replicated import ReferenceParallelLearner

        return ReferenceParallelLearner(self._framework, model, settings, devices)

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        from d2ldev_reference.training.replicated import ReferenceGroupLearner

        return ReferenceGroupLearner(self._framework, model, settings, group)
