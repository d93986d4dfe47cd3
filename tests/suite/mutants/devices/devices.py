"""Mutants that are wrong about which devices there are."""

from __future__ import annotations

import contextlib
import copyreg
import threading
import time
from types import SimpleNamespace

import numpy as np
from d2ldev_conformance.suite.devices.queues import LONG
from reference_backend import ReferenceDevices, ReferenceFramework, ReferenceTensors

from d2ldev import Backend, Device, InvalidDeviceError, gpu
from d2ldev.errors import DeviceUnavailableError
from d2ldev.framework import CPU, Memory, Scopes
from d2ldev.registry import selection
from mutants import Mutant, Queued


class TakesNegativeIndices(Mutant, caught_by="devices.index-is-not-negative"):
    class Backend(Backend):
        def gpu(self, i=0):
            return gpu(abs(i))


class TruncatesIndices(Mutant, caught_by="devices.index-is-an-integer"):
    class Backend(Backend):
        def gpu(self, i=0):
            return gpu(int(i) if isinstance(i, float) else i)


class TimesTheFirstCallAlone(Mutant, caught_by="time.every-call"):
    class Backend(Backend):
        def timeit(self, function, *args, seconds=1.0, **kwargs):
            found = super().timeit(lambda: None, seconds=seconds)
            function(*args, **kwargs)
            return found


class TimesAnything(Mutant, caught_by="time.what-can-be-called"):
    class Backend(Backend):
        def timeit(self, function, *args, seconds=1.0, **kwargs):
            if callable(function):
                return super().timeit(function, *args, seconds=0, **kwargs)
            return super().timeit(lambda: function, seconds=0)


class TakesTrueForOne(Mutant, caught_by="devices.index-is-no-bool"):
    class Backend(Backend):
        def gpu(self, i=0):
            return gpu(i + 0)


class TryGpuChecksNothing(Mutant, caught_by="devices.try-gpu-checks-index"):
    class Backend(Backend):
        def try_gpu(self, i=0):
            try:
                return super().try_gpu(i)
            except ValueError:
                return CPU


class EveryGpuIsTheFirst(Mutant, caught_by="devices.gpus-are-distinct"):
    class Devices(ReferenceDevices):
        def native(self, device):
            return super().native(device if device is CPU else gpu(0))


class CountsOneTooMany(Mutant, caught_by="devices.counted-gpus-exist"):
    class Backend(Backend):
        def num_gpus(self):
            return super().num_gpus() + 1


class OffByOne(Mutant, caught_by="devices.try-gpu-that-is-missing"):
    class Backend(Backend):
        def try_gpu(self, i=0):
            return gpu(i) if i <= self.num_gpus() else CPU


class NeverFindsAGpu(
    Mutant,
    caught_by=("devices.try-gpu-that-exists", "chapter.two-gpus", "chapter.x-on-the-first-gpu"),
):
    class Backend(Backend):
        def try_gpu(self, i=0):
            gpu(i)
            return CPU


class HasAnEmptyList(Mutant, caught_by="devices.all-gpus-is-never-empty"):
    asked_virtual_gpus = 0

    class Backend(Backend):
        def try_all_gpus(self):
            return [gpu(i) for i in range(self.num_gpus())]


class ListsBackwards(Mutant, caught_by="devices.list-starts-with-the-cpu"):
    class Backend(Backend):
        def devices(self):
            return super().devices()[::-1]


class ReadsAnySpelling(Mutant, caught_by="devices.bad-spellings"):
    class Devices(ReferenceDevices):
        def from_native(self, native):
            return CPU if isinstance(native, str) else super().from_native(native)


class TakesNumbersForDevices(Mutant, caught_by="devices.foreign-objects"):
    class Devices(ReferenceDevices):
        def from_native(self, native):
            return gpu(native) if isinstance(native, int) else super().from_native(native)


class ForgetsItsOwnObjects(
    Mutant,
    caught_by=(
        "devices.native-comes-back",
        "devices.native-is-taken",
        "devices.native-of-the-active-backend",
    ),
):
    class Devices(ReferenceDevices):
        def from_native(self, native):
            return None if super().from_native(native) is None else CPU


class ReadsNoTextOfItsOwn(Mutant, caught_by="devices.text-is-a-spelling"):
    class Devices(ReferenceDevices):
        def from_native(self, native):
            return None if isinstance(native, str) else super().from_native(native)


class MakesUpNativeObjects(Mutant, caught_by="devices.native-must-exist"):
    class Backend(Backend):
        def native(self, device):
            try:
                return super().native(device)
            except DeviceUnavailableError:
                return super().native(CPU)


class NamesTheCpuForWhatIsMissing(Mutant, caught_by="devices.native-of-a-missing-gpu"):
    class Devices(ReferenceDevices):
        def native_of_missing(self, device):
            return self.native(CPU)


class MakesADeviceEachTime(Mutant, caught_by="devices.native-functions"):
    class Backend(Backend):
        def native(self, device):
            return SimpleNamespace(device=super().native(device), made=object())


class KnowsNoPlatform(Mutant, caught_by="devices.platform-of-a-gpu"):
    class Devices(ReferenceDevices):
        def platform(self, device):
            return "cpu"


class GuessesTheDevice(Mutant, caught_by="query.device-of-no-tensor"):
    class Tensors(ReferenceTensors):
        def device_of(self, x):
            return super().device_of(x) if isinstance(x, self.types) else CPU


class SaysEverythingIsOnTheCpu(Mutant, caught_by="query.device-is-a-device"):
    class Tensors(ReferenceTensors):
        def device_of(self, x):
            super().device_of(x)
            return CPU


class NamesNoFix(Mutant, caught_by="errors.say-what-where-and-how"):
    class Backend(Backend):
        def to(self, x, device):
            try:
                return super().to(x, device)
            except DeviceUnavailableError as error:
                raise DeviceUnavailableError(
                    error.attempted, error.problem, "", error.devices
                ) from None


class SynchronizesNothing(Queued, caught_by="sync.waits-for-queued-work"):
    class Devices(Queued.Devices):
        def synchronize(self, device):
            """Return at once."""


class SynchronizesTheFirstOnly(Queued, caught_by="sync.waits-for-all-queued-work"):
    class Backend(Backend):
        def synchronize(self, device=None):
            super().synchronize(CPU if device is None else device)


class SynchronizesWhatIsMissing(Mutant, caught_by="sync.missing-device"):
    class Backend(Backend):
        def synchronize(self, device=None):
            with contextlib.suppress(DeviceUnavailableError):
                super().synchronize(device)


class CallsWhatIsMissingIdle(Mutant, caught_by="sync.missing-device"):
    class Backend(Backend):
        def is_idle(self, device=None):
            return True


class CallsWhatIsNoDeviceIdle(Mutant, caught_by="sync.bad-device"):
    class Backend(Backend):
        def is_idle(self, device=None):
            with contextlib.suppress(ValueError):
                return super().is_idle(device)
            return True


class MeasuresWhatIsMissing(Mutant, caught_by="memory.missing-device"):
    class Backend(Backend):
        def memory(self, device):
            return Memory(0, 0, 0)


class MeasuresInMebibytes(Mutant, caught_by="memory.is-a-memory"):
    class Devices(ReferenceDevices):
        def memory(self, device):
            return Memory(1.5, 2.5, 80.0)


class SharesItsScope(Mutant, caught_by="threads.scopes-are-their-own"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.scope = Everyones(f"{self.name}_scope")


class Everyones(Scopes):
    """Blocks that are in force in every thread."""

    def __init__(self, name):
        super().__init__(name)
        self.value = self._value = Variable(None)
        self._entries = Variable(())


class Variable:
    """What is set like a context variable, and is the same in every thread."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value

    def set(self, value):
        self.value = value


class CountsNoMemoryOfTheCpu(Mutant, caught_by="memory.of-the-cpu"):
    class Backend(Backend):
        def memory(self, device):
            return Memory(0, 0, 0)


class EmptiesMoreThanTheCache(Mutant, caught_by="memory.empty-cache"):
    class Backend(Backend):
        def empty_cache(self, device=None):
            for x in self._framework.tensors.live():
                x._array[...] = 0


class ListsEveryDeviceAsOne(Mutant, caught_by="memory.live-tensors"):
    class Backend(Backend):
        def live_tensors(self, device=None):
            return super().live_tensors()


class SaysItsOwnLineAfterTheUsers(Mutant, caught_by="memory.live-tensors-end-with-the-users-line"):
    class Backend(Backend):
        def live_tensors(self, device=None):
            found = super().live_tensors(device)
            return [live._replace(made=(*live.made, f"{__file__}:1")) for live in found]


class ForgetsWhereTensorsWereMade(Mutant, caught_by="memory.live-tensors-say-where-they-were-made"):
    class Backend(Backend):
        def live_tensors(self, device=None):
            return [live._replace(made=()) for live in super().live_tensors(device)]


class CountsInIntegersOfNumpy(Mutant, caught_by="devices.count-is-not-negative"):
    class Backend(Backend):
        def num_gpus(self):
            return np.int64(super().num_gpus())


class ReadsVirtualGpusAsTheFrameworkDoes(Mutant, caught_by="devices.cpu-is-one"):
    class Backend(Backend):
        def device(self, spec):
            is_indexed = isinstance(spec, str) and spec.startswith("cpu:")
            return gpu(int(spec[4:])) if is_indexed else super().device(spec)


class PrefersTheLastGpu(Mutant, caught_by="devices.gpu-is-gpu-zero"):
    class Backend(Backend):
        def gpu(self, i=None):
            return gpu(self.num_gpus() - 1 if i is None else i)


class NamesOnlyGpusThatExist(Mutant, caught_by="devices.gpu-need-not-exist"):
    class Backend(Backend):
        def gpu(self, i=0):
            self.native(gpu(i))
            return gpu(i)


class TakesIndicesOfPythonOnly(Mutant, caught_by="devices.index-from-numpy"):
    class Backend(Backend):
        def gpu(self, i=0):
            return gpu(i if type(i) is int else str(i))


class ReadsOneSpelling(Mutant, caught_by="devices.spellings"):
    class Backend(Backend):
        def device(self, spec):
            if isinstance(spec, str) and spec != spec.lower().strip():
                raise InvalidDeviceError("read a device", f"{spec!r} is unknown", "'gpu:0'")
            return super().device(spec)


class NamesThePlatformOfAnything(Mutant, caught_by="devices.platform-must-exist"):
    class Backend(Backend):
        def platform(self, device):
            return self._framework.devices.platform(self.device(device))


class CallsTheCpuTheHost(Mutant, caught_by="devices.platform-of-the-cpu"):
    class Devices(ReferenceDevices):
        def platform(self, device):
            return "host" if device is CPU else super().platform(device)


class SendsDevicesAsNewObjects(Mutant, caught_by="devices.pickle"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        # Each mutant is given to the suite in a process of its own.
        copyreg.pickle(Device, lambda _: (object.__new__, (Device,)))


class IsNeverIdle(Mutant, caught_by=("sync.every-device", "sync.one-device")):
    class Devices(ReferenceDevices):
        def is_idle(self, device):
            return False


class IsIdleWhileItWorks(
    Mutant, caught_by=("sync.waits-for-queued-work", "sync.waits-for-all-queued-work")
):
    class Devices(Queued.Devices):
        def synchronize(self, device):
            if device in self.queued:
                time.sleep(LONG)
            super().synchronize(device)

        def is_idle(self, device):
            return True

    Tensors = Queued.Tensors


class IsActiveInEveryThread(Mutant, caught_by="threads.backend-is-their-own"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        selection.scoped.value = selection.scoped._value = Variable(None)
        selection.scoped._entries = Variable(())


class IsLoadedAgain(Mutant, caught_by=("query.backend-is-one-object", "threads.first-use")):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        selection._loaded = Forgetful()


class Forgetful(dict):
    """A dict in which nothing is found at first."""

    def get(self, key, default=None):
        return default

    def __contains__(self, key):
        return False


class LeavesItsTensorsToAnother(Mutant, caught_by="query.backend-of-a-tensor"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        for cls in self.tensors.types:
            selection._by_type[cls] = ReferenceFramework()


class TellsErrorsWithALock(Mutant, caught_by="errors.survive-pickling"):
    class Backend(Backend):
        def zeros(self, shape, **options):
            try:
                return super().zeros(shape, **options)
            except DeviceUnavailableError as error:
                error.lock = threading.Lock()
                raise
