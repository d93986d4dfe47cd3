"""Mutants that split wrongly, share what they should copy, and learn something else on two GPUs."""

from __future__ import annotations

import sys
from typing import ClassVar

import array_api_strict as xp
from reference_backend import ReferenceGroupLearner, ReferenceLearner, ReferenceParallelLearner

from d2ldev import ArrayLoader, Backend, Broadcast, UnsupportedValueError
from d2ldev.framework import Weighted
from d2ldev.operations.examples import Whole
from d2ldev.training import team
from mutants import Mutant, ReferenceParallel
from mutants.provision import (
    KeepsMeans,
    NetworkGroupLearner,
    NetworkParallelLearner,
    divide_by_uses,
)

# -- by hand --------------------------------------------------------------------------------------


class LosesAnExampleOfEachShard(Mutant, caught_by="split.gives-each-its-part"):
    class Parallel(ReferenceParallel):
        def rows(self, x, start, stop):
            return super().rows(x, start, max(start, stop - 1))


class SplitsTensorsOnly(Mutant, caught_by="split.takes-nestings"):
    class Backend(Backend):
        def split(self, batch, devices):
            if isinstance(batch, dict):
                raise UnsupportedValueError(
                    "split a batch", "it is not a tensor", "split(x, devices)"
                )
            return super().split(batch, devices)


class GivesEachShardAllOfAList(Mutant, caught_by="split.takes-sequences"):
    class Backend(Backend):
        def split(self, batch, devices):
            shards = super().split(batch, devices)
            if isinstance(batch, dict) and "labels" in batch:
                shards = [{**shard, "labels": batch["labels"]} for shard in shards]
            return shards


class GivesEachShardAllOfAText(Mutant, caught_by="split.takes-text"):
    class Backend(Backend):
        def split(self, batch, devices):
            shards = super().split(batch, devices)
            if isinstance(batch, dict) and "text" in batch:
                shards = [{**shard, "text": batch["text"]} for shard in shards]
            return shards


class CountsTheChannelsOfImages(Mutant, caught_by="split.counts-sequences"):
    class Backend(Backend):
        def split(self, batch, devices):
            if isinstance(batch, tuple) and isinstance(batch[0], list):
                shards = [super(type(self), self).split(x, devices) for x in batch[0]]
                return [(list(images), batch[1]) for images in zip(*shards, strict=True)]
            return super().split(batch, devices)


class TakesAPairForTwoExamples(Mutant, caught_by="split.knows-fields"):
    class Backend(Backend):
        def split(self, batch, devices):
            if isinstance(batch, list) and len(batch) == len(devices):
                return [[self.to(x, d)] for x, d in zip(batch, devices, strict=True)]
            return super().split(batch, devices)


class LeavesOtherListsWhole(Mutant, caught_by="split.refuses-other-sequences"):
    class Backend(Backend):
        def split(self, batch, devices):
            if isinstance(batch, dict) and "inner" in batch:
                batch = {**batch, "inner": Broadcast(batch["inner"])}
            return super().split(batch, devices)


class TakesAListForFields(Mutant, caught_by="split.refuses-what-may-be-either"):
    class Backend(Backend):
        def split(self, batch, devices):
            if isinstance(batch, dict) and isinstance(batch.get("images"), list):
                batch = {**batch, "images": dict(enumerate(batch["images"]))}
            return super().split(batch, devices)


class SplitsWhatIsMarked(Mutant, caught_by="split.keeps-what-is-marked"):
    class Backend(Backend):
        def split(self, batch, devices):
            shards = super().split(batch, devices)
            if isinstance(batch, tuple) and isinstance(batch[-1], Broadcast):
                shards = [(x, {**marked, "sizes": marked["sizes"][:2]}) for x, marked in shards]
            return shards


class SplitsWhatDoesNotAgree(Mutant, caught_by="split.asks-for-one-length"):
    class Backend(Backend):
        def split(self, batch, devices):
            if isinstance(batch, dict) and batch:
                split = super().split
                shards = [split(x, devices) for x in batch.values()]
                return [dict(zip(batch, parts, strict=True)) for parts in zip(*shards, strict=True)]
            return super().split(batch, devices)


class SplitsNothing(Mutant, caught_by="split.asks-for-examples"):
    class Backend(Backend):
        def split(self, batch, devices):
            return super().split(batch, devices) if batch else [batch for _ in devices]


class TakesTheNameOfOneDevice(Mutant, caught_by="split.refuses-devices"):
    class Backend(Backend):
        def split(self, batch, devices):
            return super().split(batch, [devices] if isinstance(devices, str) else devices)


class LeavesOutMissingDevices(Mutant, caught_by="split.needs-devices"):
    class Backend(Backend):
        def replicate(self, obj, devices):
            if isinstance(devices, list):
                devices = [each for each in devices if self.device(each) in self.devices()]
            return super().replicate(obj, devices)


class SharesTheFirstCopy(Mutant, caught_by="replicate.copies-parameters"):
    class Backend(Backend):
        def replicate(self, obj, devices):
            return [self.to(obj, device) for device in devices]


class CopiesModelsToTheFirst(Mutant, caught_by="replicate.copies-models"):
    class Backend(Backend):
        def replicate(self, obj, devices):
            copies = super().replicate(obj, devices)
            return copies if isinstance(obj, dict) else [self.to(x, devices[0]) for x in copies]


# -- together -------------------------------------------------------------------------------------


class TakesTheMeanOfMeans(Mutant, caught_by="several.learn-what-one-learns"):
    class ParallelLearner(ReferenceParallelLearner):
        def _weigh(self, shard):
            return 0.5


class DecaysNoWeightsTogether(Mutant, caught_by="several.learn-what-one-learns"):
    class ParallelLearner(ReferenceParallelLearner):
        def _update_parameter(self, steps, x, *others):
            if self.settings.optimizer == "adamw":
                x = x / (1 - 0.01 * self.settings.lr)
            return super()._update_parameter(steps, x, *others)


class LearnsNothingTogether(Mutant, caught_by="several.change-the-parameters"):
    class ParallelLearner(ReferenceParallelLearner):
        def step(self, inputs, y):
            return self.evaluate(inputs, y)


class TrainsOnTheFirstAlone(Mutant, caught_by="several.use-each-gpu"):
    class Parallel(ReferenceParallel):
        def learner(self, model, settings, devices):
            return super().learner(model, settings, [devices[0] for _ in devices])


class DoesNotClipTogether(Mutant, caught_by="several.clip-the-whole-gradient"):
    class ParallelLearner(ReferenceParallelLearner):
        def _clip(self, gradients):
            return gradients


class StepsWithEachBatch(Mutant, caught_by="several.accumulate"):
    class ParallelLearner(ReferenceParallelLearner):
        def step(self, inputs, y):
            found = super().step(inputs, y)
            self.flush()
            return found


class ForgetsTheWeightsOfAShard(Mutant, caught_by="several.accumulate-by-weight"):
    class ParallelLearner(NetworkParallelLearner):
        def _differentiate(self, model, inputs, y):
            found = super()._differentiate(model, inputs, y)
            self.weight = None
            return found


class AveragesSums(Mutant, caught_by="several.refuse-sums"):
    class ParallelLearner(NetworkParallelLearner):
        """Takes losses of the user's."""

    class Backend(Backend):
        def learner(self, model, *, loss="mse", **options):
            has_reduction = hasattr(loss, "reduction")
            hidden = (lambda prediction, y: loss(prediction, y)) if has_reduction else loss
            return super().learner(model, loss=hidden, **options)


class ComputesWithEmptyParts(Mutant, caught_by="several.take-small-batches"):
    class ParallelLearner(ReferenceParallelLearner):
        def _split(self, model, inputs, y):
            shards = super()._split(model, inputs, y)
            return [shard._replace(number=shard.number or 1) for shard in shards]


class ForgetsTheWeightsOfTheOthers(Mutant, caught_by="several.weigh-the-whole-batch"):
    class ParallelLearner(ReferenceParallelLearner):
        def _weigh(self, shard):
            _, y = shard.operands
            return shard.share if isinstance(y, Weighted) else super()._weigh(shard)


class CountsShardsWithALossAlike(Mutant, caught_by="several.loss-of-the-model"):
    class ParallelLearner(NetworkParallelLearner):
        def _weigh(self, shard):
            return 0.5 if self.settings.loss == "model" else super()._weigh(shard)


class AveragesTheRowsOfATokenInAShard(Mutant, caught_by="several.add-up-repeated-rows"):
    class ParallelLearner(NetworkParallelLearner):
        def _gradients(self, model, activations, error):
            return divide_by_uses(model, activations, super()._gradients(model, activations, error))


class NormalizesOneExample(Mutant, caught_by="several.normalize-more-than-one-example"):
    class Parallel(ReferenceParallel):
        def batch_norms(self, model):
            return []


class TrainsWithAnyStatistics(Mutant, caught_by="several.refuse-other-statistics"):
    class Backend(Backend):
        def learner(self, model, *, batch_norm=None, **options):
            return super().learner(model, **options)


class KnowsNoBatchNormalization(Mutant, caught_by="several.refuse-other-statistics"):
    class Parallel(ReferenceParallel):
        def batch_norms(self, model):
            return []


class ConfusesTheStatistics(Mutant, caught_by="several.refuse-other-statistics"):
    class Parallel(ReferenceParallel):
        def batch_norms(self, model):
            return [each._replace(statistics="global") for each in super().batch_norms(model)]


class LosesTheRunningMeansOfTheCopies(Mutant, caught_by="several.keep-running-statistics"):
    class ParallelLearner(NetworkParallelLearner):
        def mean_of(self, x):
            return xp.zeros_like(x[0, ...])


class DrawsEqualMasks(Mutant, caught_by="several.draw-own-masks"):
    class ParallelLearner(NetworkParallelLearner):
        def draw_mask(self, x):
            return self._framework.backend.rand(x.shape, device=x.device, seed=0)


class GivesEachGpuAllLists(Mutant, caught_by="several.split-sequences"):
    class ParallelLearner(NetworkParallelLearner):
        def step(self, inputs, y):
            if isinstance(y, dict):
                y = {**y, "weights": Broadcast(y["weights"])}
            return super().step(inputs, y)

        def _loss(self, prediction, y):
            if isinstance(y, dict):
                y = {**y, "weights": y["weights"][: len(y["images"])]}
            return super()._loss(prediction, y)


class LosesWhatWasLearned(Mutant, caught_by="several.hand-back-past-what-a-call-leaves"):
    class ParallelLearner(NetworkParallelLearner):
        def __init__(self, *operands):
            super().__init__(*operands)
            self.begun = super().sync()

        def sync(self):
            self.replace(self.begun)
            return super().sync()


class SharesLabelsForNone(Mutant, caught_by="several.leave-out-labels"):
    class ParallelLearner(ReferenceParallelLearner):
        def _weigh(self, shard):
            return shard.share


class LeavesTheModelOnTheLast(Mutant, caught_by="several.leave-the-model-on-the-first"):
    class ParallelLearner(ReferenceParallelLearner):
        def sync(self):
            components = super().sync()
            return {**components, "model": self._framework.backend.to(components["model"], "gpu:1")}


class ShowsTheModelOfTheBeginning(Mutant, caught_by="several.show-the-model-in-callbacks"):
    class ParallelLearner(ReferenceParallelLearner):
        seen = None

        def sync(self):
            components = super().sync()
            self.seen = self.seen or components["model"]
            return {**components, "model": self.seen}


class ForgetsTheOptimizerOfTheFile(Mutant, caught_by="several.resume-with-another-number"):
    class ParallelLearner(ReferenceParallelLearner):
        def replace(self, components):
            super().replace({**components, "optimizer": self.sync()["optimizer"]})


class AsksNobodyWhetherTwoStop(Mutant, caught_by="several.stop"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        team.Team.stops = lambda *_: False


class LosesWhatTwoHaveLearned(Mutant, caught_by="several.error-in-a-callback"):
    class ParallelLearner(ReferenceParallelLearner):
        def __init__(self, framework, model, settings, devices):
            super().__init__(framework, model, settings, devices)
            self.begun = super().sync()

        def sync(self):
            self.replace(self.begun)
            return super().sync()


class BeginsAnew(Mutant, caught_by="several.train-again"):
    class ParallelLearner(ReferenceParallelLearner):
        begun: ClassVar = []

        def __init__(self, framework, model, settings, devices):
            self.begun.append(model)
            super().__init__(framework, self.begun[0], settings, devices)


class EvaluatesBothParts(Mutant, caught_by="several.predict-and-validate"):
    class ParallelLearner(ReferenceParallelLearner):
        def evaluate(self, inputs, y):
            loss, prediction = super().evaluate(inputs, y)
            return loss * 2, prediction


# -- in several processes -------------------------------------------------------------------------


class TakesTheMeanOfTheProcesses(Mutant, caught_by="processes.learn-what-one-learns"):
    class GroupLearner(NetworkGroupLearner):
        def _find_factor(self, inputs, y):
            before = self._total if self.pending else 0.0
            super()._find_factor(inputs, y)
            self._total = before + 1.0
            return 1.0


class GivesEachProcessTheListOfTheFirst(Mutant, caught_by="processes.split-sequences"):
    class Parallel(ReferenceParallel):
        def join(self, group):
            shard = Whole.shard

            def shard_like_the_first(whole, number, size, **options):
                found, count = shard(whole, number, size, **options)
                if whole.has_sequences:
                    first, _ = shard(whole, 0, size, **options)
                    found["y"]["labels"] = first["y"]["labels"][:count] or [0]
                return found, count

            Whole.shard = shard_like_the_first


class LearnsNothingInProcesses(Mutant, caught_by="processes.change-the-parameters"):
    class GroupLearner(NetworkGroupLearner):
        def step(self, inputs, y):
            return self.evaluate(inputs, y)


class LearnsFromItsPartAlone(Mutant, caught_by="processes.end-with-the-same"):
    class GroupLearner(NetworkGroupLearner):
        def _take_mean(self, sums):
            return ReferenceLearner._take_mean(self, sums)


class KeepsItsOwnRunningMeans(Mutant, caught_by="processes.end-with-the-same"):
    class GroupLearner(NetworkGroupLearner):
        def mean_of(self, x):
            return KeepsMeans.mean_of(self, x)


class LosesTheRunningMeansOfTheProcesses(Mutant, caught_by="processes.keep-running-statistics"):
    class GroupLearner(NetworkGroupLearner):
        def mean_of(self, x):
            return xp.zeros_like(x[0, ...])


class AveragesTheRowsOfATokenInAProcess(Mutant, caught_by="processes.add-up-repeated-rows"):
    class GroupLearner(NetworkGroupLearner):
        def _gradients(self, model, activations, error):
            return divide_by_uses(model, activations, super()._gradients(model, activations, error))


class BeginsWithItsOwn(Mutant, caught_by="processes.begin-with-the-first"):
    class GroupLearner(NetworkGroupLearner):
        def __init__(self, framework, model, settings, group):
            super().__init__(framework, model, settings, group)
            self._model = model


class ReadsTheShardOfTheFirst(Mutant, caught_by="processes.read-their-part-only"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        sharded = ArrayLoader.shard
        ArrayLoader.shard = lambda loader, rank, size: sharded(loader, 0, size)


class ShufflesByItself(Mutant, caught_by="processes.shuffle-as-the-first"):
    class Parallel(ReferenceParallel):
        def join(self, group):
            ArrayLoader.load_state_dict = lambda loader, state: None


class ClipsEachShard(Mutant, caught_by="processes.clip-the-whole-gradient"):
    class GroupLearner(NetworkGroupLearner):
        def _gradients(self, model, activations, error):
            return super()._clip(super()._gradients(model, activations, error))

        def _clip(self, gradients):
            return gradients


class StepsWithEachBatchOfAll(Mutant, caught_by="processes.accumulate"):
    class GroupLearner(NetworkGroupLearner):
        def step(self, inputs, y):
            found = super().step(inputs, y)
            self.flush()
            return found


class LearnsFromWhatOnlyFills(Mutant, caught_by="processes.take-small-batches"):
    class GroupLearner(NetworkGroupLearner):
        def _find_factor(self, inputs, y):
            # The factor of a shard without examples is 0.
            return super()._find_factor(inputs, y) or 1.0


class CountsExamplesAndNotWeights(Mutant, caught_by="processes.weigh-the-whole-batch"):
    class GroupLearner(NetworkGroupLearner):
        def _loss(self, prediction, y):
            found = super()._loss(prediction, y)
            self.weight = None
            return found


class CountsExamplesAndNotLabels(Mutant, caught_by="processes.leave-out-labels"):
    class GroupLearner(NetworkGroupLearner):
        def _loss(self, prediction, y):
            found = super()._loss(prediction, y)
            self.weight = None
            return found


class CountsItsOwnLabelsAlone(Mutant, caught_by="processes.accumulate-by-weight"):
    class GroupLearner(NetworkGroupLearner):
        def _find_factor(self, inputs, y):
            if self.settings.accumulate_grad_batches > 1:
                self.weight = None
            return super()._find_factor(inputs, y)


class ForgetsTheOptimizerOfTheOthers(Mutant, caught_by="processes.resume-with-another-number"):
    class GroupLearner(NetworkGroupLearner):
        def replace(self, components):
            super().replace({**components, "optimizer": self.sync()["optimizer"]})


class StopsAlone(Mutant, caught_by="processes.stop-together"):
    class Parallel(ReferenceParallel):
        def join(self, group):
            team.ProcessGroup.stops = team.Team.stops


class LeavesAloneWithItsError(Mutant, caught_by="processes.leave-what-was-learned"):
    class Parallel(ReferenceParallel):
        def join(self, group):
            team.ProcessGroup.notify = team.Team.notify


class LetsProcessesShareAGpu(Mutant, caught_by="processes.say-who-shares-a-gpu"):
    class Backend(Backend):
        def learner(self, model, *, group=None, **options):
            return super().learner(model, **options)


class SaysNothingOfTheLost(Mutant, caught_by="processes.end-with-a-lost-one"):
    class GroupLearner(NetworkGroupLearner):
        def __init__(self, framework, model, settings, group):
            super().__init__(framework, model, settings, group)
            sys.excepthook = lambda *error: None


class SaysNotWhatTheLostWasWaitedFor(Mutant, caught_by="processes.end-with-a-lost-one"):
    class GroupLearner(NetworkGroupLearner):
        def __init__(self, framework, model, settings, group):
            super().__init__(framework, model, settings, group)
            sys.excepthook = lambda kind, error, traceback: print(
                f"{kind.__name__}: {str(error).partition('. Rank')[0]}", file=sys.stderr
            )


class SaysNothingWhileItBegins(Mutant, caught_by="processes.end-while-they-begin", is_nightly=True):
    class Parallel(ReferenceParallel):
        def join(self, group):
            sys.excepthook = lambda *error: None


class ForgetsWhatProcessesHaveLearned(Mutant, caught_by="processes.start-again", is_nightly=True):
    class GroupLearner(NetworkGroupLearner):
        def replace(self, components):
            pass


class LearnsFromItsMachineAlone(
    Mutant, caught_by="processes.train-on-two-machines", is_nightly=True
):
    class GroupLearner(NetworkGroupLearner):
        def _differentiate(self, model, inputs, y):
            _one, *others = {each.rpartition(":")[0] for each in self._group.addresses}
            cls = ReferenceLearner if others else ReferenceGroupLearner
            return cls._differentiate(self, model, inputs, y)


class SaysNothingOfWhatDiffers(Mutant, caught_by="processes.refuse-other-batches"):
    class GroupLearner(NetworkGroupLearner):
        def __init__(self, framework, model, settings, group):
            super().__init__(framework, model, settings, group)
            sys.excepthook = lambda *error: None
