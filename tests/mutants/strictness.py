"""Mutants whose ``strict()`` is not, or that train wrongly."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress

import array_api_strict as xp
from d2ldev_reference.mlp import MLP

from d2ldev import DeviceMismatchError
from d2ldev.device import CPU, gpu
from d2ldev.operations.strictness import mismatch
from mutants.base import Mutant


class Lenient(Mutant):
    """The reference backend, which refuses nothing by itself any more: moves, as TensorFlow."""

    def _refuse_mixing(self):
        return lambda: None


class IsNotStrict(Lenient, caught_by="strict.mixing-raises"):
    """Raises array-api-strict's own error, untranslated."""


class ComplainsAtTheEnd(Lenient, caught_by="strict.raises-at-the-operation"):
    def _mismatch(self, error):
        found = "two different devices" in str(error)
        return mismatch("add", [("x", CPU), ("y", gpu(0))]) if found else None


class HasNoNameForTheOperation(Mutant, caught_by="strict.names-the-operation"):
    @contextmanager
    def strict(self):
        with super().strict():
            try:
                yield
            except DeviceMismatchError as error:
                raise DeviceMismatchError(
                    "run something", error.problem, error.fix, error.devices
                ) from error


class NamesNoDevices(Mutant, caught_by="strict.names-the-devices"):
    @contextmanager
    def strict(self):
        with super().strict():
            try:
                yield
            except DeviceMismatchError as error:
                raise DeviceMismatchError(error.attempted, "devices differ", error.fix) from error


class RefusesNumbers(Mutant, caught_by="strict.scalars-on-other-devices"):
    def _refuse_mixing(self):
        return _replacing("__add__", _refuse_numbers, super()._refuse_mixing())


class MovesResults(Mutant, caught_by="strict.agreeing-operands"):
    def _refuse_mixing(self):
        def moved(add, x, y):
            return self.to(add(x, y), CPU)

        return _replacing("__add__", moved, super()._refuse_mixing())


class MakesNothingInABlock(Mutant, caught_by="strict.creation"):
    def _from_data(self, obj, dtype, native):
        _refuse_in(self)
        return super()._from_data(obj, dtype, native)


class MovesNothingInABlock(Mutant, caught_by="strict.moving-is-no-mixing"):
    def _copy(self, x, native):
        _refuse_in(self)
        return super()._copy(x, native)


class ModelsMoveTheirData(Mutant, caught_by="strict.models"):
    def mlp(self, sizes, *, activation="relu", device=None, seed=0):
        net = super().mlp(sizes, activation=activation, device=device, seed=seed)
        return Moving(net.layers, net.activation)


class Moving(MLP):
    """An MLP that brings its input to where it is."""

    def __call__(self, x):
        there = self.layers[0]["weight"].device
        return super().__call__(xp.asarray(x.to_device(there)))


class NeverEnds(Mutant, caught_by="strict.ends"):
    def _refuse_mixing(self):
        super()._refuse_mixing()
        return lambda: None

    @property
    def _strictness(self):
        return self.__dict__["_strictness"]

    @_strictness.setter
    def _strictness(self, value):
        value.in_force = lambda: True
        self.__dict__["_strictness"] = value


class EndsOnlyWithoutErrors(Mutant, caught_by="strict.ends-under-exceptions"):
    @contextmanager
    def strict(self):
        block = super().strict()
        block.__enter__()
        try:
            yield
        except DeviceMismatchError:
            block.__exit__(None, None, None)
            raise
        except BaseException:
            self._never_left = block
            raise
        block.__exit__(None, None, None)


class EndsWithTheInnerBlock(Mutant, caught_by="strict.nests"):
    @contextmanager
    def strict(self):
        with super().strict():
            try:
                yield
            finally:
                self._strictness._blocks.set(())


class TakesEveryErrorForItsOwn(Mutant, caught_by="strict.other-errors-stay"):
    def _mismatch(self, error):
        return mismatch("add", [("x", CPU), ("y", gpu(0))])


class SwallowsErrors(Mutant, caught_by="strict.other-errors-of-operations-stay"):
    @contextmanager
    def strict(self):
        with super().strict(), suppress(ValueError):
            yield


class IsStrictInEveryThread(Mutant, caught_by="strict.leaves-other-threads-alone"):
    @contextmanager
    def strict(self):
        was = self._strictness._everywhere
        self._strictness._everywhere = True
        try:
            with super().strict():
                yield
        finally:
            self._strictness._everywhere = was


class EndsWithTheFirstThread(Mutant, caught_by="strict.threads"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        end = self._strictness._end

        def end_all():
            self._strictness._count = 1
            end()

        self._strictness._end = end_all


class IsStrictInEveryTask(Mutant, caught_by="strict.tasks"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self._strictness.in_force = lambda: self._strictness._count > 0


class KeepsBlocksInAStack(Mutant, caught_by="strict.generators"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self._depths = []

    @contextmanager
    def strict(self):
        self._depths.append(None)
        self._strictness.in_force = lambda: bool(self._depths)
        block = super().strict()
        block.__enter__()
        try:
            yield
        finally:
            self._depths.clear()
            block.__exit__(None, None, None)


class LeavesAFunctionPatched(Mutant, caught_by="strict.leaves-nothing-patched"):
    def _refuse_mixing(self):
        restore = super()._refuse_mixing()

        def restore_most():
            restore()
            sine = xp.sin
            sys.modules["array_api_strict"].sin = lambda x: sine(x)

        return restore_most


class Taught(Mutant):
    """A mutant whose learner's step is replaced by ``taught(learner, step, inputs, y)``."""

    def _learner(self, model, settings):
        learner = super()._learner(model, settings)
        step = learner.step
        learner.step = lambda inputs, y: self.taught(learner, step, inputs, y)
        return learner


class TrainsOnTheCpu(Taught, caught_by="train.stays-on-the-device"):
    def taught(self, learner, step, inputs, y):
        learner.place(CPU)
        return step(self.to(inputs, CPU), self.to(y, CPU))


class LearnsNothing(Taught, caught_by="train.learns"):
    def taught(self, learner, step, inputs, y):
        return learner.evaluate(inputs, y)


class ForgetsMomentum(Mutant, caught_by="train.state-follows"):
    def place(self, obj, device):
        placed = super().place(obj, device)
        if isinstance(obj, dict) and "optimizer" in obj and placed is not obj:
            first = [{name: x * 0.0 for name, x in layer.items()} for layer in _moments(placed)]
            placed = {**placed, "optimizer": {**placed["optimizer"], "first": first}}
        return placed


class LeavesMomentumBehind(Mutant, caught_by="train.state-follows"):
    def place(self, obj, device):
        placed = super().place(obj, device)
        if isinstance(obj, dict) and "optimizer" in obj:
            placed = {**placed, "optimizer": obj["optimizer"]}
        return placed


class ComputesOtherBits(Taught, caught_by="train.same-bits"):
    def taught(self, learner, step, inputs, y):
        (x,) = inputs
        return step((x * (1.0 if self.device_of(x) is CPU else 1.000001),), y)


class HasOneGpu(Mutant, caught_by="chapter.y-on-the-second-gpu"):
    def try_gpu(self, i=0):
        return super().try_gpu(0)


class AddsOnTheFirstGpu(Mutant, caught_by="chapter.y-plus-z-stays"):
    def _refuse_mixing(self):
        def on_the_first(add, x, y):
            return self.to(add(x, y), gpu(0))

        return _replacing("__add__", on_the_first, super()._refuse_mixing())


def _moments(parts):
    return parts["optimizer"]["first"]


def _replacing(name, function, restore):
    """Replace a method of the array's by one that is given the method that was there."""
    array = type(xp.zeros(0))
    was = vars(array)[name]
    setattr(array, name, lambda x, y: function(was, x, y))

    def put_back():
        setattr(array, name, was)
        restore()

    return put_back


def _refuse_numbers(add, x, y):
    if not isinstance(y, type(x)):
        raise mismatch("add", [("x", CPU), ("y", gpu(0))])
    return add(x, y)


def _refuse_in(backend):
    if backend._strictness.in_force():
        raise mismatch("copy", [("x", CPU), ("y", gpu(0))])
