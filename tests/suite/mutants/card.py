"""Mutants of a backend that passes for hardware, and is wrong about a driver, memory or a queue.

A card is simulated: its memory is that of the arrays on it, and its driver is a process's number.
"""

from __future__ import annotations

import os
import threading

from d2ldev import Memory
from d2ldev.device import CPU
from mutants import Queued, Strictness

TOTAL = 2**40


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
            made = super().full(shape, value, dtype, native)
            self.framework.devices.measure(self.device_of(made))
            return made


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


class MeasuresInGibibytes(Card, caught_by="memory.total"):
    class Devices(Card.Devices):
        def memory(self, device):
            return super().memory(device)._replace(total=TOTAL // 2**30)


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
