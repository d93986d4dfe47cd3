"""Parallel: several devices, or several processes, train one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d2ldev.framework import Device, Group, Learner, NotBegunError, Parallel, TrainingSettings


class TinygradParallel(Parallel):
    """Training with several devices of tinygrad."""

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        raise NotBegunError("Parallel.learner")

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        raise NotBegunError("Parallel.learner_of_group")
