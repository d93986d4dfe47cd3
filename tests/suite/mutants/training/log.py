"""Mutants whose log of scalars is wrong, and the values in it are right.

Each mutant is given to the suite in a process of its own, so that it changes the class.
"""

from __future__ import annotations

import time

from reference_backend import ReferenceTensors

from d2ldev import DeviceLog
from d2ldev.training import log
from mutants import Mutant


class Logging(Mutant):
    """A backend with other methods of ``DeviceLog``."""

    methods: dict

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        for name, make in self.methods.items():
            setattr(DeviceLog, name, make(getattr(DeviceLog, name)))


class LogsWithoutWeights(Logging, caught_by="log.means"):
    methods = {"add": lambda add: lambda self, weight=1, /, **scalars: add(self, **scalars)}


class SaysTheMeanForTheLast(Logging, caught_by="log.last"):
    methods = {"last": lambda _: DeviceLog.means}


class KeepsTheLastOfSoMany(Logging, caught_by="log.every"):
    methods = {"_is_to_skip": lambda skip: lambda self: bool(skip(self) or self._calls == 1)}


class LogsWithoutABound(Logging, caught_by="log.bounded"):
    methods = {
        "__init__": lambda initialize: (
            lambda self, *args, **options: initialize(
                self, *args, **{**options, "max_pending": 2**20}
            )
        )
    }


class ForgetsItsDevice(Logging, caught_by="log.first-device"):
    methods = {"add": lambda _: lambda self, weight=1, /, **xs: self._keep(weight, xs) and None}


class LogsNumbersAsTensors(Logging, caught_by="log.numbers"):
    methods = {
        "add": lambda add: (
            lambda self, weight=1, /, **scalars: add(
                self,
                weight,
                **{
                    name: self._backend.full((), float(x), device=self._device)
                    for name, x in scalars.items()
                },
            )
        )
    }


class LogsAtMostOnce(Logging, caught_by="log.bad-arguments"):
    methods = {
        "__init__": lambda initialize: (
            lambda self, backend, *args, **options: initialize(self, backend, *args)
        )
    }


class LosesWhatThreadsAdd(Logging, caught_by="log.threads"):
    @staticmethod
    def _keep_slowly(keep):
        def keep_slowly(self, weight, scalars):
            before = self._pending[:]
            device = keep(self, weight, scalars)
            after = self._pending[len(before) :]
            time.sleep(0.001)  # another thread has its turn
            self._pending[:] = [*before, *after[:3]]
            return device

        return keep_slowly

    methods = {"_keep": _keep_slowly}


class LogsTensorsOfAnyShape(Mutant, caught_by="log.scalars-only"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        log.shape_of = lambda *_: ()


class StacksFloatsAlone(Mutant, caught_by="log.every-dtype"):
    class Tensors(ReferenceTensors):
        def stack(self, xs):
            if not all(self.dtype_of(x).startswith("float") for x in xs):
                raise ValueError("only floats can be stacked")
            return super().stack(xs)
