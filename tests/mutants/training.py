"""Mutants that train wrongly, move too much, or forget where they were."""

from __future__ import annotations

from d2ldev.device import CPU
from mutants.base import Mutant


class Learned(Mutant):
    """A mutant that changes the learner before it is used: ``spoil(learner)``."""

    def _learner(self, model, settings):
        learner = super()._learner(model, settings)
        self.spoil(learner)
        return learner


class KnowsOneOptimizer(Mutant, caught_by="fit.learns"):
    def _learner(self, model, settings):
        if settings.optimizer == "adagrad":
            settings = settings._replace(lr=0.0)
        return super()._learner(model, settings)


class CountsTheFirstClassOnly(Mutant, caught_by="fit.classifies"):
    def _accuracy(self, prediction, y):
        return super()._accuracy(prediction, y * 0)


class TakesPythonsNumbersOnly(Mutant, caught_by="fit.takes-numbers-of-numpy"):
    def learner(self, model, *, lr=0.01, **options):
        return super().learner(model, lr=lr if type(lr) is float else 0.0, **options)


class TrainsWhereTheModelWas(Learned, caught_by="fit.on-the-device"):
    def spoil(self, learner):
        learner.place(CPU)


class HalvesTheRateOnGpus(Mutant, caught_by="fit.same-curve"):
    def _learner(self, model, settings):
        if self.device_of(model.layers[0]["weight"]) is not CPU:
            settings = settings._replace(lr=settings.lr / 2)
        return super()._learner(model, settings)


class SumsLosses(Learned, caught_by="fit.means-over-examples"):
    def spoil(self, learner):
        step = learner.step

        def summed(inputs, y):
            loss, prediction = step(inputs, y)
            return loss * float(y.shape[0]), prediction

        learner.step = summed


class ReadsEachLoss(Learned, caught_by="fit.moves-batches-only"):
    def spoil(self, learner):
        step = learner.step

        def read(inputs, y):
            loss, prediction = step(inputs, y)
            self.to_numpy(loss)
            return loss, prediction

        learner.step = read


class PlacesTheModelAgain(Mutant, caught_by="fit.places-the-model-once"):
    def _learner(self, model, settings):
        return super()._learner(self.place(model, self.placement(model).popitem()[1]), settings)


class NeverClips(Mutant, caught_by="fit.clips-gradients"):
    def _learner(self, model, settings):
        return super()._learner(model, settings._replace(gradient_clip_val=0.0))


class LearnsFromTheValidationData(Learned, caught_by="fit.evaluation-changes-nothing"):
    def spoil(self, learner):
        learner.evaluate = learner.step


class RestoresTheModelOnly(Learned, caught_by="fit.resumes"):
    def spoil(self, learner):
        restore = learner.restore
        fresh = learner.state()["optimizer"]
        learner.restore = lambda state: restore({**state, "optimizer": fresh})


class ForgetsTheOptimizerElsewhere(Learned, caught_by="fit.resumes-elsewhere"):
    def spoil(self, learner):
        state, restore, fresh = learner.state, learner.restore, learner.state()["optimizer"]
        here = str(self.device_of(learner.parts["model"].layers[0]["weight"]))

        def state_with_the_device():
            return {**state(), "device": here}

        def restored(found):
            kept = {name: value for name, value in found.items() if name != "device"}
            restore(kept if found["device"] == here else {**kept, "optimizer": fresh})

        learner.state, learner.restore = state_with_the_device, restored
