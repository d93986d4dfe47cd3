"""Mutants that are wrong about which devices there are."""

from __future__ import annotations

import contextlib

from d2ldev import Memory, gpu
from d2ldev.device import CPU
from d2ldev.errors import DeviceUnavailableError
from mutants.base import Mutant, Queued


class TakesNegativeIndices(Mutant, caught_by="devices.index-is-not-negative"):
    def gpu(self, i=0):
        return gpu(abs(i))


class TruncatesIndices(Mutant, caught_by="devices.index-is-an-integer"):
    def gpu(self, i=0):
        return gpu(int(i) if isinstance(i, float) else i)


class TakesTrueForOne(Mutant, caught_by="devices.index-is-no-bool"):
    def gpu(self, i=0):
        return gpu(i + 0)


class TryGpuChecksNothing(Mutant, caught_by="devices.try-gpu-checks-index"):
    def try_gpu(self, i=0):
        try:
            return super().try_gpu(i)
        except ValueError:
            return CPU


class EveryGpuIsTheFirst(Mutant, caught_by="devices.gpus-are-distinct"):
    def _native(self, device):
        return super()._native(device if device is CPU else gpu(0))


class CountsOneTooMany(Mutant, caught_by="devices.counted-gpus-exist"):
    def num_gpus(self):
        return super().num_gpus() + 1


class OffByOne(Mutant, caught_by="devices.try-gpu-that-is-missing"):
    def try_gpu(self, i=0):
        return gpu(i) if i <= self.num_gpus() else CPU


class NeverFindsAGpu(Mutant, caught_by="devices.try-gpu-that-exists"):
    def try_gpu(self, i=0):
        gpu(i)
        return CPU


class HasAnEmptyList(Mutant, caught_by="devices.all-gpus-is-never-empty"):
    asked_virtual_gpus = 0

    def try_all_gpus(self):
        return [gpu(i) for i in range(self.num_gpus())]


class ListsBackwards(Mutant, caught_by="devices.list-starts-with-the-cpu"):
    def devices(self):
        return super().devices()[::-1]


class ReadsAnySpelling(Mutant, caught_by="devices.bad-spellings"):
    def device(self, spec):
        with contextlib.suppress(ValueError):
            return super().device(spec)
        return CPU


class TakesNumbersForDevices(Mutant, caught_by="devices.foreign-objects"):
    def device(self, spec):
        return gpu(spec) if isinstance(spec, int) else super().device(spec)


class ForgetsItsOwnObjects(Mutant, caught_by="devices.native-comes-back"):
    def _from_native(self, native):
        return None if super()._from_native(native) is None else CPU


class MakesUpNativeObjects(Mutant, caught_by="devices.native-must-exist"):
    def native(self, device):
        try:
            return super().native(device)
        except DeviceUnavailableError:
            return super().native(CPU)


class KnowsNoPlatform(Mutant, caught_by="devices.platform-of-a-gpu"):
    def _platform(self, device):
        return "cpu"


class GuessesTheDevice(Mutant, caught_by="query.device-of-no-tensor"):
    def device_of(self, x):
        return super().device_of(x) if isinstance(x, self.tensor_types) else CPU


class SaysEverythingIsOnTheCpu(Mutant, caught_by="query.device-is-a-device"):
    def device_of(self, x):
        super().device_of(x)
        return CPU


class NamesNoFix(Mutant, caught_by="errors.say-what-where-and-how"):
    def _existing(self, spec, attempted):
        try:
            return super()._existing(spec, attempted)
        except DeviceUnavailableError as error:
            raise DeviceUnavailableError(attempted, error.problem, "") from None


class SynchronizesNothing(Queued, caught_by="sync.waits-for-queued-work"):
    def _synchronize(self, device):
        """Return at once."""


class SynchronizesTheFirstOnly(Queued, caught_by="sync.waits-for-all-queued-work"):
    def synchronize(self, device=None):
        super().synchronize(CPU if device is None else device)


class SynchronizesWhatIsMissing(Mutant, caught_by="sync.missing-device"):
    def synchronize(self, device=None):
        with contextlib.suppress(DeviceUnavailableError):
            super().synchronize(device)


class CallsWhatIsMissingIdle(Mutant, caught_by="sync.missing-device"):
    def is_idle(self, device=None):
        return True


class CallsWhatIsNoDeviceIdle(Mutant, caught_by="sync.bad-device"):
    def is_idle(self, device=None):
        with contextlib.suppress(ValueError):
            return super().is_idle(device)
        return True


class MeasuresWhatIsMissing(Mutant, caught_by="memory.missing-device"):
    def memory(self, device):
        return Memory(0, 0, 0)


class MeasuresInMebibytes(Mutant, caught_by="memory.is-a-memory"):
    def _memory(self, device):
        return Memory(1.5, 2.5, 80.0)


class SharesItsScope(Mutant, caught_by="threads.scopes-are-their-own"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self._scope = Shared()


class Shared:
    """What looks like a context variable and is the same in every thread."""

    name = "shared"

    def __init__(self) -> None:
        self.device = None

    def get(self, default=None):
        return self.device or default

    def set(self, device):
        before, self.device = self.device, device
        return before

    def reset(self, device):
        self.device = device
