"""Mutants that train wrongly, move too much, take the wrong labels, or forget where they were."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

import array_api_strict as xp
import d2ldev_reference.training

from d2ldev import Backend
from d2ldev.device import CPU
from d2ldev.training import run
from mutants import Mutant, ReferenceTraining

ReferenceLearner = d2ldev_reference.training.ReferenceLearner

# -- steps ----------------------------------------------------------------------------------------


class TrainsOnTheCpu(Mutant, caught_by="train.stays-on-the-device"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            backend = self.framework.backend
            self.replace(backend.place(self.parts, CPU))
            return super().step(backend.to(inputs, CPU), backend.to(y, CPU))


class LearnsNothing(Mutant, caught_by="train.learns"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            return self.evaluate(inputs, y)


class ForgetsMomentum(Mutant, caught_by="train.state-follows"):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            if isinstance(obj, dict) and "optimizer" in obj and placed is not obj:
                placed = {**placed, "optimizer": _without_momentum(placed["optimizer"])}
            return placed


class LeavesMomentumBehind(Mutant, caught_by="train.state-follows"):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            if isinstance(obj, dict) and "optimizer" in obj:
                placed = {**placed, "optimizer": obj["optimizer"]}
            return placed


class ComputesOtherBits(Mutant, caught_by="train.same-bits"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            (x,) = inputs
            factor = 1.0 if self.framework.tensors.device_of(x) is CPU else 1.000001
            return super().step((x * factor,), y)


# -- runs -----------------------------------------------------------------------------------------


class KnowsOneOptimizer(Mutant, caught_by="fit.learns"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            if settings.optimizer == "adagrad":
                settings = settings._replace(lr=0.0)
            return super().learner(model, settings)


class CountsTheFirstClassOnly(Mutant, caught_by="fit.classifies"):
    class Training(ReferenceTraining):
        def accuracy(self, prediction, y):
            return super().accuracy(prediction, y * 0)


class TakesPythonsNumbersOnly(Mutant, caught_by="fit.takes-numbers-of-numpy"):
    class Backend(Backend):
        def learner(self, model, *, lr=0.01, **options):
            return super().learner(model, lr=lr if type(lr) is float else 0.0, **options)


class TrainsWhereTheModelWas(Mutant, caught_by="fit.on-the-device"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            learner = super().learner(model, settings)
            learner.replace(self.framework.backend.place(learner.parts, CPU))
            return learner


class HalvesTheRateOnGpus(Mutant, caught_by="fit.same-curve"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            if self.framework.tensors.device_of(model.layers[0]["weight"]) is not CPU:
                settings = settings._replace(lr=settings.lr / 2)
            return super().learner(model, settings)


class SumsLosses(Mutant, caught_by="fit.means-over-examples"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            loss, prediction = super().step(inputs, y)
            return loss * float(y.shape[0]), prediction


class ReadsEachLoss(Mutant, caught_by="fit.moves-batches-only"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            loss, prediction = super().step(inputs, y)
            self.framework.backend.to_numpy(loss)
            return loss, prediction


class PlacesTheModelAgain(Mutant, caught_by="fit.places-the-model-once"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            backend = self.framework.backend
            there = backend.placement(model).popitem()[1]
            return super().learner(backend.place(model, there), settings)


class NeverClips(Mutant, caught_by="fit.clips-gradients"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            return super().learner(model, settings._replace(gradient_clip_val=0.0))


class LearnsFromTheValidationData(Mutant, caught_by="fit.evaluation-changes-nothing"):
    class Learner(ReferenceLearner):
        def evaluate(self, inputs, y):
            return self.step(inputs, y)


# -- resumed runs ---------------------------------------------------------------------------------


class RestoresTheModelOnly(Mutant, caught_by="fit.resumes"):
    class Learner(ReferenceLearner):
        def replace(self, parts):
            super().replace({**parts, "optimizer": self.parts["optimizer"]})


class ForgetsTheOptimizerElsewhere(Mutant, caught_by="fit.resumes-elsewhere"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            self.last = super().learner(model, settings)
            return self.last

        def random_state(self, device):
            return str(device)

        def checked_random_state(self, state, device):
            return (lambda: None) if state == str(device) else self.forget

        def forget(self):
            optimizer = _without_momentum(self.last.parts["optimizer"])
            self.last.replace({**self.last.parts, "optimizer": optimizer})


class WritesWhenPythonExits(Mutant, caught_by="fit.resumes-when-killed"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        save = run.save

        def save_later(framework, obj, path):
            later = f"{path}.later"
            save(framework, obj, later)
            atexit.register(_rename, later, path)

        run.save = save_later


class KeepsTheOptimizerInMemory(Mutant, caught_by="fit.resumes-when-killed"):
    kept = None

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        save = run.save

        def save_without_it(framework, obj, path):
            self.kept = obj["parts"]["optimizer"]
            parts = {**obj["parts"], "optimizer": _without_momentum(self.kept)}
            save(framework, {**obj, "parts": parts}, path)

        run.save = save_without_it

    class Learner(ReferenceLearner):
        def replace(self, parts):
            kept = self.framework.kept
            super().replace({**parts, "optimizer": kept} if kept else parts)


def _without_momentum(optimizer):
    first = [{name: x * 0.0 for name, x in layer.items()} for layer in optimizer["first"]]
    return {**optimizer, "first": first}


def _rename(later, path):
    with suppress(FileNotFoundError):  # it was written more than once
        os.replace(later, path)


# -- labels ---------------------------------------------------------------------------------------


class OfOtherLabels(ReferenceLearner):
    """A learner that is given other labels than the user has: ``spoilt(y)``."""

    def step(self, inputs, y):
        return super().step(inputs, self.spoilt(y))

    def evaluate(self, inputs, y):
        return super().evaluate(inputs, self.spoilt(y))

    def spoilt(self, y):
        raise NotImplementedError


class ComparesBytes(Mutant, caught_by="labels.accuracy-of-every-width"):
    class Training(ReferenceTraining):
        def accuracy(self, prediction, y):
            return super().accuracy(prediction, xp.astype(y, xp.int8))


class CountsRightSequences(Mutant, caught_by="labels.accuracy-sequences"):
    class Training(ReferenceTraining):
        def accuracy(self, prediction, y):
            found = xp.argmax(prediction, axis=-1) == xp.astype(y, xp.int64)
            right = xp.all(xp.reshape(found, (y.shape[0], -1)), axis=1)
            return xp.mean(xp.astype(right, xp.float32))


class BroadcastsLabels(Mutant, caught_by="labels.accuracy-refuses"):
    class Backend(Backend):
        def accuracy(self, prediction, y):
            return self.framework.training.accuracy(prediction, y)


class TakesAnyArrays(Mutant, caught_by="labels.accuracy-refuses-foreign-arrays"):
    class Backend(Backend):
        def accuracy(self, prediction, y):
            return super().accuracy(self.asarray(prediction), self.asarray(y))


class TakesLabelsForBytes(Mutant, caught_by="labels.cross-entropy-of-every-width"):
    class Learner(OfOtherLabels):
        def spoilt(self, y):
            return xp.astype(y, xp.int8)


class FlattensLabels(Mutant, caught_by="labels.cross-entropy-refuses"):
    class Learner(OfOtherLabels):
        def spoilt(self, y):
            return xp.reshape(y, (-1,))


class ClipsLabels(Mutant, caught_by="labels.cross-entropy-out-of-range"):
    class Learner(OfOtherLabels):
        def spoilt(self, y):
            classes = self.parts["model"].layers[-1]["bias"].shape[0]
            return xp.clip(y, 0, classes - 1)
