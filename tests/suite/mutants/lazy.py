"""A sound backend that only records sums and products until someone asks, and wrong ones.

It patches the class of array-api-strict's arrays: each mutant is given to the suite in a process of
its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import replace
from itertools import count

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceDevices, ReferenceFiles

from d2ldev import Backend
from mutants import Mutant, OneByOne, ReferenceModels, ReferenceParallel
from mutants.models import Net, WithObjects
from mutants.provision import NetworkGroupLearner, NetworkLearner, NetworkParallelLearner

OPERATORS = ("add", "sub", "mul", "truediv", "matmul")
ARRAY = type(xp.zeros(0))


class Recorded:
    """The values of an array that nobody has asked for so far.

    Args:
        record: where it is, until it is computed.
        function: computes it.
        operands: its arguments.
        shape: that of the result.
    """

    def __init__(self, record, function, operands, shape):
        self.record, self.function, self.operands = record, function, operands
        self.shape, self.ndim, self.size = shape, len(shape), int(np.prod(shape))
        self.device = operands[0].device
        self.number = next(record.numbers)
        self.value = self.error = None
        record.waiting.add(self)

    def read(self):
        """Return the values; what was recorded before is computed first, so no chain is too deep.

        Raises:
            Exception: that of the operation, at each call.
        """
        self.record.compute(lambda each: each.number <= self.number)
        if self.error is not None:
            raise self.error
        return self.value

    def run(self):
        """Compute once; return the error of the operation, or None."""
        self.record.waiting.discard(self)
        try:
            with np.errstate(all="ignore"):  # a block around the operation has ended
                self.value = self.function(*self.operands)._array
        except Exception as error:
            self.error = error
        self.function = self.operands = None  # whose memory is free from now on
        return self.error


class Record:
    """What is recorded in this process: an array or a later result holds each of it."""

    def __init__(self):
        self.waiting, self.numbers, self.lock = weakref.WeakSet(), count(), threading.RLock()

    def find(self, is_meant):
        """Return what waits, in its order."""
        with self.lock:
            return sorted(filter(is_meant, self.waiting), key=lambda each: each.number)

    def compute(self, is_meant=lambda each: True):
        """Compute what waits; return the errors."""
        with self.lock:
            found = [each.run() for each in self.find(is_meant)]
        return [error for error in found if error is not None]

    def peek(self, x):
        """Return the values of an operand, or what is recorded in their place."""
        return self.slot.__get__(x) if type(x) is ARRAY else x

    def connect(self):
        """Have the operators of array-api-strict record, and everything else compute."""
        slot = self.slot = vars(ARRAY)["_array"]

        def read(x):
            values = slot.__get__(x)
            if isinstance(values, Recorded):
                values = values.read()
                slot.__set__(x, values)
            return values

        ARRAY._array = property(read, slot.__set__)
        for name in ("shape", "ndim", "size"):
            setattr(ARRAY, name, property(lambda x, name=name: getattr(slot.__get__(x), name)))
        for name in OPERATORS:
            for method in (f"__{name}__", f"__r{name}__"):
                setattr(ARRAY, method, self.recorder(vars(ARRAY)[method], name == "matmul"))
        for name in ("setitem", *(f"i{name}" for name in OPERATORS)):
            setattr(ARRAY, f"__{name}__", self.writer(vars(ARRAY)[f"__{name}__"]))

    def recorder(self, function, is_product):
        """Return an operator that records, where the shape of its result is plain."""

        @functools.wraps(function)
        def call(x, y):
            shape = shape_of(x, y, is_product)
            if shape is None:
                return function(x, y)
            made = object.__new__(ARRAY)
            made._dtype, made._device = x._dtype, x._device
            with self.lock:
                self.slot.__set__(made, Recorded(self, function, (x, y), shape))
            return made

        return call

    def writer(self, function):
        """Return an operation that writes, after everything that may read."""

        @functools.wraps(function)
        def call(*operands):
            self.compute()
            return function(*operands)

        return call


def shape_of(x, y, is_product):
    """Return the shape of a result of floats; None if only the operation itself tells it."""
    if x.dtype not in (xp.float32, xp.float64):
        return None
    if type(y) is float:
        return None if is_product else x.shape
    if type(y) is not ARRAY or y.dtype != x.dtype:
        return None
    try:
        if not is_product:
            return np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        return None  # refused at once
    is_plain = x.ndim == y.ndim == 2 and x.shape[1] == y.shape[0]
    return (x.shape[0], y.shape[1]) if is_plain else None


def compute_after_each_call(cls):
    """Return a class of learners, derived from another one, that leave nothing recorded."""

    def wrap(method):
        @functools.wraps(method)
        def call(self, *operands):
            found = method(self, *operands)
            self._framework.record.compute()
            return found

        return call

    methods = ("step", "flush", "evaluate", "predict")
    return type(cls.__name__, (cls,), {name: wrap(getattr(cls, name)) for name in methods})


class Lazy(Mutant):
    """A sound backend that computes sums and products when someone asks.

    Its own methods leave nothing recorded.
    """

    Learner = compute_after_each_call(NetworkLearner)
    ParallelLearner = compute_after_each_call(NetworkParallelLearner)
    GroupLearner = compute_after_each_call(NetworkGroupLearner)

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        if not isinstance(vars(ARRAY)["_array"], property):
            Lazy.record = Record()
            self.record.connect()

    class Devices(ReferenceDevices):
        def synchronize(self, device):
            """Compute all of it, also after an error, and then raise the first one."""
            errors = self.framework.record.compute(self.is_on(device))
            if errors:
                raise errors[0]

        def is_idle(self, device):
            return not self.framework.record.find(self.is_on(device))

        def is_on(self, device):
            """Return what tells whether something recorded is on a device."""
            native = self.native(device)
            return lambda each: each.device == native

    class Tensors(OneByOne):
        own_methods = ("to", "clone")

        def nbytes(self, x):
            return x.size * np.dtype(self.dtype_of(x)).itemsize

        def detach(self, x):
            self.framework.record.compute()  # so that it keeps no operands
            return x

    class Models(ReferenceModels):
        def mlp(self, layers, activation):
            self.framework.record.compute()
            return super().mlp(layers, activation)


class LeavesWhatIsRecorded(
    Lazy, caught_by=("sync.values-are-there", "sync.waits-for-queued-work", "time.every-call")
):
    class Devices(Lazy.Devices):
        def synchronize(self, device):
            """Wait for a queue, which is empty."""


class ComputesTwice(Lazy, caught_by="sync.values-are-there"):
    class Devices(Lazy.Devices):
        def synchronize(self, device):
            """Compute all of it, and forget the values."""
            record, made = self.framework.record, {}
            for each in record.find(self.is_on(device)):
                operands = [made.get(id(record.peek(x)), x) for x in each.operands]
                made[id(each)] = each.function(*operands)


class TimesTheRecording(Lazy, caught_by="time.measures-the-work"):
    class Backend(Backend):
        def timeit(self, function, *args, seconds=1.0, **kwargs):
            def call_often():
                for _ in range(20):
                    kept = function(*args, **kwargs)
                return kept

            found = super().timeit(call_often, seconds=seconds)
            return found._replace(
                median=found.median / 20, low=found.low / 20, high=found.high / 20
            )


class LosesErrors(Lazy, caught_by="sync.raises-late-errors"):
    class Devices(Lazy.Devices):
        def synchronize(self, device):
            self.framework.record.compute(self.is_on(device))


class RaisesAnErrorForEver(Lazy, caught_by="sync.raises-late-errors"):
    class Devices(Lazy.Devices):
        def __init__(self, virtual_gpus):
            super().__init__(virtual_gpus)
            self.errors = []

        def synchronize(self, device):
            self.errors += self.framework.record.compute(self.is_on(device))
            if self.errors:
                raise self.errors[0]


class MakesUpValuesAfterAnError(Lazy, caught_by="sync.raises-late-errors"):
    class Devices(Lazy.Devices):
        def synchronize(self, device):
            found = self.framework.record.find(self.is_on(device))
            try:
                super().synchronize(device)
            finally:
                for each in found:
                    if each.error is not None:
                        each.value, each.error = np.ones(each.shape, "float32"), None


class CopiesLater(
    Lazy,
    caught_by=(
        "sync.calls-leave-nothing-recorded",
        "place.leaves-nothing-recorded",
        "prefetch.leaves-nothing-recorded",
    ),
):
    class Tensors(Lazy.Tensors):
        def transfer(self, xs, native, *, copy):
            return [self.copy(x, native) * 1.0 if "float" in str(x.dtype) else x for x in xs]


class StacksLater(Lazy, caught_by="sync.calls-leave-nothing-recorded"):
    class Tensors(Lazy.Tensors):
        def stack(self, xs):
            return super().stack(xs) * 1.0


class LoadsLater(Lazy, caught_by="io.leaves-nothing-recorded"):
    class Files(ReferenceFiles):
        def adopt(self, array, dtype, native):
            x = super().adopt(array, dtype, native)
            return x * 1.0 if "float" in dtype else x


class SplitsLater(Lazy, caught_by="split.leaves-nothing-recorded"):
    class Backend(Backend):
        def split(self, batch, devices):
            return [{**shard, "x": shard["x"] * 1.0} for shard in super().split(batch, devices)]


class CutsLater(Lazy, caught_by="split.leaves-nothing-recorded"):
    class Parallel(ReferenceParallel):
        def rows(self, x, start, stop):
            return super().rows(x, start, stop) * 1.0


class ReplicatesLater(Lazy, caught_by="replicate.leaves-nothing-recorded"):
    class Backend(Backend):
        def replicate(self, obj, devices):
            copies = super().replicate(obj, devices)
            return [[copy[0] * 1.0, *copy[1:]] for copy in copies]


class CopiesModelsLater(Lazy, caught_by="replicate.leaves-nothing-recorded"):
    class Models(WithObjects.Models):
        def mlp(self, layers, activation):
            self.framework.record.compute()
            return super().mlp(layers, activation)

    class Parallel(ReferenceParallel):
        def twin(self, model):
            layers = [{name: x * 1.0 for name, x in layer.items()} for layer in model.layers]
            return Net(layers, model.activation)


class LogsWhatIsRecorded(Lazy, caught_by="sync.calls-leave-nothing-recorded"):
    class Tensors(Lazy.Tensors):
        def detach(self, x):
            return x


class RecordsWithoutAnEnd(Lazy, caught_by="train.leaves-nothing-recorded"):
    Learner = NetworkLearner


class RecordsItsStatistics(Lazy, caught_by="train.leaves-nothing-recorded"):
    class Learner(Lazy.Learner):
        def step(self, inputs, y):
            found = super().step(inputs, y)
            model = self.sync()["model"]
            if hasattr(model, "mean"):
                self.replace({**self.sync(), "model": replace(model, mean=model.mean * 1.0)})
            return found


class CopiesWhenACopyIsRead(
    Lazy, caught_by=("copy.copy-never-aliases", "copy.to-shares-no-memory")
):
    class Tensors(Lazy.Tensors):
        def copy(self, x, native):
            record = self.framework.record
            made = object.__new__(ARRAY)
            made._dtype, made._device = x._dtype, native
            record.slot.__set__(made, Copied(record, None, (x,), x.shape))
            return made


class Copied(Recorded):
    """The values of a copy, of which no device knows."""

    def __init__(self, record, *others):
        super().__init__(record, *others)
        record.waiting.discard(self)

    def read(self):
        return np.array(self.operands[0]._array)


class StopsAtAnError(Lazy, caught_by="sync.raises-late-errors"):
    class Devices(Lazy.Devices):
        def synchronize(self, device):
            for each in self.framework.record.find(self.is_on(device)):
                error = each.run()
                if error is not None:
                    raise error


class ComputesToBeIdle(
    Lazy,
    caught_by=(
        "sync.asking-computes-nothing",
        "sync.waits-for-queued-work",
        "sync.waits-for-all-queued-work",
    ),
):
    class Devices(Lazy.Devices):
        def is_idle(self, device):
            self.framework.record.compute(self.is_on(device))
            return True


class ComputesAPieceToBeIdle(Lazy, caught_by="sync.asking-computes-nothing"):
    """Computes a bit with each question: whoever asks often enough finds the device idle."""

    class Devices(Lazy.Devices):
        def is_idle(self, device):
            for each in self.framework.record.find(self.is_on(device))[:1]:
                each.run()
            return super().is_idle(device)


class IsIdleUntilItComputes(
    Lazy, caught_by=("sync.waits-for-queued-work", "sync.waits-for-all-queued-work")
):
    class Devices(Lazy.Devices):
        def is_idle(self, device):
            return True
