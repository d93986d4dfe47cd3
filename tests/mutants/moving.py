"""Mutants that move and copy wrongly."""

from __future__ import annotations

import array_api_strict as xp
import numpy as np

from d2ldev import Device, DeviceUnavailableError
from d2ldev.device import CPU
from mutants.base import Mutant


class DropsValues(Mutant, caught_by="copy.to-keeps-values"):
    def _copy(self, x, native):
        return xp.zeros(x.shape, dtype=x.dtype, device=native)


class LosesTheDtype(Mutant, caught_by="copy.to-keeps-the-dtype"):
    def _copy(self, x, native):
        copied = super()._copy(x, native)
        return xp.astype(copied, xp.float32) if x.dtype == xp.float64 else copied


class LosesTheShape(Mutant, caught_by="copy.to-keeps-the-shape"):
    def _copy(self, x, native):
        copied = super()._copy(x, native)
        return xp.reshape(copied, (1,)) if x.shape == () else copied


class LosesNan(Mutant, caught_by="copy.to-keeps-special-values"):
    def _copy(self, x, native):
        data = self._to_numpy(x)
        data = np.nan_to_num(data) if data.dtype.kind == "f" else data
        return xp.asarray(data, dtype=x.dtype, device=native)


class LosesTheEndOfLargeTensors(Mutant, caught_by="copy.to-takes-large-tensors"):
    def _copy(self, x, native):
        data = self._to_numpy(x)
        if data.size > 2**19:
            data[2**19 :] = 0
        return xp.asarray(data, dtype=x.dtype, device=native)


class GoesNowhere(Mutant, caught_by="copy.to-moves"):
    def _copy(self, x, native):
        return super()._copy(x, x.device)


class AlwaysClones(Mutant, caught_by="copy.noop-returns-same-object"):
    def to(self, x, device):
        return self.copy(x, device)


class ComparesSpellings(Mutant, caught_by="copy.noop-in-every-spelling"):
    def to(self, x, device):
        return super().to(x, device) if isinstance(device, Device) else self.copy(x, device)


class AliasesInsteadOfCopying(Mutant, caught_by="copy.copy-is-new-memory"):
    def copy(self, x, device=None):
        return x if device is None else super().copy(x, device)


class SharesMemoryBetweenDevices(Mutant, caught_by="copy.to-shares-no-memory"):
    def _copy(self, x, native):
        return xp.asarray(np.from_dlpack(x), dtype=x.dtype, device=native, copy=False)


class SharesMemoryOnOneDevice(Mutant, caught_by="copy.copy-never-aliases"):
    def _copy(self, x, native):
        if x.device == native:
            return xp.asarray(np.from_dlpack(x), dtype=x.dtype, device=native, copy=False)
        return super()._copy(x, native)


class CopiesToTheScope(Mutant, caught_by="copy.copy-stays-unless-told"):
    def copy(self, x, device=None):
        return super().copy(x, device or self._scope.get())


class FallsBackToTheCpu(Mutant, caught_by="copy.to-a-missing-device"):
    def to(self, x, device):
        try:
            return super().to(x, device)
        except DeviceUnavailableError:
            return super().to(x, CPU)


class ChangesTheDefaultDevice(Mutant, caught_by="copy.to-leaves-the-default-device"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self._default = CPU

    def default_device(self):
        return self._default

    def _copy(self, x, native):
        self._default = self._from_native(native)
        return super()._copy(x, native)


class EmptiesTheSource(Mutant, caught_by="copy.to-leaves-the-source"):
    def _copy(self, x, native):
        copied = super()._copy(x, native)
        if x.device != native and x.shape:
            x[...] = xp.zeros(x.shape, dtype=x.dtype, device=x.device)
        return copied


class TakesWhatIsNoTensor(Mutant, caught_by="copy.refuses-what-is-no-tensor"):
    def to(self, x, device):
        return super().to(x, device) if isinstance(x, (*self.tensor_types, dict)) else x


class MovesIntoTheScope(Mutant, caught_by="copy.a-device-beats-the-scope"):
    def to(self, x, device):
        return super().to(x, self._scope.get() or device)
