"""Mutants that bring batches and scalars over wrongly."""

from __future__ import annotations

import itertools

import numpy as np
from array_api_strict import astype, float32

from d2ldev.device import CPU
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError
from d2ldev.operations.batches import bring
from d2ldev.operations.prefetching import moved_ahead
from mutants.base import Mutant


class PrefetchesInPairs(Mutant, caught_by="prefetch.same-order"):
    def _prefetch(self, batches, device, depth):
        kept = list(super()._prefetch(batches, device, depth))
        return (batch for i in range(0, len(kept), 2) for batch in kept[i : i + 2][::-1])


class PrefetchesToTheCpu(Mutant, caught_by="prefetch.on-the-device"):
    def _prefetch(self, batches, device, depth):
        return super()._prefetch(batches, CPU, depth)


class PrefetchesFlatBatches(Mutant, caught_by="prefetch.nestings"):
    def _prefetch(self, batches, device, depth):
        def start(batch):
            moved = bring(self, batch, device)
            return {**moved, "x": [*moved["x"]]} if isinstance(moved, dict) else moved

        return moved_ahead(batches, depth, start)


class PrefetchesTensorsOnly(Mutant, caught_by="prefetch.numpy-batches"):
    def _prefetch(self, batches, device, depth):
        return moved_ahead(batches, depth, lambda batch: self.copy(batch, device))


class MovesWhatItKeptUnmoved(Mutant, caught_by="prefetch.array-used-again"):
    def _prefetch(self, batches, device, depth):
        return moved_ahead(
            batches, depth, lambda batch: batch, lambda batch: bring(self, batch, device)
        )


class PrefetchesCopies(Mutant, caught_by="prefetch.noop-returns-same-object"):
    def _prefetch(self, batches, device, depth):
        return map(self.copy, super()._prefetch(batches, device, depth))


class PrefetchesEverything(Mutant, caught_by="prefetch.moves-ahead"):
    def _prefetch(self, batches, device, depth):
        return super()._prefetch(batches, device, 10**6)


class PrefetchesNothing(Mutant, caught_by="prefetch.moves-ahead"):
    def _prefetch(self, batches, device, depth):
        return super()._prefetch(batches, device, 0)


class RaisesAtOnce(Mutant, caught_by="prefetch.error-in-its-place"):
    def _prefetch(self, batches, device, depth):
        yield from (bring(self, batch, device) for batch in list(batches))


class LeavesOutBadBatches(Mutant, caught_by="prefetch.bad-batch-in-its-place"):
    def _prefetch(self, batches, device, depth):
        for batch in batches:
            try:
                yield bring(self, batch, device)
            except UnsupportedValueError:
                continue


class KeepsTheSource(Mutant, caught_by="prefetch.close-closes-source"):
    def _prefetch(self, batches, device, depth):
        self.source = iter(batches)
        return super()._prefetch(itertools.chain(self.source), device, depth)


class PrefetchesAtLeastOne(Mutant, caught_by="prefetch.empty"):
    def _prefetch(self, batches, device, depth):
        source = iter(batches)
        first = next(source, None)
        yield from super()._prefetch([first], device, depth)
        yield from super()._prefetch(source, device, depth)


class PrefetchesElsewhere(Mutant, caught_by="prefetch.missing-device"):
    def prefetch(self, batches, device, depth=2):
        try:
            return super().prefetch(batches, device, depth)
        except DeviceUnavailableError:
            return super().prefetch(batches, CPU, depth)


class TakesAnyDepth(Mutant, caught_by="prefetch.bad-arguments"):
    def prefetch(self, batches, device, depth=2):
        return super().prefetch(batches, device, max(0, int(depth or 0)))


class LooksIntoTheSource(Mutant, caught_by="prefetch.array-loader"):
    def _prefetch(self, batches, device, depth):
        next(iter(batches), None)
        return super()._prefetch(batches, device, depth)


class StacksBackwards(Mutant, caught_by="log.flush"):
    def _stack(self, xs):
        return super()._stack(xs[::-1])


class StacksByWayOfTheHost(Mutant, caught_by="log.one-transfer"):
    def _stack(self, xs):
        return self.asarray(np.stack([self._to_numpy(x) for x in xs]), device=self.device_of(xs[0]))


class LogsCopies(Mutant, caught_by="log.add-transfers-nothing"):
    def _detached(self, x):
        return self.copy(x)


class LogsOneTensor(Mutant, caught_by="log.trained-values"):
    def _detached(self, x):
        self.kept = getattr(self, "kept", x)
        return self.kept


class LogsOnTheCpu(Mutant, caught_by="log.stays-on-the-device"):
    def device_of(self, x):
        return super().device_of(x) if x.shape else CPU


class StacksInFloat32(Mutant, caught_by="log.wide-integers"):
    def _stack(self, xs):
        return super()._stack([astype(x, float32) for x in xs])


class StacksTheFirstDtype(Mutant, caught_by="log.mixed-dtypes"):
    def _convert(self, x, dtype, device, like):
        return x
