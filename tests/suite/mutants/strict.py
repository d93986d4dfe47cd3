"""Mutants whose ``strict()`` is not."""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import contextmanager, suppress

import array_api_strict as xp
from reference_backend import MLP, ReferenceModels, ReferenceStrict, ReferenceTensors

from d2ldev import Backend, DeviceMismatchError, gpu
from d2ldev.contract import Strictness
from d2ldev.framework import CPU, mismatch
from d2ldev.scopes import every_scopes
from mutants import Mutant, OneByOne

ARRAY = type(xp.zeros(0))


class Lenient(ReferenceStrict):
    """Refuses nothing."""

    def refuse_mixing(self, in_force):
        return lambda: None


class IsNotStrict(
    Mutant,
    caught_by=(
        "strict.mixing-raises",
        "chapter.x-plus-y-raises",
        "train.data-from-elsewhere-raises",
        "train.targets-from-elsewhere-raise",
    ),
):
    """Raises array-api-strict's own error, untranslated."""

    Strict = Lenient


class Wrapping(ReferenceStrict):
    """Looks at the operands that ``choose(name, args)`` returns."""

    def _wrap(self, name, function, in_force):
        @functools.wraps(function)
        def run(*args, **options):
            is_seen = len(self.choose(name, args)) > 1
            return (strict if is_seen else function)(*args, **options)

        strict = super()._wrap(name, function, in_force)
        return run


class LooksIntoNoList(Mutant, caught_by="strict.operands-in-a-list"):
    class Strict(Wrapping):
        def choose(self, name, args):
            return [x for x in args if isinstance(x, ARRAY)]


class LooksAtNoIndex(Mutant, caught_by="strict.indices-are-operands"):
    class Strict(Wrapping):
        def choose(self, name, args):
            return args[:1] if "item" in name else args


class RefusesIndices(Mutant, caught_by="strict.indices-are-operands"):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            def refuse(getitem, x, index):
                if in_force() and isinstance(index, ARRAY):
                    raise mismatch("getitem", [(0, CPU), (1, CPU)])
                return getitem(x, index)

            return _replace_method("__getitem__", refuse, super().refuse_mixing(in_force))


class MovesIndices(Mutant, caught_by="strict.indices-are-operands"):
    """Brings each index to its tensor, in silence, as it may with one of the CPU."""

    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            def move(getitem, x, index):
                keys = index if isinstance(index, tuple) else (index,)
                there = [i.to_device(x.device) if isinstance(i, ARRAY) else i for i in keys]
                return getitem(x, tuple(there))

            return _replace_method("__getitem__", move, super().refuse_mixing(in_force))


class LetsGoOfWhatIsThere(Mutant, caught_by="strict.keeps-what-was-moved"):
    """Lets a tensor follow the others that ``to`` gave back as it was."""

    class Backend(Backend):
        def to(self, x, device):
            moved = super().to(x, device)
            self._framework.strict.is_let_go = moved is x
            return moved

    class Strict(ReferenceStrict):
        is_let_go = False

        def refuse_mixing(self, in_force):
            return super().refuse_mixing(lambda: in_force() and not self.is_let_go)


class ChangesWhatItRefuses(Mutant, caught_by="strict.refused-in-place"):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            def change(add, x, y):
                try:
                    return add(x, y)
                except DeviceMismatchError:
                    x[...] = 0.0
                    raise

            return _replace_method("__iadd__", change, super().refuse_mixing(in_force))


class ComplainsAtTheEnd(Mutant, caught_by="strict.raises-at-the-operation"):
    Strict = Lenient

    class Backend(Backend):
        @contextmanager
        def strict(self):
            with super().strict():
                try:
                    yield
                except ValueError as error:  # array-api-strict's own
                    raise mismatch("add", [("x", CPU), ("y", gpu(0))]) from error


class Rewording(Backend):
    """Raises ``reword(error)`` for the error about operands that mix."""

    @contextmanager
    def strict(self):
        with super().strict():
            try:
                yield
            except DeviceMismatchError as error:
                raise self.reword(error) from error


class HasNoNameForTheOperation(Mutant, caught_by="strict.names-the-operation"):
    class Backend(Rewording):
        def reword(self, error):
            return DeviceMismatchError("run something", error.problem, error.fix, error.devices)


class NamesEveryOperation(Mutant, caught_by="strict.names-the-operation"):
    class Backend(Rewording):
        def reword(self, error):
            return DeviceMismatchError(
                "run add, mm or dot", error.problem, error.fix, error.devices
            )


class NamesNoDevices(Mutant, caught_by="strict.names-the-devices"):
    class Backend(Rewording):
        def reword(self, error):
            return DeviceMismatchError(error.attempted, "devices differ", error.fix)


class NamesNoExpression(Mutant, caught_by="strict.names-operands-of-the-program"):
    class Backend(Rewording):
        def reword(self, error):
            fix = f"x = backend.to(x, '{error.devices[0]}'), where x is operand 2"
            return DeviceMismatchError(error.attempted, error.problem, fix, error.devices)


class NamesUnknownOperands(Mutant, caught_by="strict.names-no-unknown-operands"):
    class Backend(Rewording):
        def reword(self, error):
            problem = error.problem.replace("operand 2", "kernel + 1")
            return DeviceMismatchError(error.attempted, problem, error.fix, error.devices)


class RefusesNumbers(Mutant, caught_by="strict.scalars-on-other-devices"):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            return _replace_method("__add__", _refuse_numbers, super().refuse_mixing(in_force))


class MovesResults(Mutant, caught_by="strict.agreeing-operands"):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            def move(add, x, y):
                return self.framework.backend.to(add(x, y), CPU)

            return _replace_method("__add__", move, super().refuse_mixing(in_force))


class MakesNothingInABlock(Mutant, caught_by="strict.creation"):
    class Tensors(ReferenceTensors):
        def from_data(self, obj, dtype, native):
            _refuse_in(self.framework)
            return super().from_data(obj, dtype, native)


class MovesNothingInABlock(
    Mutant, caught_by=("strict.moving-is-no-mixing", "chapter.net-moves-to-the-other-gpu")
):
    class Tensors(OneByOne):
        def copy(self, x, native):
            _refuse_in(self.framework)
            return super().copy(x, native)


class ModelsMoveTheirData(
    Mutant, caught_by=("strict.models", "chapter.net-with-data-from-the-other-gpu")
):
    class Models(ReferenceModels):
        def mlp(self, layers, activation):
            net = super().mlp(layers, activation)
            return Moving(net.layers, net.activation)


class Moving(MLP):
    """An MLP that brings its input to where it is."""

    def __call__(self, x):
        there = self.layers[0]["weight"].device
        return super().__call__(xp.asarray(x._array, dtype=x.dtype, device=there, copy=True))


class NeverEnds(Mutant, caught_by="strict.ends"):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            super().refuse_mixing(lambda: True)
            return lambda: None


class EndsOnlyWithoutErrors(Mutant, caught_by="strict.ends-under-exceptions"):
    class Backend(Backend):
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
    class Strictness(Strictness):
        @contextmanager
        def block(self):
            with super().block():
                try:
                    yield
                finally:
                    for scopes in every_scopes:
                        for entry in scopes.entries():
                            scopes.leave(entry)


class TakesEveryErrorForItsOwn(Mutant, caught_by="strict.other-errors-stay"):
    class Backend(Backend):
        @contextmanager
        def strict(self):
            with super().strict():
                try:
                    yield
                except Exception as error:
                    raise mismatch("add", [("x", CPU), ("y", gpu(0))]) from error


class SwallowsErrors(Mutant, caught_by="strict.other-errors-of-operations-stay"):
    class Backend(Backend):
        @contextmanager
        def strict(self):
            with super().strict(), suppress(ValueError):
                yield


class Counting(Strictness):
    """Knows how many blocks there are, and not whose they are."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.counts = self.new_counts()
        self.counts.blocks = 0

    @staticmethod
    def new_counts():
        return Counts()

    @contextmanager
    def block(self):
        self.counts.blocks = self.blocks() + 1
        try:
            with super().block():
                yield
        finally:
            self.counts.blocks -= 1

    def blocks(self):
        return getattr(self.counts, "blocks", 0)

    def in_force(self):
        return self.blocks() > 0


class Counts:
    """Counts of all threads together."""


class IsStrictInEveryThread(Mutant, caught_by="strict.leaves-other-threads-alone"):
    Strictness = Counting


class IsStrictInEveryTask(Mutant, caught_by="strict.tasks"):
    class Strictness(Counting):
        new_counts = threading.local


class EndsWithTheFirstThread(Mutant, caught_by="strict.threads"):
    class Strictness(Strictness):
        def _leave(self, block):
            self._open.clear()
            super()._leave(block)


class KeepsBlocksInAStack(Mutant, caught_by="strict.generators"):
    class Strictness(Counting):
        @contextmanager
        def block(self):
            with super().block():
                try:
                    yield
                finally:
                    self.counts.blocks = 1  # and 0 afterwards


class LeavesAFunctionPatched(Mutant, caught_by="strict.leaves-nothing-patched"):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            restore = super().refuse_mixing(in_force)

            def restore_most():
                restore()
                sine = xp.sin
                sys.modules["array_api_strict"].sin = lambda x: sine(x)

            return restore_most


class AddsOnTheFirstGpu(Mutant, caught_by=("chapter.y-plus-z-stays", "chapter.net-on-each-gpu")):
    class Strict(ReferenceStrict):
        def refuse_mixing(self, in_force):
            def on_the_first(add, x, y):
                return self.framework.backend.to(add(x, y), gpu(0))

            return _replace_method("__add__", on_the_first, super().refuse_mixing(in_force))


class HasOneGpu(Mutant, caught_by="chapter.y-on-the-second-gpu"):
    class Backend(Backend):
        def try_gpu(self, i=0):
            return super().try_gpu(0)


def _replace_method(name, function, restore):
    """Replace a method of the array's by one that is given the method that was there."""
    was = vars(ARRAY)[name]
    setattr(ARRAY, name, lambda x, y: function(was, x, y))

    def put_back():
        setattr(ARRAY, name, was)
        restore()

    return put_back


def _refuse_numbers(add, x, y):
    if not isinstance(y, type(x)):
        raise mismatch("add", [("x", CPU), ("y", gpu(0))])
    return add(x, y)


def _refuse_in(framework):
    if framework.state.strictness.in_force():
        raise mismatch("copy", [("x", CPU), ("y", gpu(0))])
