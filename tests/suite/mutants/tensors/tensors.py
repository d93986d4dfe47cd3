"""Mutants that make tensors wrongly."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceDevices, ReferenceTensors

from d2ldev import Backend, UnsupportedValueError, gpu
from d2ldev.framework import CPU
from mutants import Mutant, OneByOne, is_tensor

ARRAY = type(xp.zeros(0))


class Redirected(Backend):
    """A backend whose new tensors are made somewhere else than the user says."""

    def redirect(self, device, like):
        """Return another ``device`` and ``like``."""
        raise NotImplementedError


def _redirect(name):
    def make(self, *args, device=None, like=None, **options):
        if not is_tensor(self, args[0]):
            device, like = self.redirect(device, like)
        return getattr(super(Redirected, self), name)(*args, device=device, like=like, **options)

    return make


for _name in ("asarray", "zeros", "ones", "full", "empty", "arange", "rand", "randn"):
    setattr(Redirected, _name, _redirect(_name))


class MakesTensorsOnTheCpuInstead(Mutant, caught_by="create.on-a-missing-device"):
    class Backend(Redirected):
        def redirect(self, device, like):
            exists = device is None or self.device(device) in self.devices()
            return device if exists else CPU, like


class MakesTensorsElsewhere(Mutant, caught_by="create.without-a-copy"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            cpu = self.framework.devices.native(CPU)
            return self.transfer([super().full(shape, value, dtype, cpu)], native, copy=True)[0]


class IgnoresTheDevice(Mutant, caught_by="create.on-the-device"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            cpu = self.framework.devices.native(CPU)
            return super().random(distribution, shape, seed, dtype, cpu)


class IgnoresTheScope(
    Mutant,
    caught_by=(
        "create.in-a-scope",
        "create.device-as-a-context",
        "create.scopes-nest",
        "threads.scopes-of-generators",
    ),
):
    class Backend(Redirected):
        def redirect(self, device, like):
            return CPU if device is None and like is None else device, like


class LetsTheScopeWin(Mutant, caught_by="create.a-device-beats-the-scope"):
    class Backend(Redirected):
        def redirect(self, device, like):
            return self._framework.here or device, like


class NeverLeavesTheScope(Mutant, caught_by=("create.scopes-end", "threads.scopes-of-tasks")):
    class Backend(Backend):
        @contextlib.contextmanager
        def on(self, device):
            self.kept = super().on(device)  # which would end with its last reference
            yield self.kept.__enter__()
            self.kept.__exit__(None, None, None)  # not under an exception


class DefaultsToTheFirstGpu(Mutant, caught_by="create.default-is-the-cpu"):
    class Backend(Redirected):
        def redirect(self, device, like):
            if device is None and like is None:
                device = self._framework.here or self.try_gpu()
            return device, like


class IgnoresLike(Mutant, caught_by="create.like-gives-device-and-dtype"):
    class Backend(Redirected):
        def redirect(self, device, like):
            return device, None


class LetsTheScopeBeatLike(Mutant, caught_by="create.like-beats-the-scope"):
    class Backend(Redirected):
        def redirect(self, device, like):
            return device if like is None else self._framework.here or device, like


class MakesDoubles(
    Mutant, caught_by=("create.default-dtype", "create.zeros-and-ones", "create.full")
):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            return super().full(shape, value, dtype or xp.float64, native)


class IgnoresTheDtype(Mutant, caught_by="create.every-dtype"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            return super().full(shape, value, xp.float32, native)


class TakesUnknownDtypes(Mutant, caught_by="create.unknown-dtype"):
    class Tensors(ReferenceTensors):
        def dtype(self, name):
            return getattr(xp, name, xp.float32)

        @property
        def dtype_names(self):
            return Everything(ReferenceTensors.dtype_names)


class Everything(tuple):
    """A tuple that says that everything is in it."""

    def __contains__(self, x):
        return True


class IgnoresTheSeed(Mutant, caught_by="create.seeds-repeat"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            return super().random(distribution, shape, None, dtype, native)


class AlwaysHasASeed(Mutant, caught_by="create.seeds-differ"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            return super().random(distribution, shape, seed or 0, dtype, native)


class DrawsNegativeNumbers(Mutant, caught_by="create.rand-is-uniform"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            return 2 * super().random(distribution, shape, seed, dtype, native) - 1


class RoundsUpToOne(Mutant, caught_by="create.rand-is-uniform"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            drawn = super().random(distribution, shape, seed, dtype, native)
            return xp.round(drawn * 1024) / 1024


class DrawsUniformForNormal(Mutant, caught_by="create.randn-is-normal"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            return super().random("uniform", shape, seed, dtype, native)


class CountsToTheEnd(Mutant, caught_by="create.arange"):
    class Tensors(ReferenceTensors):
        def arange(self, start, stop, step, dtype, native):
            return super().arange(start, stop + step, step, dtype, native)


class AliasesNumpy(Mutant, caught_by="create.never-aliases-numpy"):
    class Tensors(ReferenceTensors):
        def from_data(self, obj, dtype, native):
            if isinstance(obj, np.ndarray) and obj.ctypes.data % 64 == 0 and dtype is None:
                return xp.asarray(obj, dtype=getattr(xp, obj.dtype.name), device=native, copy=False)
            return super().from_data(obj, dtype, native)


class LosesSpecialValues(Mutant, caught_by="create.special-values"):
    class Tensors(ReferenceTensors):
        def from_data(self, obj, dtype, native):
            if isinstance(obj, np.ndarray) and obj.dtype.kind == "f":
                obj = np.nan_to_num(obj)
            return super().from_data(obj, dtype, native)


class TakesObjects(Mutant, caught_by="create.refuses-objects"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            try:
                return super().asarray(obj, **options)
            except TypeError:
                return super().asarray(np.zeros(1, np.float32))


class CopiesWhatIsThere(Mutant, caught_by="create.a-tensor-comes-back"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            made = super().asarray(obj, **options)
            return self.copy(made) if is_tensor(self, obj) else made


class MovesTensorsIntoTheScope(Mutant, caught_by="create.a-tensor-stays-in-a-scope"):
    class Backend(Backend):
        def asarray(self, obj, *, device=None, **options):
            if is_tensor(self, obj):
                device = device or self._framework.here
            return super().asarray(obj, device=device, **options)


class LetsMemoryErrorsThrough(
    Mutant, caught_by=("create.out-of-memory", "copy.out-of-memory-leaves-the-source")
):
    class Devices(ReferenceDevices):
        def is_out_of_memory(self, error):
            return False


class PromisesMoreNumbersThanFit(Mutant, caught_by="create.out-of-memory"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            fits = math.prod(shape) < 2**40
            return super().random(distribution, shape if fits else (1,), seed, dtype, native)


class LendsItsMemoryToNumpy(Mutant, caught_by="query.to-numpy-is-owned"):
    class Tensors(ReferenceTensors):
        def to_numpy(self, x):
            return np.from_dlpack(x)


class CopiesThroughDlpack(Mutant, caught_by="query.dlpack-shares-numpy-memory"):
    class Tensors(OneByOne):
        def from_dlpack(self, x):
            shared = super().from_dlpack(x)
            return self.copy(shared, shared.device)


class LeavesTheDeviceThroughDlpack(Mutant, caught_by="query.dlpack-stays-on-the-device"):
    class Tensors(ReferenceTensors):
        def from_dlpack(self, x):
            return xp.from_dlpack(x)


class StaysInPlaceThroughDlpack(Mutant, caught_by="query.dlpack-to-a-device"):
    class Backend(Backend):
        def from_dlpack(self, x, /, *, device=None, copy=None):
            return super().from_dlpack(x, copy=copy)


class NeverCopiesThroughDlpack(Mutant, caught_by="query.dlpack-copies"):
    class Backend(Backend):
        def from_dlpack(self, x, /, *, device=None, copy=None):
            return super().from_dlpack(x, device=device, copy=None)


class OnlySharesThroughDlpack(Mutant, caught_by="query.dlpack-copies-what-it-cannot-share"):
    class Backend(Backend):
        def from_dlpack(self, x, /, *, device=None, copy=None):
            if isinstance(x, np.ndarray) and not x.flags.writeable:
                raise UnsupportedValueError("take over memory", "it is read-only", "copy it")
            return super().from_dlpack(x, device=device, copy=copy)


class CopiesThoughItMayNot(Mutant, caught_by="query.dlpack-without-a-copy"):
    class Backend(Backend):
        def from_dlpack(self, x, /, *, device=None, copy=None):
            return super().from_dlpack(x, device=device, copy=copy or None)


class IgnoresTheDtypeOfEmpty(Mutant, caught_by="create.empty"):
    class Tensors(ReferenceTensors):
        def empty(self, shape, dtype, native):
            return super().empty(shape, None, native)


class MakesTheLikeOnTheDefaultDevice(Mutant, caught_by="create.like-another-tensor"):
    class Backend(Backend):
        def empty_like(self, x, /, *, dtype=None, device=None):
            return self.empty(x.shape, dtype=dtype or self.dtype_of(x), device=device)


class LeavesTheValuesOfTheLike(Mutant, caught_by="create.like-another-tensor-has-its-values"):
    class Backend(Backend):
        def full_like(self, x, /, fill_value, *, dtype=None, device=None):
            return super().full_like(x, 0, dtype=dtype, device=device)


class HoldsToTheTensor(Mutant, caught_by="create.like-another-tensor-is-only-a-default"):
    class Backend(Backend):
        def ones_like(self, x, /, *, dtype=None, device=None):
            return super().ones_like(x, device=device)


class MakesTensorsLikeAnything(Mutant, caught_by="create.like-another-tensor-needs-one"):
    class Backend(Backend):
        def zeros_like(self, x, /, *, dtype=None, device=None):
            return super().zeros_like(self.asarray(x), dtype=dtype, device=device)


class TruncatesSeeds(Mutant, caught_by="create.seeds-are-taken-whole"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            seed = None if seed is None else seed % 2**16
            return super().random(distribution, shape, seed, dtype, native)


class TakesTheRemainderOfASeed(Mutant, caught_by="create.seeds-are-taken-whole"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            seed = None if seed is None else seed % 1000
            return super().random(distribution, shape, seed, dtype, native)


class MakesTensorsWithoutElementsOnTheCpu(Mutant, caught_by="create.empty-on-the-device"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            is_empty = 0 in shape and native == self.framework.devices.native(gpu(1))
            native = self.framework.devices.native(CPU) if is_empty else native
            return super().full(shape, value, dtype, native)


class SeedsTheWholeProcess(Mutant, caught_by="create.seeds-leave-the-random-state"):
    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            if seed is not None:
                np.random.seed(seed)
            return super().random(distribution, shape, None, dtype, native)


class CountsInTwoDtypesOnly(Mutant, caught_by="create.arange-of-every-dtype"):
    class Tensors(ReferenceTensors):
        def arange(self, start, stop, step, dtype, native):
            if dtype not in (xp.int32, xp.float32):
                raise NotImplementedError(f"arange of {dtype}")
            return super().arange(start, stop, step, dtype, native)


class CountsLargeNumbersInFloats(Mutant, caught_by="create.large-ranges"):
    class Backend(Backend):
        def arange(self, start, stop=None, step=1, *, dtype=None, device=None, like=None):
            if stop is None or not start + stop > 2**53:
                return super().arange(start, stop, step, dtype=dtype, device=device, like=like)
            return self.asarray(np.arange(start, stop, step, dtype), device=device)


class CountsInWholeNumbers(Mutant, caught_by="create.arange-of-fractions"):
    class Tensors(ReferenceTensors):
        def arange(self, start, stop, step, dtype, native):
            if any(isinstance(number, float) for number in (start, stop, step)):
                dtype = dtype or xp.float32
            return super().arange(int(start), int(stop), int(step) or 1, dtype, native)


class FillsWithFloats(
    Mutant, caught_by=("create.integers-stay-integers", "create.from-numpy-scalars")
):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            dtype = xp.float32 if type(value) is int else dtype
            return super().full(shape, value, dtype, native)


class FillsThroughFloats(Mutant, caught_by="create.integers-are-exact"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            value = int(np.float32(value)) if type(value) is int else value
            return super().full(shape, value, dtype, native)


class HasFewDtypes(Mutant, caught_by="create.has-dtypes"):
    class Tensors(ReferenceTensors):
        dtype_names = ("float32", "float64", "int16", "int64")


class ReadsPartsAsWholes(Mutant, caught_by="query.to-numpy-of-parts"):
    class Tensors(ReferenceTensors):
        def to_numpy(self, x):
            part = np.from_dlpack(x)
            if part.flags.c_contiguous:
                return np.array(part)
            start = np.lib.stride_tricks.as_strided(part, (part.size,), (part.itemsize,))
            return np.array(start).reshape(part.shape)


class HidesTheCause(Mutant, caught_by="errors.keep-the-cause"):
    class Backend(Backend):
        def full(self, shape, fill_value, **options):
            try:
                return super().full(shape, fill_value, **options)
            except UnsupportedValueError as error:
                raise UnsupportedValueError(error.attempted, error.problem, error.fix) from None


class NamesAnyDtype(Mutant, caught_by="query.dtype-and-address-of-no-tensor"):
    class Backend(Backend):
        def dtype_of(self, x):
            return str(getattr(x, "dtype", "float32")).removeprefix("array_api_strict.")


class CountsInInt32(Mutant, caught_by="create.default-integer-dtype"):
    class Tensors(ReferenceTensors):
        def arange(self, start, stop, step, dtype, native):
            return super().arange(start, stop, step, xp.int32, native)


class FillsWithComplex128(Mutant, caught_by="create.default-complex-dtype"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            wide = xp.complex128 if isinstance(value, complex) else dtype
            return super().full(shape, value, wide, native)


class LosesTheDtypeOfEmptyRanges(Mutant, caught_by="create.empty-ranges"):
    class Tensors(ReferenceTensors):
        def arange(self, start, stop, step, dtype, native):
            dtype = xp.int64 if start == stop else dtype
            return super().arange(start, stop, step, dtype, native)


class TakesIntegersModulo(Mutant, caught_by="create.integers-that-do-not-fit"):
    class Backend(Backend):
        def full(self, shape, fill_value, **options):
            return super().full(shape, fill_value % 2**31, **options)


class CutsValuesOff(Mutant, caught_by="create.values-that-do-not-fit"):
    class Backend(Backend):
        def full(self, shape, fill_value, *, dtype=None, like=None, **options):
            if like is not None and isinstance(fill_value, float):
                return self.asarray(super().full(shape, fill_value), like=like)
            return super().full(shape, fill_value, dtype=dtype, like=like, **options)


class CutsArraysOff(Mutant, caught_by="create.arrays-that-do-not-fit"):
    class Backend(Backend):
        def asarray(self, obj, *, dtype=None, **options):
            obj = obj.astype(dtype) if dtype and isinstance(obj, np.ndarray) else obj
            return super().asarray(obj, dtype=dtype, **options)


class CutsRangesOff(Mutant, caught_by="create.ranges-that-do-not-fit"):
    class Backend(Backend):
        def arange(self, *numbers, dtype=None, device=None, like=None):
            made = super().arange(*numbers, dtype=dtype, device=device)
            return made if like is None else self.asarray(made, like=like)


class TakesNoFloatsForIntegers(Mutant, caught_by="create.values-that-fit"):
    class Backend(Backend):
        def full(self, shape, fill_value, **options):
            made = super().full(shape, fill_value, **options)
            if isinstance(fill_value, float) and not self.dtype_of(made).startswith("float"):
                raise UnsupportedValueError("make a tensor", "it is a float", "an integer")
            return made


class RoundsLargeIntegers(Mutant, caught_by="create.large-integers"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            return super().asarray(np.asarray(obj) if isinstance(obj, list) else obj, **options)


class TakesNoHugeIntegers(Mutant, caught_by="create.huge-integers-as-floats"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            if isinstance(value, int) or value > 2**63:
                raise OverflowError("int too big to convert")
            return super().full(shape, value, dtype, native)


class TakesOnlyNamesOfDtypes(
    Mutant, caught_by=("create.dtype-of-a-tensor", "create.native-dtype", "create.numpy-dtype")
):
    class Backend(Backend):
        def zeros(self, shape, *, dtype=None, **options):
            return super().zeros(shape, dtype=dtype and str(dtype), **options)


class CopiesOnlyWhereItHasTo(Mutant, caught_by="create.copy-is-new-memory"):
    class Backend(Backend):
        def asarray(self, obj, *, copy=None, **options):
            return super().asarray(obj, copy=None if copy else copy, **options)


class CopiesThoughToldNotTo(Mutant, caught_by="create.no-copy"):
    class Backend(Backend):
        def asarray(self, obj, *, copy=None, **options):
            return super().asarray(obj, copy=copy or None, **options)


# -- global seeds ---------------------------------------------------------------------------------


class SeedsNothing(Mutant, caught_by="create.seeds-everything"):
    class Tensors(ReferenceTensors):
        def seed(self, seed):
            pass


class SeedsItsOwnThreadAlone(Mutant, caught_by="create.seeds-every-thread"):
    class Tensors(ReferenceTensors):
        own = threading.local()

        def seed(self, seed):
            self.own.numbers = np.random.RandomState(seed)

        def random(self, distribution, shape, seed, dtype, native):
            if seed is None:
                numbers = vars(self.own).setdefault("numbers", np.random.RandomState())
                seed = numbers.randint(2**31)
            return super().random(distribution, shape, seed, dtype, native)


class SeedsThreadsThatHaveDrawn(Mutant, caught_by="create.seeds-every-thread"):
    """Seeds the random state of each thread that has one; that of a later thread is random."""

    class Tensors(ReferenceTensors):
        own = threading.local()
        known = ()

        def seed(self, seed):
            self._find_own()
            for each in self.known:
                each.seed(seed)

        def random(self, distribution, shape, seed, dtype, native):
            if seed is None:
                seed = self._find_own().randint(2**31)
            return super().random(distribution, shape, seed, dtype, native)

        def _find_own(self):
            if not hasattr(self.own, "numbers"):
                self.own.numbers = np.random.RandomState()
                self.known = (*self.known, self.own.numbers)
            return self.own.numbers


class TakesAnySeed(Mutant, caught_by="create.bad-global-seeds"):
    class Backend(Backend):
        def seed(self, seed):
            self._framework.tensors.seed(abs(hash(seed)) % 2**32)


# -- arguments and data ---------------------------------------------------------------------------


class HashesSeeds(Mutant, caught_by="create.bad-seeds"):
    class Backend(Backend):
        def rand(self, shape, *, seed=None, **options):
            seed = hash(seed) % 2**32 if isinstance(seed, str) else seed
            return super().rand(shape, seed=seed, **options)


class TakesAnyShape(Mutant, caught_by="create.bad-shapes"):
    class Backend(Backend):
        def zeros(self, shape, **options):
            try:
                return super().zeros(shape, **options)
            except UnsupportedValueError:
                return super().zeros((), **options)


class ReversesShapes(Mutant, caught_by="create.shapes"):
    class Tensors(ReferenceTensors):
        def full(self, shape, value, dtype, native):
            return super().full(shape[::-1], value, dtype, native)


class ReadsMemoryInItsOrder(Mutant, caught_by="create.numpy-layouts"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            if isinstance(obj, np.ndarray) and obj.base is not None:
                obj = obj.base.ravel()[: obj.size].reshape(obj.shape)
            return super().asarray(obj, **options)


class TransposesArrays(Mutant, caught_by="create.from-numpy"):
    class Tensors(ReferenceTensors):
        def from_data(self, obj, dtype, native):
            if isinstance(obj, np.ndarray):
                obj = obj.ravel(order="F").reshape(obj.shape)
            return super().from_data(obj, dtype, native)


class DrawsInAnyDtype(Mutant, caught_by="create.random-integers"):
    class Backend(Backend):
        def randn(self, shape, *, dtype=None, **options):
            return self.asarray(self.to_numpy(super().randn(shape, **options)) > 0, dtype=dtype)


class UsesTheCpuForAMissingScope(Mutant, caught_by="create.scope-on-a-missing-device"):
    class Backend(Backend):
        def on(self, device):
            exists = self.device(device) in self.devices()
            return super().on(device if exists else CPU)


class NarrowsDoublesOfNumpy(Mutant, caught_by="create.wide-numpy-data"):
    class Backend(Backend):
        def asarray(self, obj, *, dtype=None, **options):
            is_wide = isinstance(obj, np.ndarray) and obj.dtype == np.float64
            return super().asarray(obj, dtype=dtype or ("float32" if is_wide else None), **options)


class PadsRows(Mutant, caught_by="create.refuses-ragged-lists"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            if isinstance(obj, list) and all(isinstance(row, list) for row in obj):
                obj = [*zip(*itertools.zip_longest(*obj, fillvalue=0), strict=True)]
            return super().asarray(obj, **options)


class ReadsAnyArrayAsBytes(Mutant, caught_by="create.refuses-other-dtypes"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            if isinstance(obj, np.ndarray) and obj.dtype.kind in "SVM":
                obj = obj.view("uint8")
            return super().asarray(obj, **options)


class MakesFloatsOfFlags(Mutant, caught_by="create.from-lists-and-numbers"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            obj = (
                [float(x) if isinstance(x, bool) else x for x in obj] if type(obj) is list else obj
            )
            return super().asarray(obj, **options)


class PrefersLike(Mutant, caught_by="create.like-is-only-a-default"):
    class Backend(Redirected):
        def redirect(self, device, like):
            return None if like is not None else device, like


class ConvertsNoTensors(Mutant, caught_by="create.conversion"):
    class Backend(Backend):
        def asarray(self, obj, *, dtype=None, **options):
            dtype = None if is_tensor(self, obj) else dtype
            return super().asarray(obj, dtype=dtype, **options)


class LeavesTensorsWhereTheyAre(Mutant, caught_by="create.a-tensor-moves-if-asked"):
    class Backend(Backend):
        def asarray(self, obj, *, device=None, **options):
            device = None if is_tensor(self, obj) else device
            return super().asarray(obj, device=device, **options)


# -- answers --------------------------------------------------------------------------------------


class Wrapper:
    """An object around a tensor."""

    def __init__(self, x):
        self.x = x


class WrapsTensors(Mutant, caught_by="query.native-type"):
    class Backend(Backend):
        def ones(self, shape, **options):
            return Wrapper(super().ones(shape, **options))


class MultipliesOnTheCpu(Mutant, caught_by="query.result-is-where-the-operands-are"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        multiply, cpu = ARRAY.__mul__, self.devices.native(CPU)
        # Each mutant is given to the suite in a process of its own.
        ARRAY.__mul__ = lambda x, y: self.tensors.transfer([multiply(x, y)], cpu, copy=True)[0]


class AddsTwice(Mutant, caught_by="query.result-is-right"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        add = ARRAY.__add__
        ARRAY.__add__ = lambda x, y: add(add(x, y), y)


class NamesDtypesAsCDoes(Mutant, caught_by="query.dtype-name"):
    class Tensors(ReferenceTensors):
        def dtype_of(self, x):
            return super().dtype_of(x).replace("float64", "double")


class LosesAxes(Mutant, caught_by="query.to-numpy-shapes"):
    class Tensors(ReferenceTensors):
        def to_numpy(self, x):
            return np.array(np.squeeze(super().to_numpy(x)))


class ReadsDoublesAsFloats(Mutant, caught_by="query.to-numpy-values"):
    class Tensors(ReferenceTensors):
        def to_numpy(self, x):
            found = super().to_numpy(x)
            return found.astype("float32") if found.dtype == np.float64 else found


class ReadsAnyNumbers(Mutant, caught_by="query.to-numpy-of-no-tensor"):
    class Backend(Backend):
        def to_numpy(self, x):
            return super().to_numpy(self.asarray(x))


class HasOneAddress(Mutant, caught_by="query.address"):
    class Tensors(ReferenceTensors):
        def address(self, x):
            return 4096


class AddsUpAbsoluteNumbers(Mutant, caught_by="query.norm-is-a-scalar"):
    class Tensors(ReferenceTensors):
        def norm(self, x):
            return xp.sum(xp.abs(x))


class TakesListsThroughDlpack(Mutant, caught_by="query.dlpack-refuses-others"):
    class Backend(Backend):
        def from_dlpack(self, x, /, **options):
            return super().from_dlpack(
                np.array(x, dtype=float) if type(x) is list else x, **options
            )


class CopiesItsOwnThroughDlpack(Mutant, caught_by="query.dlpack-of-its-own"):
    class Tensors(OneByOne):
        def from_dlpack(self, x):
            shared = super().from_dlpack(x)
            return self.copy(x, x.device) if isinstance(x, self.types) else shared
