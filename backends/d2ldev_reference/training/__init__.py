"""The area ``training``: steps of the reference backend's own MLP, and accuracy."""

from __future__ import annotations

from typing import Any

import array_api_strict as xp

from d2ldev.framework import NO_LABEL, Framework, Learner, Tensor, Training, TrainingSettings


class ReferenceTraining(Training):
    """Steps of training, and accuracy."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        from d2ldev_reference.training.learner import ReferenceLearner  # only training needs it

        return ReferenceLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labels = widen_labels(y)
        is_right = xp.argmax(prediction, axis=-1) == labels
        counted = xp.sum(xp.astype(labels != NO_LABEL, xp.float32))
        right = xp.sum(xp.astype(is_right, xp.float32))
        return right / xp.maximum(counted, xp.ones_like(counted)), counted


def widen_labels(y: Tensor) -> Tensor:
    """Return labels in int64. A great one of uint64 stays great: -100 counts as no label."""
    labels = xp.astype(y, xp.int64)
    if y.dtype == xp.uint64:
        labels = xp.where(labels < 0, xp.full_like(labels, xp.iinfo(xp.int64).max), labels)
    return labels
