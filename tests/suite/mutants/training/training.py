"""Mutants that train wrongly, move too much, take the wrong labels, or forget where they were."""

from __future__ import annotations

import atexit
import itertools
import os
from contextlib import suppress
from typing import ClassVar

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceLearner, ReferenceTensors

from d2ldev import Backend, Trainer, UnsupportedValueError, options
from d2ldev.contract.training import calls
from d2ldev.framework import CPU, NO_LABEL, Signature, Weighted
from d2ldev.training import feed, run
from mutants import Mutant, ReferenceTraining
from mutants.provision import Network, NetworkLearner, NetworkParallelLearner, divide_by_uses

# -- steps ----------------------------------------------------------------------------------------


class TrainsOnTheCpu(Mutant, caught_by="train.stays-on-the-device"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            backend = self.framework.backend
            self.replace(backend.place(self.sync(), CPU))
            return super().step(backend.to(inputs, CPU), backend.to(y, CPU))


class LearnsNothing(Mutant, caught_by=("train.learns", "train.changes-the-parameters")):
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


class TakesColumnsForRows(Mutant, caught_by="train.refuses-other-shapes"):
    class Learner(NetworkLearner):
        def step(self, inputs, y):
            return super().step(inputs, _column(y))

        def evaluate(self, inputs, y):
            return super().evaluate(inputs, _column(y))


class TakesAnyLoss(Mutant, caught_by="train.refuses-losses-that-are-no-scalar"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            loss = "mse" if callable(settings.loss) else settings.loss
            return super().learner(model, settings._replace(loss=loss))


class TakesSumsForMeans(Mutant, caught_by="train.refuses-sums"):
    class Learner(NetworkLearner):
        """Takes losses of the user's."""

    class Backend(Backend):
        def learner(self, model, *, loss="mse", **options):
            has_reduction = hasattr(loss, "reduction")
            hidden = (lambda prediction, y: loss(prediction, y)) if has_reduction else loss
            return super().learner(model, loss=hidden, **options)


class SkipsStepsWithoutANumber(Mutant, caught_by="train.passes-on-what-is-no-number"):
    class Learner(NetworkLearner):
        def step(self, inputs, y):
            before = self.sync()
            loss, prediction = super().step(inputs, y)
            if xp.isnan(loss):
                self.replace(before)
            return loss, prediction


class ClipsByTheNormAlone(Mutant, caught_by="train.clips-as-torch-does"):
    class Learner(NetworkLearner):
        def _clip(self, gradients):
            largest = self.settings.gradient_clip_val
            squares = [float(xp.sum(g * g)) for layer in gradients for g in layer.values()]
            factor = min(1.0, largest / sum(squares) ** 0.5) if largest and any(squares) else 1.0
            return [{name: g * factor for name, g in layer.items()} for layer in gradients]


class TakesLogarithmsOfProbabilities(Mutant, caught_by="train.binary-cross-entropy"):
    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            loss, error = super()._loss(prediction, y)
            if self.settings.loss == "bce":
                with np.errstate(all="ignore"):
                    found = 1 / (1 + xp.exp(-prediction))
                    loss = -xp.mean(y * xp.log(found) + (1 - y) * xp.log(1 - found))
            return loss, error


class DecaysUnusedLayers(Mutant, caught_by="train.leaves-unused-parameters"):
    class Learner(NetworkLearner):
        def leave_out(self, layers, unused):
            if self.settings.optimizer == "adamw":
                layers[unused] = {name: x * 0.999 for name, x in layers[unused].items()}
            return layers


class AveragesTheRowsOfAToken(Mutant, caught_by="train.adds-up-repeated-rows"):
    class Learner(NetworkLearner):
        def _gradients(self, model, activations, error):
            return divide_by_uses(model, activations, super()._gradients(model, activations, error))


class AddsGradients(Mutant, caught_by="train.accumulates"):
    class Learner(NetworkLearner):
        def flush(self):
            self._total = 1.0
            super().flush()


class CountsBatchesAndNotLabels(Mutant, caught_by="train.accumulates-by-weight"):
    class Learner(NetworkLearner):
        def _find_factor(self, inputs, y):
            self.weight = None
            return super()._find_factor(inputs, y)


class LogsBatchesAndNotLabels(Mutant, caught_by="fit.weighs-the-loss-of-an-epoch"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            found = super().evaluate(inputs, y)
            self.weight = None
            return found


class DividesByTheFullNumber(Mutant, caught_by="train.accumulates-what-is-left"):
    class Learner(NetworkLearner):
        def flush(self):
            if self.pending:
                self._total *= self.settings.accumulate_grad_batches / self.pending
            super().flush()


class LeavesGradientsBehind(Mutant, caught_by="train.accumulates-in-a-move"):
    class Learner(NetworkLearner):
        def replace(self, components):
            optimizer = components["optimizer"]
            if self.pending == 2:
                optimizer = {**optimizer, "sums": self._zeros()}
            super().replace({**components, "optimizer": optimizer})


class IgnoresThePrecision(Mutant, caught_by="train.computes-in-fewer-bits"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            return super().learner(model, settings._replace(precision="model"))


class KnowsItsOwnNamesAlone(Mutant, caught_by="train.names-of-precisions"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        options.OWN_PRECISIONS.clear()


class TakesConversionsForMisspelt(Mutant, caught_by="train.refuses-converting-precisions"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        options.CONVERSIONS.clear()


class LearnsNothingInFewerBits(Mutant, caught_by="train.learns-in-fewer-bits"):
    class Learner(NetworkLearner):
        def _update(self, gradients):
            if self.settings.precision == "model":
                super()._update(gradients)


class RoundsParameters(Mutant, caught_by="train.keeps-parameters-in-float32"):
    class Learner(NetworkLearner):
        def _update(self, gradients):
            super()._update(gradients)
            if self.settings.precision != "model":
                self._model = self.narrow_model()


class ScalesNoGradients(Mutant, caught_by="train.learns-from-small-gradients"):
    class Learner(NetworkLearner):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._optimizer.pop("scale", None)


class StepsToInfinity(Mutant, caught_by="train.leaves-out-gradients-that-are-too-large"):
    class Learner(NetworkLearner):
        def _update(self, gradients):
            ReferenceLearner._update(self, gradients)


class TrainsWithoutWeights(Mutant, caught_by="train.weighs-examples"):
    class Learner(NetworkLearner):
        def step(self, inputs, y):
            return super().step(inputs, y.y if isinstance(y, Weighted) else y)


class WeighsWholeSequences(Mutant, caught_by="train.weighs-steps-of-sequences"):
    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            if isinstance(y, Weighted) and y.weights.ndim > 1:
                y = y._replace(weights=xp.mean(y.weights, axis=1))
            return super()._loss(prediction, y)


class MultipliesPadding(Mutant, caught_by="train.leaves-out-weights-of-zero"):
    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            loss, error = super()._loss(prediction, y)
            if isinstance(y, Weighted) and self.settings.loss != "cross_entropy":
                loss = loss + 0.0 * xp.sum(y.y)
            return loss, error


class BroadcastsWeights(Mutant, caught_by="train.refuses-other-weights"):
    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            if isinstance(y, Weighted) and y.weights.shape[:1] != prediction.shape[:1]:
                y = y.y
            return super()._loss(prediction, y)


class EvaluatesWithDropout(Mutant, caught_by="train.evaluates-the-model-in-use"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            is_network = isinstance(self.sync()["model"], Network)
            return super().evaluate(self.drop_some(inputs) if is_network else inputs, y)


class LeavesLayersInUse(Mutant, caught_by="runs.leave-the-modes"):
    class Learner(NetworkLearner):
        def predict(self, inputs):
            self.framework.is_frozen = False
            return super().predict(inputs)


class LeavesLayersInTrainingOnSeveralGpus(Mutant, caught_by="runs.leave-the-modes"):
    class ParallelLearner(NetworkParallelLearner):
        def step(self, inputs, y):
            self._framework.is_frozen = False
            return super().step(inputs, y)


class LeavesLayersInTrainingAfterAnError(Mutant, caught_by="runs.leave-the-modes"):
    class Learner(NetworkLearner):
        def step(self, inputs, y):
            was_frozen, self.framework.is_frozen = self.framework.is_frozen, False
            found = super().step(inputs, y)
            self.framework.is_frozen = was_frozen
            return found


class DropsNothing(Mutant, caught_by="train.drops-in-training-only"):
    class Learner(NetworkLearner):
        def drop_some(self, inputs):
            return inputs


class RefusesOwnOptimizers(Mutant, caught_by="fit.resumes-own-optimizers"):
    class Learner(NetworkLearner):
        def __init__(self, tensors, model, settings):
            if not isinstance(settings.optimizer, str | None):
                raise UnsupportedValueError("train", "the optimizer is no name", "optimizer='sgd'")
            super().__init__(tensors, model, settings)


class LeavesAnOptimizerBehind(Mutant, caught_by="train.places-own-optimizers"):
    class Learner(NetworkLearner):
        def __init__(self, framework, model, settings):
            super().__init__(framework, model, settings)
            if not isinstance(settings.optimizer, str | None):
                left = framework.backend.place(self.sync()["optimizer"], CPU)
                self.replace({**self.sync(), "optimizer": left})


class TrainsWhatIsFrozen(Mutant, caught_by="train.leaves-what-is-frozen"):
    class Learner(NetworkLearner):
        def step(self, inputs, y):
            is_frozen, self.framework.is_frozen = self.framework.is_frozen, False
            result = super().step(inputs, y)
            self.framework.is_frozen = is_frozen
            return result


def _column(y):
    return xp.expand_dims(y, axis=1) if y.ndim == 1 and y.dtype == xp.float32 else y


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


class InTheirOrder(Signature):
    def arrange(self, inputs):
        return inputs


class GivesInputsInTheirOrder(Mutant, caught_by="fit.inputs-by-name"):
    class Learner(NetworkLearner):
        @property
        def signature(self):
            return InTheirOrder(*super().signature)

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        feed.separate = lambda batch, *_: (
            tuple(x for key, x in batch.items() if key != "y"),
            batch["y"],
        )


class TakesOtherNamesForTheTarget(Mutant, caught_by="fit.refuses-other-names"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)

        def take(batch, signature, *how):
            *others, last = batch
            inputs = {key: batch[key] for key in others if key in signature.names}
            return calls.separate({**inputs, "y": batch[last]}, signature, *how)

        feed.separate = lambda batch, *how: (take if "mmask" in batch else calls.separate)(
            batch, *how
        )


class WantsItsOwnName(Mutant, caught_by="fit.one-input-by-any-name"):
    class Learner(NetworkLearner):
        @property
        def signature(self):
            return super().signature._replace(required=frozenset())


class ForgetsOptionalInputs(Mutant, caught_by="fit.optional-inputs"):
    class Learner(NetworkLearner):
        def predict(self, inputs):
            given = isinstance(inputs, dict)
            return super().predict(tuple(inputs.values()) if given else inputs)


class GivesMetricsTheTarget(Mutant, caught_by="fit.loss-of-the-model"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        make = feed.Feed.make_operands
        feed.Feed.make_operands = lambda self, *batch: (
            (found := make(self, *batch))[0],
            found[1],
            found[1],
            found[3],
        )


class LooksForAShape(Mutant, caught_by="fit.names-the-output-of-a-model"):
    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            if isinstance(self.settings.loss, str) and isinstance(prediction, dict):
                raise UnsupportedValueError("compute the loss", "it has no shape", "loss=f")
            return super()._loss(prediction, y)


class TakesPythonsNumbersOnly(Mutant, caught_by="fit.takes-numbers-of-numpy"):
    class Backend(Backend):
        def learner(self, model, *, lr=None, **options):
            return super().learner(model, lr=lr if type(lr) is float else 0.0, **options)


class TrainsWhereTheModelWas(Mutant, caught_by="fit.on-the-device"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            learner = super().learner(model, settings)
            learner.replace(self.framework.backend.place(learner.sync(), CPU))
            return learner


class HalvesTheRateOnGpus(Mutant, caught_by=("fit.same-curve", "train.same-losses")):
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


class WeighsTheFirstExampleOnly(Mutant, caught_by="fit.weighs-examples"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            if isinstance(y, Weighted):
                first = xp.asarray(xp.arange(y.weights.shape[0], device=y.weights.device) < 1)
                y = y._replace(weights=xp.where(first, y.weights, xp.ones_like(y.weights)))
            return super().step(inputs, y)


class DividesByWeightsOfZero(Mutant, caught_by="fit.weights-of-zero"):
    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            loss, error = super()._loss(prediction, y)
            if isinstance(y, Weighted) and not xp.any(y.weights != 0):
                loss, error = (xp.full_like(x, xp.nan) for x in (loss, error))
            return loss, error


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


class CarriesBatchesIntoTheNextEpoch(Mutant, caught_by="fit.accumulates"):
    class Learner(NetworkLearner):
        def flush(self):
            if self.pending == self.settings.accumulate_grad_batches:
                super().flush()


class LearnsFromTheValidationData(Mutant, caught_by="fit.evaluation-changes-nothing"):
    class Learner(ReferenceLearner):
        def evaluate(self, inputs, y):
            return self.step(inputs, y)


# -- resumed runs ---------------------------------------------------------------------------------


class RestoresTheModelOnly(Mutant, caught_by="fit.resumes"):
    class Learner(ReferenceLearner):
        def replace(self, components):
            super().replace({**components, "optimizer": self.sync()["optimizer"]})


class GoesOnWithinAStep(Mutant, caught_by="fit.resumes-accumulated"):
    class Learner(NetworkLearner):
        def replace(self, components):
            super().replace(components)
            self.pending = self.settings.accumulate_grad_batches - 1


class ForgetsTheScale(Mutant, caught_by="fit.resumes-in-fewer-bits"):
    class Learner(NetworkLearner):
        def replace(self, components):
            optimizer = dict(components["optimizer"])
            if "scale" in optimizer:
                optimizer["scale"] = 2.0**16
            super().replace({**components, "optimizer": optimizer})


class ForgetsTheStateOfAnObject(Mutant, caught_by="fit.resumes-own-optimizers"):
    class Learner(NetworkLearner):
        def __init__(self, tensors, model, settings):
            self.is_name = isinstance(settings.optimizer, str)
            super().__init__(tensors, model, settings)

        def replace(self, components):
            optimizer = components["optimizer"] if self.is_name else self.sync()["optimizer"]
            super().replace({**components, "optimizer": optimizer})


class DrawsOnFromAnywhere(Mutant, caught_by="fit.resumes-random-numbers"):
    class Learner(NetworkLearner):
        seeds = itertools.count()

        def drop_some(self, inputs):
            (x,) = inputs
            seed = next(self.seeds)
            return (x * self.framework.backend.rand(x.shape, seed=seed, device=x.device),)


class ForgetsWhatIsFrozen(Mutant, caught_by="fit.resumes-what-is-frozen"):
    class Learner(NetworkLearner):
        def check_modes(self, modes):
            return lambda: None


class ForgetsTheOptimizerElsewhere(Mutant, caught_by="fit.resumes-elsewhere"):
    class Training(ReferenceTraining):
        def learner(self, model, settings):
            self.last = super().learner(model, settings)
            return self.last

        def random_state(self, device):
            return str(device)

        def check_random_state(self, state, device):
            return (lambda: None) if state == str(device) else self.forget

        def forget(self):
            optimizer = _without_momentum(self.last.sync()["optimizer"])
            self.last.replace({**self.last.sync(), "optimizer": optimizer})


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
            self.kept = obj["components"]["optimizer"]
            components = {**obj["components"], "optimizer": _without_momentum(self.kept)}
            save(framework, {**obj, "components": components}, path)

        run.save = save_without_it

    class Learner(ReferenceLearner):
        def replace(self, components):
            kept = self.framework.kept
            super().replace({**components, "optimizer": kept} if kept else components)


class GoesOnWithTheOptimizerOfTheFitBefore(Mutant, caught_by="runs.second-fit-begins-anew"):
    kept: ClassVar = {}

    class Learner(ReferenceLearner):
        def __init__(self, tensors, model, settings):
            super().__init__(tensors, model, settings)
            self._optimizer = GoesOnWithTheOptimizerOfTheFitBefore.kept.setdefault(
                settings.optimizer, self._optimizer
            )


class TracesInEachFit(Mutant, caught_by="runs.second-fit-compiles-nothing"):
    class Learner(NetworkLearner):
        """Calls a loss of the user's once for each shape, as what compiles does."""

        def __init__(self, tensors, model, settings):
            super().__init__(tensors, model, settings)
            self.traced = {}

        def _loss(self, prediction, y):
            if isinstance(self.settings.loss, str):
                return super()._loss(prediction, y)
            if prediction.shape not in self.traced:
                self.traced[prediction.shape] = super()._loss(prediction, y)
            return self.traced[prediction.shape]


def _without_momentum(optimizer):
    first = [{name: x * 0.0 for name, x in layer.items()} for layer in optimizer["first"]]
    return {**optimizer, "first": first}


def _rename(later, path):
    with suppress(FileNotFoundError):  # it was written more than once
        os.replace(later, path)


# -- floats ---------------------------------------------------------------------------------------


class CastsNoTensors(Mutant, caught_by="fit.casts-floats"):
    class Tensors(ReferenceTensors):
        def astype(self, x, dtype):
            return x


class CastsTargets(Mutant, caught_by="fit.casts-only-floats"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            if isinstance(y, Weighted) or "int" not in str(y.dtype):
                return super().step(inputs, y)
            return super().step(inputs, y * 2)


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
            return xp.mean(xp.astype(right, xp.float32)), float(right.size)


class BroadcastsLabels(Mutant, caught_by="labels.accuracy-refuses"):
    class Backend(Backend):
        def accuracy(self, prediction, y):
            return self._framework.training.accuracy(prediction, y)[0]


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


class SumsOverSequences(Mutant, caught_by="labels.cross-entropy-sequences"):
    class Learner(NetworkLearner):
        def step(self, inputs, y):
            loss, prediction = super().step(inputs, y)
            return loss * _steps(y), prediction

        def evaluate(self, inputs, y):
            loss, prediction = super().evaluate(inputs, y)
            return loss * _steps(y), prediction


def _steps(y):
    return 1.0 * y.shape[1] if y.ndim > 1 and y.dtype == xp.int32 else 1.0


def _clip_among(learner, y):
    """Return labels that are classes, of those that ``y`` or a ``Weighted`` has."""
    classes = learner.sync()["model"].layers[-1]["bias"].shape[0]
    if isinstance(y, Weighted):
        return y._replace(y=xp.clip(y.y, 0, classes - 1))
    return xp.clip(y, 0, classes - 1)


class TakesNoLabelForAClass(Mutant, caught_by="labels.leave-out"):
    class Learner(OfOtherLabels):
        def spoilt(self, y):
            return _clip_among(self, y)


class MultipliesInfiniteLossesByZero(Mutant, caught_by="labels.leave-out-infinite-rows"):
    class Learner(ReferenceLearner):
        def evaluate(self, inputs, y):
            loss, prediction = super().evaluate(inputs, y)
            return loss + xp.sum(prediction * 0), prediction


class TakesTheEndsOfSequencesForAClass(Mutant, caught_by="labels.leave-out-of-sequences"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            return super().evaluate(inputs, xp.clip(y, 0, 2) if y.ndim > 1 else y)


class CountsLabelsForNone(Mutant, caught_by="labels.accuracy-leaves-out"):
    class Training(ReferenceTraining):
        def accuracy(self, prediction, y):
            found = xp.argmax(prediction, axis=-1) == xp.astype(y, xp.int64)
            return xp.mean(xp.astype(found, xp.float32)), float(found.size)


class SeesNoNegativeLabels(Mutant, caught_by="labels.cross-entropy-out-of-range"):
    class Learner(ReferenceLearner):
        def _find_wrong(self, y, weights, counts):
            return super()._find_wrong(
                xp.where(y < 0, xp.full_like(y, NO_LABEL), y), weights, counts
            )


class ForgetsLabelsOnGpus(Mutant, caught_by="labels.out-of-range-on-a-gpu"):
    class Learner(ReferenceLearner):
        def _find_wrong(self, y, weights, counts):
            is_on_the_cpu = self._framework.tensors.device_of(y) is CPU
            return super()._find_wrong(y, weights, counts) if is_on_the_cpu else ()


class SeesNoLabelsInARun(Mutant, caught_by="labels.fit-refuses"):
    class Learner(ReferenceLearner):
        def _find_wrong(self, y, weights, counts):
            return ()


class LooksAtNoFirstBatch(Mutant, caught_by="labels.fit-looks-at-the-first-batch"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        feed.Feed.is_at_first = False


class NamesNoBatch(Mutant, caught_by="labels.fit-names-the-batch"):
    class Learner(ReferenceLearner):
        def _loss(self, prediction, y):
            self.batch = None
            return super()._loss(prediction, y)


class TakesUnsignedLabelsForSignedOnes(Mutant, caught_by="labels.unsigned"):
    class Learner(OfOtherLabels):
        def spoilt(self, y):
            is_great = not isinstance(y, Weighted) and y.dtype in (xp.uint32, xp.uint64)
            return xp.astype(y, xp.int32) if is_great else y


class EvaluatesLabelsForNone(Mutant, caught_by="labels.fit-leaves-out"):
    class Learner(ReferenceLearner):
        def evaluate(self, inputs, y):
            return super().evaluate(inputs, _clip_among(self, y))


class LooksAtLabelsOfWeightZero(Mutant, caught_by="labels.of-weight-zero"):
    class Learner(ReferenceLearner):
        def step(self, inputs, y):
            if isinstance(y, Weighted) and xp.any(y.y < 0):
                raise UnsupportedValueError("train", "a label is negative", "another one")
            return super().step(inputs, y)


# -- exercises ------------------------------------------------------------------------------------


class TakesNormsOnTheCpu(Mutant, caught_by="bench.exercises-are-measured"):
    class Tensors(ReferenceTensors):
        def norm(self, x):
            return super().norm(self.framework.backend.to(x, CPU))


class TakesTheGpusThatThereAre(Mutant, caught_by="fit.too-many-gpus"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        initialize = Trainer.__init__

        def take(trainer, max_epochs, num_gpus=0, *args, backend, **options):
            count = min(num_gpus, backend.num_gpus())
            initialize(trainer, max_epochs, count, *args, backend=backend, **options)

        # Each mutant is given to the suite in a process of its own.
        Trainer.__init__ = take


class ScalesArraysAsImages(Mutant, caught_by="fit.takes-its-own-and-foreign-arrays"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        prepare = Trainer.prepare_batch

        def scale(trainer, batch):
            is_pair = isinstance(batch, tuple) and isinstance(batch[0], np.ndarray)
            return prepare(trainer, (batch[0] / np.float32(2), batch[1]) if is_pair else batch)

        Trainer.prepare_batch = scale
