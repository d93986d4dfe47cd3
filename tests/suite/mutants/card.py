"""Mutants of a backend that passes for hardware, and is wrong about a driver, memory or a queue.

A card is simulated: its memory is that of the arrays on it, and its driver is a process's number.
Its memory is small, because the arrays are in the memory of the host.
"""

from __future__ import annotations

import gc
import math
import os
import threading

import array_api_strict as xp

from d2ldev import UnsupportedValueError
from d2ldev.framework import CPU, Memory
from mutants import Queued, ReferenceParallel, Strictness

TOTAL = 600 * 2**20


class Card(Queued):
    """A sound backend whose GPUs say that they are of CUDA."""

    class Devices(Queued.Devices):
        opened_by = None
        """The process that has a context on the GPUs."""

        def __init__(self, virtual_gpus):
            super().__init__(virtual_gpus)
            self.peaks = {}

        def count(self):
            return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else super().count()

        def native(self, device):
            if device is not CPU and self.opened_by not in (None, os.getpid()):
                raise RuntimeError("cannot use a context of another process")
            return super().native(device)

        def platform(self, device):
            return "cpu" if device is CPU else "cuda"

        def memory(self, device):
            used = self.measure(device)
            return Memory(used, self.peaks[device], TOTAL)

        def measure(self, device):
            """Return how many bytes the arrays on a device have, and note the most."""
            tensors = self.framework.tensors
            used = sum(tensors.nbytes(x) for x in tensors.live() if self.has(device, x))
            self.peaks[device] = max(used, self.peaks.get(device, 0))
            return used

        def has(self, device, x):
            return self.framework.tensors.device_of(x) is device

    class Tensors(Queued.Tensors):
        def full(self, shape, value, dtype, native):
            self.reserve(shape, dtype, native)
            made = super().full(shape, value, dtype, native)
            self.framework.devices.measure(self.device_of(made))
            return made

        def random(self, distribution, shape, seed, dtype, native):
            self.reserve(shape, dtype, native)
            return super().random(distribution, shape, seed, dtype, native)

        def copy(self, x, native):
            self.reserve(x.shape, x.dtype, native)
            return super().copy(x, native)

        def reserve(self, shape, dtype, native):
            """Raise if an array does not fit into the memory of a card."""
            device = self.framework.devices.from_native(native)
            size = math.prod(shape) * (1 if dtype == xp.int8 else 4)
            if device is CPU or self.framework.devices.measure(device) + size <= TOTAL:
                return
            gc.collect()  # an error of before may hold an array
            if self.framework.devices.measure(device) + size > TOTAL:
                raise MemoryError("the card is full")


class OpensCardsToCountThem(Card, caught_by="gpus.counting-makes-no-context"):
    class Devices(Card.Devices):
        def count(self):
            self.opened_by = self.opened_by or os.getpid()
            return super().count()


class OpensCardsToWait(Card, caught_by="gpus.synchronizing-makes-no-context"):
    class Devices(Card.Devices):
        def synchronize(self, device):
            self.opened_by = self.opened_by or os.getpid()
            super().synchronize(device)


class CountsHiddenCards(Card, caught_by="gpus.hidden-gpus-are-not-counted"):
    class Devices(Card.Devices):
        def count(self):
            return 2


class IsStrictInTheMainThread(Card, caught_by="gpus.strict-variable"):
    class Strictness(Strictness):
        def in_force(self):
            return super().in_force() and threading.current_thread() is threading.main_thread()


class SeesNoQueue(Card, caught_by="sync.queue-is-seen"):
    class Devices(Card.Devices):
        def is_idle(self, device):
            return True


class MeasuresInMebibytesOnCards(Card, caught_by="memory.total"):
    class Devices(Card.Devices):
        def memory(self, device):
            return super().memory(device)._replace(total=TOTAL // 2**20)


class ForgetsThePeak(Card, caught_by="memory.follows-an-allocation"):
    class Devices(Card.Devices):
        def memory(self, device):
            self.peaks.clear()
            return super().memory(device)


class CountsArraysOfTheHost(Card, caught_by="memory.other-devices-are-not-counted"):
    class Devices(Card.Devices):
        def has(self, device, x):
            return True


class NeverFrees(Card, caught_by="memory.a-copy-is-freed"):
    class Devices(Card.Devices):
        def memory(self, device):
            found = super().memory(device)
            return found._replace(used=found.peak)


class MakesTensorsTwice(Card, caught_by="gpus.made-in-place"):
    class Tensors(Card.Tensors):
        def full(self, shape, value, dtype, native):
            made = super().full(shape, value, dtype, native)
            copied = self.copy(made, native)
            self.framework.devices.measure(self.device_of(copied))
            return copied


class CutsLargeCopiesOff(Card, caught_by="gpus.large-copies"):
    class Tensors(Card.Tensors):
        def copy(self, x, native):
            copied = super().copy(x, native)
            copied[2**23 :] = 0
            return copied


class ReadsNoDeviceOfATensor(Card, caught_by="gpus.device-of-is-native"):
    class Devices(Card.Devices):
        def from_native(self, native):
            found = super().from_native(native)
            return found if found is CPU or isinstance(native, str) else None


class CopiesBeyondItsMemory(Card, caught_by="gpus.a-copy-that-does-not-fit", is_nightly=True):
    class Tensors(Card.Tensors):
        def copy(self, x, native):
            return Queued.Tensors.copy(self, x, native)


class TrainsInProcessesOnCardsAlone(Card, caught_by="processes.train-on-the-cpu-beside-a-gpu"):
    class Parallel(ReferenceParallel):
        def learner_of_group(self, model, settings, group):
            if CPU in self.framework.backend.placement(model).values():
                raise UnsupportedValueError("train", "the library is for cards", "num_gpus=1")
            return super().learner_of_group(model, settings, group)


class TellsOneOfTheProcesses(Card, caught_by="processes.share-a-real-gpu-or-say-so"):
    class Parallel(ReferenceParallel):
        def learner_of_group(self, model, settings, group):
            if CPU not in self.framework.backend.placement(model).values():
                rank = os.environ["RANK"]
                raise UnsupportedValueError("train", f"rank {rank} has no card", "num_gpus=0")
            return super().learner_of_group(model, settings, group)
