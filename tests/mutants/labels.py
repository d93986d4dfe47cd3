"""Mutants that compare predictions with the wrong labels."""

from __future__ import annotations

import array_api_strict as xp

from mutants.base import Mutant


class OfOtherLabels(Mutant):
    """A mutant whose learner is given other labels than the user has: ``spoilt(y, classes)``."""

    def _learner(self, model, settings):
        learner = super()._learner(model, settings)
        classes = model.layers[-1]["bias"].shape[0]
        for name in ("step", "evaluate"):
            method = getattr(learner, name)
            setattr(learner, name, self._with_other_labels(method, classes))
        return learner

    def _with_other_labels(self, method, classes):
        return lambda inputs, y: method(inputs, self.spoilt(y, classes))


class ComparesBytes(Mutant, caught_by="labels.accuracy-of-every-width"):
    def _accuracy(self, prediction, y):
        return super()._accuracy(prediction, xp.astype(y, xp.int8))


class CountsRightSequences(Mutant, caught_by="labels.accuracy-sequences"):
    def _accuracy(self, prediction, y):
        found = xp.argmax(prediction, axis=-1) == xp.astype(y, xp.int64)
        return xp.mean(xp.astype(xp.all(xp.reshape(found, (y.shape[0], -1)), axis=1), xp.float32))


class BroadcastsLabels(Mutant, caught_by="labels.accuracy-refuses"):
    def accuracy(self, prediction, y):
        return self._accuracy(prediction, y)


class TakesAnyArrays(Mutant, caught_by="labels.accuracy-refuses-foreign-arrays"):
    def accuracy(self, prediction, y):
        return super().accuracy(self.asarray(prediction), self.asarray(y))


class TakesLabelsForBytes(OfOtherLabels, caught_by="labels.cross-entropy-of-every-width"):
    def spoilt(self, y, classes):
        return xp.astype(y, xp.int8)


class FlattensLabels(OfOtherLabels, caught_by="labels.cross-entropy-refuses"):
    def spoilt(self, y, classes):
        return xp.reshape(y, (-1,))


class ClipsLabels(OfOtherLabels, caught_by="labels.cross-entropy-out-of-range"):
    def spoilt(self, y, classes):
        return xp.clip(y, 0, classes - 1)
