"""Training: steps, the state of random numbers, and loaders."""

from __future__ import annotations

from typing import Any

from d2ldev.framework import Learner, NotBegunError, Tensor, Training, TrainingSettings


class TinygradTraining(Training):
    """Training with tinygrad."""

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        raise NotBegunError("Training.learner")

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        raise NotBegunError("Training.accuracy")

    def label_range(self, y: Tensor, weights: Tensor | None) -> Tensor:
        raise NotBegunError("Training.label_range")
