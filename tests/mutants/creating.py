"""Mutants that make tensors wrongly."""

from __future__ import annotations

import contextlib

import array_api_strict as xp
import numpy as np

from d2ldev import DeviceUnavailableError, UnsupportedValueError
from d2ldev.device import CPU
from mutants.base import Mutant


class MakesTensorsOnTheCpuInstead(Mutant, caught_by="create.on-a-missing-device"):
    def _destination(self, attempted, dtype, device, like):
        try:
            return super()._destination(attempted, dtype, device, like)
        except DeviceUnavailableError:
            return super()._destination(attempted, dtype, CPU, like)


class MakesTensorsElsewhere(Mutant, caught_by="create.without-a-copy"):
    def _full(self, shape, value, dtype, native):
        return self._copy(super()._full(shape, value, dtype, self._native(CPU)), native)


class IgnoresTheDevice(Mutant, caught_by="create.on-the-device"):
    def _random(self, distribution, shape, seed, dtype, native):
        return super()._random(distribution, shape, seed, dtype, self._native(CPU))


class IgnoresTheScope(Mutant, caught_by="create.in-a-scope"):
    def _destination(self, attempted, dtype, device, like):
        if device is None and like is None:
            device = CPU
        return super()._destination(attempted, dtype, device, like)


class LetsTheScopeWin(Mutant, caught_by="create.a-device-beats-the-scope"):
    def _destination(self, attempted, dtype, device, like):
        return super()._destination(attempted, dtype, self._scope.get() or device, like)

    def _made(self, make, shape, dtype, device, like):
        return super()._made(make, shape, dtype, self._scope.get() or device, like)


class NeverLeavesTheScope(Mutant, caught_by="create.scopes-end"):
    @contextlib.contextmanager
    def on(self, device):
        place = self._existing(device, "make tensors")[0]
        token = self._scope.set(place)
        yield place
        self._scope.reset(token)  # not under an exception


class DefaultsToTheFirstGpu(Mutant, caught_by="create.default-is-the-cpu"):
    def _destination(self, attempted, dtype, device, like):
        if device is None and like is None:
            device = self._scope.get() or self.try_gpu()
        return super()._destination(attempted, dtype, device, like)


class IgnoresLike(Mutant, caught_by="create.like-gives-device-and-dtype"):
    def _destination(self, attempted, dtype, device, like):
        return super()._destination(attempted, dtype, device, None)


class MakesDoubles(Mutant, caught_by="create.default-dtype"):
    def _full(self, shape, value, dtype, native):
        return super()._full(shape, value, dtype or xp.float64, native)


class IgnoresTheDtype(Mutant, caught_by="create.every-dtype"):
    def _full(self, shape, value, dtype, native):
        return super()._full(shape, value, xp.float32, native)


class TakesUnknownDtypes(Mutant, caught_by="create.unknown-dtype"):
    def dtype(self, spec):
        try:
            return super().dtype(spec)
        except TypeError:
            return xp.float32


class IgnoresTheSeed(Mutant, caught_by="create.seeds-repeat"):
    def _random(self, distribution, shape, seed, dtype, native):
        return super()._random(distribution, shape, None, dtype, native)


class AlwaysHasASeed(Mutant, caught_by="create.seeds-differ"):
    def _random(self, distribution, shape, seed, dtype, native):
        return super()._random(distribution, shape, seed or 0, dtype, native)


class DrawsNegativeNumbers(Mutant, caught_by="create.rand-is-uniform"):
    def _random(self, distribution, shape, seed, dtype, native):
        return 2 * super()._random(distribution, shape, seed, dtype, native) - 1


class DrawsUniformForNormal(Mutant, caught_by="create.randn-is-normal"):
    def _random(self, distribution, shape, seed, dtype, native):
        return super()._random("uniform", shape, seed, dtype, native)


class CountsToTheEnd(Mutant, caught_by="create.arange"):
    def _arange(self, start, stop, step, dtype, native):
        return super()._arange(start, stop + step, step, dtype, native)


class AliasesNumpy(Mutant, caught_by="create.never-aliases-numpy"):
    def _from_data(self, obj, dtype, native):
        if isinstance(obj, np.ndarray) and obj.ctypes.data % 64 == 0 and dtype is None:
            return xp.asarray(obj, dtype=getattr(xp, obj.dtype.name), device=native, copy=False)
        return super()._from_data(obj, dtype, native)


class LosesSpecialValues(Mutant, caught_by="create.special-values"):
    def _from_data(self, obj, dtype, native):
        if isinstance(obj, np.ndarray) and obj.dtype.kind == "f":
            obj = np.nan_to_num(obj)
        return super()._from_data(obj, dtype, native)


class TakesObjects(Mutant, caught_by="create.refuses-objects"):
    def _checked_data(self, obj, attempted):
        try:
            return super()._checked_data(obj, attempted)
        except TypeError:
            return np.zeros(1, np.float32)


class CopiesWhatIsThere(Mutant, caught_by="create.a-tensor-comes-back"):
    def _convert(self, x, dtype, device, like):
        return self.copy(super()._convert(x, dtype, device, like))


class LetsMemoryErrorsThrough(Mutant, caught_by="create.out-of-memory"):
    def _is_out_of_memory(self, error):
        return False


class LendsItsMemoryToNumpy(Mutant, caught_by="query.to-numpy-is-owned"):
    def _to_numpy(self, x):
        return np.from_dlpack(x)


class CopiesThroughDlpack(Mutant, caught_by="query.dlpack-shares-numpy-memory"):
    def _from_dlpack(self, x):
        return self.copy(super()._from_dlpack(x))


class LeavesTheDeviceThroughDlpack(Mutant, caught_by="query.dlpack-stays-on-the-device"):
    def _from_dlpack(self, x):
        return xp.from_dlpack(x)


class TruncatesSeeds(Mutant, caught_by="create.seeds-are-taken-whole"):
    def _random(self, distribution, shape, seed, dtype, native):
        seed = None if seed is None else seed % 2**16
        return super()._random(distribution, shape, seed, dtype, native)


class SeedsTheWholeProcess(Mutant, caught_by="create.seeds-leave-the-random-state"):
    def _random(self, distribution, shape, seed, dtype, native):
        if seed is not None:
            np.random.seed(seed)
        return super()._random(distribution, shape, None, dtype, native)


class CountsInWholeNumbers(Mutant, caught_by="create.arange-of-fractions"):
    def _arange(self, start, stop, step, dtype, native):
        if any(isinstance(number, float) for number in (start, stop, step)):
            dtype = dtype or xp.float32
        return super()._arange(int(start), int(stop), int(step) or 1, dtype, native)


class FillsWithFloats(Mutant, caught_by="create.integers-stay-integers"):
    def _full(self, shape, value, dtype, native):
        return super()._full(shape, float(value) if dtype is None else value, dtype, native)


class FillsThroughFloats(Mutant, caught_by="create.integers-are-exact"):
    def _full(self, shape, value, dtype, native):
        value = int(np.float32(value)) if type(value) is int else value
        return super()._full(shape, value, dtype, native)


class HasFewDtypes(Mutant, caught_by="create.has-dtypes"):
    dtype_names = ("float32", "float64", "int16", "int64")


class LetsTheScopeBeatLike(Mutant, caught_by="create.like-beats-the-scope"):
    def _destination(self, attempted, dtype, device, like):
        if like is not None:
            device = self._scope.get() or device
        return super()._destination(attempted, dtype, device, like)


class MovesTensorsIntoTheScope(Mutant, caught_by="create.a-tensor-stays-in-a-scope"):
    def _convert(self, x, dtype, device, like):
        return super()._convert(x, dtype, device or self._scope.get(), like)


class ReadsPartsAsWholes(Mutant, caught_by="query.to-numpy-of-parts"):
    def _to_numpy(self, x):
        part = np.from_dlpack(x)
        if part.flags.c_contiguous:
            return np.array(part)
        start = np.lib.stride_tricks.as_strided(part, (part.size,), (part.itemsize,))
        return np.array(start).reshape(part.shape)


class HidesTheCause(Mutant, caught_by="errors.keep-the-cause"):
    def from_dlpack(self, x):
        try:
            return super().from_dlpack(x)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(error.attempted, error.problem, error.fix) from None


class NamesAnyDtype(Mutant, caught_by="query.dtype-and-address-of-no-tensor"):
    def dtype_of(self, x):
        return str(getattr(x, "dtype", "float32")).removeprefix("array_api_strict.")
