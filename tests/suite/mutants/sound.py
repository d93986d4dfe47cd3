"""Backends that are right, and differ from the reference backend in what no contract names."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import weakref
from pathlib import Path
from typing import ClassVar

import array_api_strict as xp
from reference_backend import ReferenceDevices, ReferenceTensors

from d2ldev import Backend, UnsupportedValueError
from d2ldev.framework import CPU
from mutants import Mutant
from mutants.devices.precision import multiply_in_fewer_bits
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


class WithoutFloat32(
    Sound,
    passes=["mlp.seeds", "several.change-the-parameters", "train.named-losses"],
    lacks=[
        "bench.exercises-are-measured",
        "fit.clips-gradients",
        "io.layouts-are-known",
        "processes.learn-what-one-learns",
        "several.learn-what-one-learns",
        "train.clips-as-torch-does",
        "train.named-optimizers",
        "train.weighs-examples",
    ],
):
    """Multiplies in fewer bits only."""

    cannot: ClassVar = {"multiply in float32": "its products have fewer bits"}

    class Devices(ReferenceDevices):
        def matmul_precision(self):
            return "high"

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        xp._array_object.Array.__matmul__ = multiply_in_fewer_bits


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


class CompilesIntoTheTemporaryFolder(Sound, passes=["create.conversion", "mlp.seeds"]):
    """Compiles a kernel into a file when it is first called."""

    class Tensors(ReferenceTensors):
        def from_data(self, obj, dtype, native):
            folder = Path(tempfile.gettempdir(), "mutant-kernels")
            folder.mkdir(exist_ok=True)
            Path(folder, "from_data.so").touch()
            return super().from_data(obj, dtype, native)


class ReusesObjects(
    Sound,
    passes=[
        "memory.live-tensors",
        "memory.live-tensors-end-with-the-users-line",
        "memory.live-tensors-say-where-they-were-made",
    ],
):
    """Takes an object that it has already for three tensors of four, and Python sees no memory."""

    class Tensors(ReferenceTensors):
        def live(self):
            return [x for made in self.framework.made if (x := made()) is not None]

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        array = self.tensors.types[0]
        make, number = array._new.__func__, itertools.count()
        spare = [object.__new__(array) for _ in range(5000)]
        self.made = []

        def reuse(cls, x, /, device):
            new = make(cls, x, device)
            if next(number) % 4:
                old = spare.pop()
                old._array, old._dtype, old._device = new._array, new._dtype, new._device
                new = old
            self.made.append(weakref.ref(new))
            return new

        array._new = classmethod(reuse)


class HasNoDoubles(
    Sound,
    passes=[
        "create.empty",
        "create.from-numpy-scalars",
        "create.like-another-tensor",
        "create.like-gives-device-and-dtype",
        "create.wide-numpy-data",
        "fit.casts-floats",
    ],
):
    """Makes float32 of NumPy's float64."""

    class Tensors(ReferenceTensors):
        dtype_names = tuple(
            name for name in ReferenceTensors.dtype_names if name not in ("float64", "complex128")
        )

        def from_data(self, obj, dtype, native):
            found = super().from_data(obj, dtype, native)
            narrow = {"float64": "float32", "complex128": "complex64"}
            name = self.dtype_of(found)
            return self.astype(found, self.dtype(narrow[name])) if name in narrow else found
