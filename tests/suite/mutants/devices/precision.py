"""Mutants that multiply in another precision than they were told to."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceDevices

from d2ldev import Backend, Trainer
from d2ldev.contract.precision import Switch
from d2ldev.options import MATMUL_PRECISIONS
from mutants import Mutant

_product = xp._array_object.Array.__matmul__


class HasASwitch(Mutant):
    """A sound backend with one switch for the process, which begins with ``'medium'``."""

    class Devices(ReferenceDevices):
        def __init__(self, virtual_gpus):
            super().__init__(virtual_gpus)
            self.precision = "medium"

        def matmul_precision(self):
            return self.precision

        def set_matmul_precision(self, precision):
            before, self.precision = self.precision, precision
            return lambda: setattr(self, "precision", before)

    Switch = Switch

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.state.matmul_switch = self.Switch(lambda: self.devices)


class KnowsTwoPrecisions(HasASwitch, caught_by="precision.is-accepted"):
    class Devices(HasASwitch.Devices):
        def set_matmul_precision(self, precision):
            return super().set_matmul_precision({"high": "medium"}.get(precision, precision))


class RoundsProducts(HasASwitch, caught_by="precision.highest-is-float32"):
    """Multiplies in TensorFloat-32 whatever it was told: 13 of the 23 bits are cut off."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        xp._array_object.Array.__matmul__ = multiply_in_fewer_bits


def multiply_in_fewer_bits(x, other):
    """Return a product in TensorFloat-32."""
    return _product(_cut(x), _cut(other))


def _cut(x):
    values = np.asarray(x._array)
    if values.dtype != np.float32:
        return x
    cut = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return xp.asarray(cut, device=x.device)


class RoundsOnGpus(RoundsProducts, caught_by="precision.same-curve"):
    """Multiplies in TensorFloat-32 on GPUs alone."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        xp._array_object.Array.__matmul__ = _round_on_gpus


class RoundsLayersOnGpus(RoundsProducts, caught_by="precision.highest-in-every-layer"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        xp._array_object.Array.__matmul__ = _round_on_gpus


class RoundsBesideTheReference(RoundsProducts, caught_by="precision.curves-agree"):
    """Multiplies in TensorFloat-32 on its GPUs, which the reference does not use."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        xp._array_object.Array.__matmul__ = _round_on_gpus


def _round_on_gpus(x, other):
    return (_product if x.device == xp.Device("CPU_DEVICE") else multiply_in_fewer_bits)(x, other)


class TakesAnyWord(HasASwitch, caught_by="precision.is-checked"):
    class Backend(Backend):
        def matmul_precision(self, precision=None):
            is_right = precision is None or precision in MATMUL_PRECISIONS
            return super().matmul_precision(precision if is_right else "highest")


class LeavesItSet(HasASwitch, caught_by="precision.is-put-back"):
    class Devices(HasASwitch.Devices):
        def set_matmul_precision(self, precision):
            super().set_matmul_precision(precision)
            return lambda: None


class WaitsForABlock(HasASwitch, caught_by="precision.is-set"):
    """Sets nothing before a block is entered."""

    class Backend(Backend):
        def matmul_precision(self, precision=None):
            if precision is None:
                return super().matmul_precision()
            return Waiting(super().matmul_precision, precision)


class Waiting:
    def __init__(self, make, precision):
        self.make, self.precision = make, precision

    def __enter__(self):
        self.block = self.make(self.precision)
        return self.block.__enter__()

    def __exit__(self, *error):
        self.block.__exit__(*error)


class PutsBackTheFirst(HasASwitch, caught_by="precision.blocks-nest"):
    """Puts back at every end what was before all blocks."""

    class Devices(HasASwitch.Devices):
        def set_matmul_precision(self, precision):
            super().set_matmul_precision(precision)
            return lambda: setattr(self, "precision", "highest")


class InOrder(Switch):
    """Each block puts back what it has found."""

    def undo(self, change):
        change.undo()


class WantsPrecisionsToEndInOrder(HasASwitch, caught_by="precision.any-order"):
    Switch = InOrder


class WantsPrecisionsOfTasksInOrder(HasASwitch, caught_by="precision.tasks"):
    Switch = InOrder


class WantsPrecisionsOfThreadsInOrder(HasASwitch, caught_by="precision.threads"):
    Switch = InOrder


class KeepsSettings(HasASwitch, caught_by="precision.settings-end"):
    """A setting that was made in a block is not undone with it."""

    class Switch(Switch):
        def undo(self, change):
            is_set = self.precision() != change.precision
            now = self.precision()
            super().undo(change)
            if is_set:
                self._get_devices().set_matmul_precision(now)


class SetsItsOwnThreadOnly(HasASwitch, caught_by="precision.setting-in-every-thread"):
    class Devices(HasASwitch.Devices):
        def __init__(self, virtual_gpus):
            self.local = threading.local()
            super().__init__(virtual_gpus)

        @property
        def precision(self):
            return getattr(self.local, "precision", "medium")

        @precision.setter
        def precision(self, precision):
            self.local.precision = precision


class TrainsAsItIs(HasASwitch, caught_by="precision.of-a-training"):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        Trainer._set_matmul_precision = lambda trainer: nullcontext()
