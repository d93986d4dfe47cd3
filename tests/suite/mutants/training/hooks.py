"""Mutants with another Trainer: it ignores what the user gave it, or forgets where it was.

Its parts are replaced in this process, in which no other mutant runs.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceParallelLearner

from d2ldev import Backend, DeviceLog, EpochMetric, Trainer
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import CPU
from d2ldev.native import NativeDevices
from d2ldev.training import (
    callbacks,
    context,
    feed,
    hooks,
    learning,
    loops,
    metrics,
    run,
    running_metrics,
    team,
    trainer,
)
from d2ldev.training.interruption import END, Interruption
from mutants import Mutant
from mutants.provision import Frozen, NetworkLearner

# -- hooks ----------------------------------------------------------------------------------------


class Patched(dict):
    """The Trainer's hooks, as they are when somebody looks."""

    def __getitem__(self, name):
        return getattr(Trainer, name)


class ComparesHooksTooLate(Mutant, caught_by="hooks.patched-onto-the-class"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        hooks._HOOKS = Patched()


class HandsOutTheTrainerOfAll(Mutant, caught_by="hooks.of-the-books-handle"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        NativeDevices.Trainer = Trainer


class SetsItsModelOnlyItself(Mutant, caught_by="hooks.the-books-trainer"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        Trainer.model = Trainer.model.getter(Trainer.model.fget).setter(lambda *_: None)


class TakesNoneForABatch(Mutant, caught_by="hooks.that-return-none"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        feed.call_prepare_batch = lambda trainer, batch: (
            trainer.prepare_batch(batch) or type(trainer).prepare_batch(trainer, batch)
        )


class TellsTheDataAlone(Mutant, caught_by="fit.tells-epochs"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        loops.begin_epoch = lambda data, epoch: getattr(data, "set_epoch", id)(epoch)


# -- modules --------------------------------------------------------------------------------------


class ComparesItself(Mutant, caught_by="module.its-steps"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            loss, prediction = super().evaluate(inputs, y)
            return (loss, prediction) if self.settings.methods is None else (loss / 3.0, prediction)


class TakesALossForAModule(Mutant, caught_by="module.ignores-nothing"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        find = trainer.find_own_settings
        trainer.find_own_settings = lambda model, _loss, optimizer, _metrics, **options: find(
            model, None, optimizer, (), **options
        )


class ConfiguresWithoutATrainer(Mutant, caught_by="module.knows-its-trainer"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        find = trainer.find_own_settings
        trainer.find_own_settings = lambda *arguments, **_: find(*arguments, trainer=None)


class CountsNoBatches(Mutant, caught_by="module.counts-batches"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        Trainer.num_train_batches = property(lambda _: 0, lambda *_: None)


class TakesARateForAnOptimizer(Mutant, caught_by="module.has-its-learning-rate"):
    class Backend(Backend):
        def learner(self, model, *, lr=None, **options):
            is_named = isinstance(options.get("optimizer"), str)
            return super().learner(model, lr=lr if is_named else None, **options)


# -- callbacks ------------------------------------------------------------------------------------


class CallsTheFirst(Mutant, caught_by="callbacks.each-step"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        listeners = hooks.list_listeners
        hooks.list_listeners = lambda callbacks, hook: listeners(callbacks[:1], hook)


class ReadsLossesForCallbacks(Mutant, caught_by="callbacks.wait-for-nothing"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        listeners = hooks.list_listeners

        def read(callbacks, hook):
            to_numpy = self.backend.to_numpy
            found = listeners(callbacks, hook)
            return [lambda step, loss, f=f: f(step, to_numpy(loss)) for f in found]

        hooks.list_listeners = read


class TakesAnyCallback(Mutant, caught_by="callbacks.ignores-nothing"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        trainer.check_callbacks = lambda given: given if isinstance(given, list) else [given]


class AsksNobodyWhetherToStop(Mutant, caught_by="runs.stopped"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        team.Team.stops = team.Team.stops_after_epoch = lambda *_: False


class LeavesOutTheLastEpoch(Mutant, caught_by="runs.stopped"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        evaluate = loops.Loop.evaluate

        def evaluate_unless_stopped(loop, data):
            loop.interruption.is_pressed |= loop.trainer.should_stop
            return evaluate(loop, data)

        loops.Loop.evaluate = evaluate_unless_stopped


class RemembersTheStop(Mutant, caught_by="runs.stop-is-forgotten-by-the-next"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        trainer.find_result_path = lambda: "somewhere"
        run.Run.save_to = lambda *_: None


class SavesWhereItStops(Mutant, caught_by="runs.stopped-go-on"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        epochs = context.RunContext.epochs

        def yield_and_save(self):
            try:
                yield from epochs(self)
            finally:
                self.run.save(self.loop.trainer.device)

        context.RunContext.epochs = yield_and_save


class StopsBetweenBatchesOfAStep(Mutant, caught_by="runs.accumulated-before-a-stop"):
    class Learner(NetworkLearner):
        pending = property(lambda self: 0, lambda self, number: None)


class LosesTheModelWithAnError(Mutant, caught_by="runs.error-in-a-callback"):
    class Learner(NetworkLearner):
        def sync(self):
            model = self.framework.backend.mlp([2, 1], seed=0)
            self.replace({**super().sync(), "model": model})
            return super().sync()


class SwallowsStopIteration(Mutant, caught_by="runs.error-in-a-callback"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        notify = team.notify

        def swallow(*given):
            with suppress(StopIteration):
                notify(*given)

        team.notify = swallow


class IgnoresAnswers(Mutant, caught_by="callbacks.answers-are-refused"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        team.notify = lambda listeners, *given: [listener(*given) for listener in listeners]


class WaitsAnEpochMore(Mutant, caught_by="callbacks.early-stopping"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        count = callbacks.EarlyStopping.on_epoch_end

        def count_fewer(self, epoch, history):
            count(self, epoch, {name: column[:-1] for name, column in history.items()})

        callbacks.EarlyStopping.on_epoch_end = count_fewer


class CountsAnewWhenResumed(Mutant, caught_by="callbacks.early-stopping"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        count = callbacks.EarlyStopping.on_epoch_end

        def count_own(self, epoch, history):
            self.first = getattr(self, "first", epoch)
            count(self, epoch, {name: column[self.first :] for name, column in history.items()})

        callbacks.EarlyStopping.on_epoch_end = count_own


class LooksForTheNumberTooLate(Mutant, caught_by="callbacks.early-stopping-needs-its-number"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        trainer.check_monitors = lambda *_: None


class ForgetsCallbacks(Mutant, caught_by="callbacks.are-resumed"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        run.check_states = lambda *_: lambda: None


# -- runs -----------------------------------------------------------------------------------------


class IgnoresCtrlC(Mutant, caught_by="runs.interrupted"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        Interruption.press = lambda _: None


class WaitsForABatchThatMayNotCome(Mutant, caught_by="runs.interrupted-while-waiting"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)

        def draw(interruption, batches):
            return END if interruption.is_pressed else next(batches, END)

        Interruption.draw_next = draw


class ForgetsTheFirstSteps(Mutant, caught_by="runs.saved-every-n-steps"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        DeviceLog.load_state_dict = lambda *_: None


class SavesBeforeASharedStep(Mutant, caught_by="runs.saved-between-shared-steps"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        save_within = run.Run.save_within_epoch

        def saves_always(self, *arguments):
            pending, self._learner.pending = self._learner.pending, 0
            save_within(self, *arguments)
            self._learner.pending = pending

        run.Run.save_within_epoch = saves_always


class KeepsTheLast(Mutant, caught_by="runs.keep-the-best"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        run.Run._is_best = lambda _: True


class ForgetsTheBestEpochs(Mutant, caught_by="runs.resume-beside-the-best"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        resume = run.Run.resume

        def forget(self, *operands, **options):
            resume(self, *operands, **options)
            self._first_compared = self.epoch

        run.Run.resume = forget


class LogsTheUsualRate(Mutant, caught_by="fit.learning-rate-in-history"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        run.find_rate = lambda *_: 0.01


class SavesNothingSilently(Mutant, caught_by="runs.refuse-contradictions"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        run.Saving.check = lambda saving: saving


class ValidatesWithDropout(Mutant, caught_by="runs.validate"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            return super().evaluate(self.drop_some(inputs), y)


class SumsWhenItValidates(Mutant, caught_by="runs.validate-means"):
    class Learner(NetworkLearner):
        def evaluate(self, inputs, y):
            loss, prediction = super().evaluate(inputs, y)
            return loss * float(y.shape[0]), prediction


class ValidatesInsteadOfTheRun(Mutant, caught_by="runs.validate-besides"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        Trainer._keep_run = lambda *_: nullcontext()


class SaysThatItTrains(Mutant, caught_by="runs.errors-name-the-call"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        keep_run = Trainer._keep_run
        Trainer._keep_run = lambda trainer, _, model: keep_run(trainer, "train", model)


class PredictsOnTheCpu(Mutant, caught_by="runs.predict"):
    class Learner(NetworkLearner):
        def predict(self, inputs):
            return self.framework.backend.to(super().predict(inputs), CPU)


class PredictsWithDropout(Mutant, caught_by="runs.predict-in-use"):
    class Learner(NetworkLearner):
        def predict(self, inputs):
            return super().predict(self.drop_some(inputs))


class PredictsWithTheStatisticsOfTheBatch(Mutant, caught_by="runs.predict-in-use"):
    class Learner(NetworkLearner):
        def predict(self, inputs):
            (x,) = inputs
            return super().predict((x - xp.mean(x, axis=0, keepdims=True),))


class WantsParameters(Mutant, caught_by="runs.without-parameters"):
    class Learner(NetworkLearner):
        def __init__(self, tensors, model, settings):
            super().__init__(tensors, model, settings)
            if not model.layers:
                raise UnsupportedValueError("measure a model", "it has no parameters", "mlp([2])")


class WantsWhatItTrains(Mutant, caught_by="runs.measure-what-is-frozen"):
    class Learner(NetworkLearner):
        def __init__(self, tensors, model, settings):
            super().__init__(tensors, model, settings)
            if isinstance(model, Frozen):
                raise UnsupportedValueError("measure a model", "it is frozen", "thaw it")


class TrainsNothing(Mutant, caught_by="runs.nothing-to-train"):
    class Learner(NetworkLearner):
        def __init__(self, tensors, model, settings):
            super().__init__(
                tensors, model, settings if model.layers else settings._replace(optimizer=None)
            )
            vars(self).pop("step", None)  # it refuses without an optimizer

        def step(self, inputs, y):
            has_layers = self.sync()["model"].layers
            return super().step(inputs, y) if has_layers else self.evaluate(inputs, y)


class TakesAnyData(Mutant, caught_by="runs.refuse-what-is-none"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        trainer.check_data = lambda *_: None


class FixesNothing(Mutant, caught_by="errors.fix-works"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        trainer.check_batches = lambda *_: None


class NamesAnotherOptimizer(Mutant, caught_by="errors.fix-has-own-words"):
    class Learner(NetworkLearner):
        def __init__(self, framework, model, settings):
            if settings.optimizer == "rmsprop":
                raise UnsupportedValueError("train", "it is unknown", "optimizer='adagrad'")
            super().__init__(framework, model, settings)


class TakesClasses(Mutant, caught_by="errors.fix-makes-objects"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        learning.class_refusal = lambda *_: UnsupportedValueError("train", "a class", "loss='mse'")


class WantsATarget(Mutant, caught_by="fit.without-a-target"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        feed.takes_target = lambda _: True


# -- metrics --------------------------------------------------------------------------------------


class ResetsAtTheBeginningOnly(Mutant, caught_by="fit.keeps-running-values"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        begin = running_metrics.RunningMetrics.begin
        running_metrics.RunningMetrics.begin = lambda running: vars(running).setdefault(
            "begun", begin(running) if "begun" not in vars(running) else None
        )


class AveragesTheFunctionsOfBatches(Mutant, caught_by="fit.measures-whole-epochs"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        EpochMetric.compute = lambda metric: np.mean(
            [metric._compare(*batch) for batch in metric._batches]
        )


class NamesMetricsItself(Mutant, caught_by="fit.names-its-metrics"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        find = metrics.find_metrics
        trainer.find_metrics = lambda backend, given, loss=None: find(
            backend, [*given.values()] if isinstance(given, dict) else given, loss
        )


class UpdatesAnything(Mutant, caught_by="fit.refuses-other-metrics"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        running_metrics.update_call = lambda _metric, update: update


class MixesTheExamplesOfGpus(Mutant, caught_by="several.measure-whole-epochs"):
    class ParallelLearner(ReferenceParallelLearner):
        def step(self, inputs, y):
            loss, prediction = super().step(inputs, y)
            return loss, xp.flip(prediction, axis=0)


class MeasuresItsOwnPart(Mutant, caught_by="processes.measure-whole-epochs"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        team.ProcessGroup.gather_batches = team.Team.gather_batches
