"""The area ``training``: steps of the reference backend's own MLP, and accuracy."""

from __future__ import annotations

from typing import Any

import array_api_strict as xp

from d2ldev.framework import NO_LABEL, Framework, Learner, Tensor, Training, TrainingSettings
from d2ldev_reference.tensors import with_axes


class ReferenceTraining(Training):
    """Steps of training, and accuracy."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        from d2ldev_reference.training.learner import ReferenceLearner  # only training needs it

        return ReferenceLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        labels = xp.astype(y, xp.int64)
        is_right = xp.argmax(prediction, axis=-1) == labels
        counted = xp.sum(xp.astype(labels != NO_LABEL, xp.float32))
        return xp.sum(xp.astype(is_right, xp.float32)) / xp.maximum(counted, xp.ones_like(counted))

    def label_range(self, y: Tensor, weights: Any) -> Tensor:
        labels = xp.astype(y, xp.int64)
        counts = labels != NO_LABEL
        if weights is not None:
            counts = counts & with_axes(xp.astype(weights, xp.bool), y.ndim)
        labels = xp.where(counts, labels, xp.zeros_like(labels))
        return xp.stack([xp.min(labels), xp.max(labels)])
