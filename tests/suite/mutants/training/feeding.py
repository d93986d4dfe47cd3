"""Mutants that bring batches and scalars over wrongly."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
from array_api_strict import astype, float32
from reference_backend import ReferenceTensors

from d2ldev import Backend
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework import CPU, Scopes, flatten
from d2ldev.training import feed
from mutants import Mutant, OneByOne, is_tensor


class PrefetchesInPairs(Mutant, caught_by="prefetch.same-order"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            kept = list(super().prefetch(batches, device, depth))
            return (batch for i in range(0, len(kept), 2) for batch in kept[i : i + 2][::-1])


class PrefetchesToTheCpu(Mutant, caught_by="prefetch.on-the-device"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            return super().prefetch(batches, CPU, depth)


class PrefetchesFlatBatches(Mutant, caught_by="prefetch.nestings"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            for moved in super().prefetch(batches, device, depth):
                yield {**moved, "x": [*moved["x"]]} if isinstance(moved, dict) else moved


class PrefetchesTensorsOnly(Mutant, caught_by="prefetch.numpy-batches"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            return (self.copy(batch, device) for batch in batches)


class MovesWhatItKeptUnmoved(Mutant, caught_by="prefetch.array-used-again"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            kept = deque()
            for batch in batches:
                kept.append(batch)
                if len(kept) > depth:
                    yield self.to(kept.popleft(), device)
            yield from (self.to(batch, device) for batch in kept)


class PrefetchesCopies(Mutant, caught_by="prefetch.noop-returns-same-object"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            return map(self.copy, super().prefetch(batches, device, depth))


class PrefetchesEverything(Mutant, caught_by="prefetch.moves-ahead"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            return super().prefetch(batches, device, 10**6)


class PrefetchesNothing(Mutant, caught_by="prefetch.moves-ahead"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            return super().prefetch(batches, device, 0)


class RaisesAtOnce(Mutant, caught_by="prefetch.error-in-its-place"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            yield from super().prefetch(list(batches), device, depth)


class LeavesOutBadBatches(Mutant, caught_by="prefetch.bad-batch-in-its-place"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            for batch in batches:
                try:
                    yield self.to(batch, device)
                except UnsupportedValueError:
                    continue


class KeepsTheSource(Mutant, caught_by="prefetch.close-closes-source"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            self.source = iter(batches)
            return super().prefetch(itertools.chain(self.source), device, depth)


class PrefetchesAtLeastOne(Mutant, caught_by="prefetch.empty"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            source = iter(batches)
            first = next(source, None)
            yield from super().prefetch([first], device, depth)
            yield from super().prefetch(source, device, depth)


class PrefetchesElsewhere(Mutant, caught_by="prefetch.missing-device"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            try:
                return super().prefetch(batches, device, depth)
            except DeviceUnavailableError:
                return super().prefetch(batches, CPU, depth)


class TakesAnyDepth(Mutant, caught_by="prefetch.bad-arguments"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            return super().prefetch(batches, device, max(0, int(depth or 0)))


class CutsLargeBatches(Mutant, caught_by="prefetch.any-size"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            for batch in super().prefetch(batches, device, depth):
                is_large = isinstance(batch, tuple) and batch[0].size > 2**20
                yield tuple(x[: 2**20] for x in batch) if is_large else batch


class LooksIntoTheSource(Mutant, caught_by="prefetch.array-loader"):
    class Backend(Backend):
        def prefetch(self, batches, device, depth=2):
            next(iter(batches), None)
            return super().prefetch(batches, device, depth)


class StacksBackwards(Mutant, caught_by="log.flush"):
    class Tensors(ReferenceTensors):
        def stack(self, xs):
            return super().stack(xs[::-1])


class StacksFiveHundredAtMost(Mutant, caught_by="log.loses-nothing"):
    class Tensors(ReferenceTensors):
        def stack(self, xs):
            return super().stack([*xs[:500], *xs[:1] * (len(xs) - 500)])


class StacksByWayOfTheHost(Mutant, caught_by="log.one-transfer"):
    class Tensors(ReferenceTensors):
        def stack(self, xs):
            return self.from_data(np.stack([self.to_numpy(x) for x in xs]), None, xs[0].device)


class LogsCopies(Mutant, caught_by="log.add-transfers-nothing"):
    class Tensors(OneByOne):
        def detach(self, x):
            return self.copy(x, x.device)


class LogsComplexNumbers(Mutant, caught_by="log.real-numbers-only"):
    class Tensors(ReferenceTensors):
        def dtype_of(self, x):
            return super().dtype_of(x).replace("complex64", "float32")


class LogsOneTensor(Mutant, caught_by="log.trained-values"):
    class Tensors(ReferenceTensors):
        kept = None

        def detach(self, x):
            self.kept = x if self.kept is None else self.kept
            return self.kept


class LogsOnTheCpu(Mutant, caught_by="log.stays-on-the-device"):
    class Tensors(ReferenceTensors):
        def device_of(self, x):
            return super().device_of(x) if x.shape else CPU


class StacksInFloat32(Mutant, caught_by="log.wide-integers"):
    class Tensors(ReferenceTensors):
        def stack(self, xs):
            return super().stack([astype(x, float32) for x in xs])


class StacksTheFirstDtype(Mutant, caught_by="log.mixed-dtypes"):
    class Backend(Backend):
        def asarray(self, obj, **options):
            return obj if is_tensor(self, obj) else super().asarray(obj, **options)


class WalksBatchesAgain(Mutant, caught_by="fit.walks-a-batch-once"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)

        def walk(batch, kinds, *arguments):
            flatten(batch, kinds, "look through a batch")
            return flatten(batch, kinds, *arguments)

        feed.flatten = walk


class DrawsBatchesInTheBlock(Mutant, caught_by="fit.draws-outside-of-a-block"):
    class Scope(Scopes):
        def enter(self, value):
            return super().enter(self.get() or value)

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.scope = self.Scope("mutant_scope")
