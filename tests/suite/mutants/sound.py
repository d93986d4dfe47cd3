"""Backends that are right, and differ from the reference backend in what no contract names."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from reference_backend import ReferenceTensors

from d2ldev import Backend, UnsupportedValueError
from d2ldev.framework import CPU
from mutants import Mutant
from mutants.provision import NetworkLearner

SOUND: list[type[Sound]] = []


class Sound(Mutant):
    """A backend with the outcomes that requirements have on it."""

    outcomes: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, passes=(), lacks=()) -> None:
        super().__init_subclass__()
        cls.outcomes = {**dict.fromkeys(passes, "passed"), **dict.fromkeys(lacks, "cannot")}
        SOUND.append(cls)


class Trainless(
    Sound,
    passes=["place.noop-returns-same-object", "bench.exercises-are-measured"],
    lacks=[
        "callbacks.answers-are-refused",
        "callbacks.early-stopping-needs-its-number",
        "hooks.that-return-none",
        "labels.accuracy-refuses",
        "labels.accuracy-refuses-foreign-arrays",
        "labels.fit-refuses",
        "module.has-its-learning-rate",
        "runs.errors-name-the-call",
        "runs.nothing-to-train",
        "train.refuses-losses-that-are-no-scalar",
    ],
):
    """Has no gradients."""

    cannot: ClassVar = {"train": "it has no gradients"}


class WithoutDLPack(
    Sound,
    passes=["errors.keep-the-cause"],
    lacks=["query.dlpack-refuses-others", "query.dlpack-without-a-copy"],
):
    """Exchanges no tensors."""

    cannot: ClassVar = {"dlpack": "it has no protocol for it"}


class WithoutLeaks(
    Sound,
    passes=["strict.mixing-raises"],
    lacks=["leaks.a-line-that-leaves-the-device-is-named"],
):
    """Has no place to see what its functions make."""

    cannot: ClassVar = {"find leaks": "its functions are compiled"}


class WithoutFloat32(Sound, passes=["mlp.seeds"], lacks=["bench.exercises-are-measured"]):
    """Multiplies in fewer bits only."""

    cannot: ClassVar = {"multiply in float32": "its products have fewer bits"}


class SaysItInItsOwnWords(Sound, passes=["runs.nothing-to-train"]):
    """Refuses a model without parameters in other words."""

    class Learner(NetworkLearner):
        def __init__(self, tensors, model, settings):
            if not model.layers and settings.optimizer is not None:
                raise UnsupportedValueError("fit it", "it has no weights", "mlp([2, 1])")
            super().__init__(tensors, model, settings)


class RoundsOtherwise(Sound, passes=["fit.resumes-elsewhere", "fit.resumes-when-killed"]):
    """Has another rounding on each device and in each process."""

    class Learner(NetworkLearner):
        def step(self, inputs, y):
            found = super().step(inputs, y)
            salt = 1 + os.getpid() % 7 + 10 * len(str(inputs[0].device))
            for layer in self.sync()["model"].layers:
                layer.update({name: x * (1 + 1e-8 * salt) for name, x in layer.items()})
            return found


class DrawsOtherwiseOnEachDevice(
    Sound, passes=["create.seeds-differ", "mlp.seeds", "train.same-bits", "train.same-losses"]
):
    """Draws other numbers for one seed on each device."""

    class Tensors(ReferenceTensors):
        def random(self, distribution, shape, seed, dtype, native):
            if seed is not None and self.framework.devices.from_native(native) is not CPU:
                seed = (seed + 1000 * ord(str(native)[-3])) % 2**32
            return super().random(distribution, shape, seed, dtype, native)


class HasNamelessTypes(Sound, passes=["strict.leaves-nothing-patched"]):
    """Has a class in a module that tells no module."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        sys.modules[__name__].nameless = _WithoutModule("Nameless", (), {})


class _WithoutModule(type):
    @property
    def __module__(cls):
        raise AttributeError("__module__")


class MakesHandlesAnew(Sound, passes=["place.noop-returns-same-object", "place.all-or-nothing"]):
    """Has another object for the same tensor whenever it is named."""

    class Backend(Backend):
        def named_tensors(self, obj, *, gradients=False):
            named = super().named_tensors(obj, gradients=gradients)
            handles = {id(x): type(x)._new(x._array, device=x.device) for x in named.values()}
            return {name: handles[id(x)] for name, x in named.items()}


class CompilesOnce(Sound, passes=["runs.second-fit-compiles-nothing"]):
    """Calls a loss of the user's once for each shape, as what compiles does."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.traced = {}

    class Learner(NetworkLearner):
        def _loss(self, prediction, y):
            if isinstance(self.settings.loss, str):
                return super()._loss(prediction, y)
            key = self.settings.loss, self.settings.optimizer is None, prediction.shape
            if key not in self.framework.traced:
                self.framework.traced[key] = super()._loss(prediction, y)
            return self.framework.traced[key]
