"""Backends that are each broken in one way, and one that is sound but works asynchronously.

The conformance suite is tried on them. ``tests/suite/test_mutants.py`` gives each of them to the
suite, and each requirement in its ``caught_by`` has to fail.

A fault of a module is a nested class of the module's name. A fault in a method that users call is a
nested ``Backend``.
"""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import ClassVar

import reference_backend
from reference_backend import (
    MLP,
    ReferenceDevices,
    ReferenceFiles,
    ReferenceFramework,
    ReferenceStrict,
    ReferenceTensors,
)

from d2ldev import Backend, Device
from d2ldev.contract import Strictness
from d2ldev.framework import BatchNorm, Role, Slot
from d2ldev.framework.testing import framework_of
from mutants.provision import (
    GRADIENTS,
    Attentive,
    Freezable,
    Frozen,
    Kept,
    NetworkGroupLearner,
    NetworkLearner,
    NetworkParallelLearner,
    Normalized,
)

MUTANTS: list[type[Mutant]] = []


def is_tensor(backend, x):
    """Return whether a value is a tensor of a backend."""
    return isinstance(x, framework_of(backend).tensors.types)


class OneByOne(ReferenceTensors):
    """The reference backend's tensors, each of which ``copy`` copies."""

    def transfer(self, xs, native, *, copy):
        return [self.copy(x, native) for x in xs]

    def copy(self, x, native):
        """Return a copy of a tensor on a device."""
        return super().transfer([x], native, copy=True)[0]


class ReferenceModels(reference_backend.ReferenceModels):
    """The reference backend's models, with one that has attributes."""

    types = (Attentive, Freezable, Frozen, Kept)

    def members(self, obj):
        if isinstance(obj, Freezable):
            for i, layer in enumerate(obj.layers):
                for name, x in layer.items():
                    put, role = partial(layer.__setitem__, name), Role.PARAMETER
                    is_trained = not (self.framework.is_frozen and i == 0)
                    yield Slot(f"layers.{i}.{name}", x, put, role, is_trained=is_trained)
            return
        for name, value in vars(obj).items():
            is_parameter = not isinstance(obj, Frozen) and name not in ("mean", "momentum")
            yield Slot(
                name,
                value,
                partial(object.__setattr__, obj, name),
                Role.PARAMETER if is_parameter else Role.BUFFER,
                is_trained=is_parameter,
                is_saved=name != "attention_weights",
            )

    def list_attached(self, x):
        found = GRADIENTS.get(id(x))
        put = partial(found.__setitem__, 1) if found else None
        return [Slot("grad", found[1], put, Role.WORKING)] if found else []

    def find_refill(self, x):
        def refill(new):
            x._array, x._device = new._array, new._device

        return refill if id(x) in GRADIENTS else None

    def plan_writes(self, values):
        return [partial(x.__setitem__, ..., new) if is_kept else None for x, new, is_kept in values]


class ReferenceTraining(reference_backend.ReferenceTraining):
    """The reference backend's training, with the learner of the mutant."""

    def learner(self, model, settings):
        learner = self.framework.Learner(self.framework, model, settings)
        learner.framework = self.framework
        return learner


class ReferenceParallel(reference_backend.ReferenceParallel):
    """The reference backend's several devices and processes, with the learners of the mutant."""

    def learner(self, model, settings, devices):
        if isinstance(model, Attentive):  # which is copied to each device, as a pytree is
            model = MLP(model.layers, model.activation)
        return self.framework.ParallelLearner(self.framework, model, settings, devices)

    def learner_of_group(self, model, settings, group):
        return self.framework.GroupLearner(self.framework, model, settings, group)

    def batch_norms(self, model):
        return [BatchNorm("layer", "local")] if isinstance(model, Normalized) else []


class Mutant(ReferenceFramework):
    """The reference backend with one thing broken.

    Every module, and the learner, knows the whole of it as ``framework``.
    """

    caught_by: ClassVar[tuple[str, ...]]
    """The requirements that have to fail, each run by itself."""
    is_nightly: ClassVar[bool] = False
    """Whether that takes minutes."""
    asked_virtual_gpus: ClassVar[int] = 2
    cannot: ClassVar = {}
    is_frozen = False
    """Whether the first layer of a network is not trained."""

    Backend = Backend
    Devices = ReferenceDevices
    Tensors = ReferenceTensors
    Models = ReferenceModels
    Files = ReferenceFiles
    Training = ReferenceTraining
    Learner = NetworkLearner
    Strict = ReferenceStrict
    Parallel = ReferenceParallel
    ParallelLearner = NetworkParallelLearner
    GroupLearner = NetworkGroupLearner
    Strictness = Strictness

    def __init_subclass__(
        cls, caught_by: str | tuple[str, ...] = (), is_nightly: bool = False
    ) -> None:
        cls.name = cls.__name__.lower()
        cls.is_nightly = is_nightly
        if caught_by:
            cls.caught_by = (caught_by,) if isinstance(caught_by, str) else caught_by
            MUTANTS.append(cls)

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        self.devices = self.Devices(virtual_gpus)
        self.tensors = self.Tensors()
        self.models = self.Models()
        self.files = self.Files(self.tensors)
        self.training = self.Training(self)
        self.strict = self.Strict(self)
        self.state.strictness = self.Strictness(self.name, lambda: self.strict)
        self.parallel = self.Parallel(self)
        for module in (
            *(self.devices, self.tensors, self.models),
            *(self.files, self.training, self.strict, self.parallel),
        ):
            module.framework = self
        # The first ``Backend`` of a framework is the one that everybody gets.
        self.backend = self.Backend(self)

    @property
    def here(self) -> Device | None:
        """The device of the innermost block; None outside of any."""
        return self.state.scope.value.get()


class Queued(Mutant):
    """A sound backend in which a product is only queued until someone waits for it.

    Every tensor of random numbers is asked about: once there was one, its device is busy until
    ``synchronize``. A queue that does not get empty by itself is all that is wrong with it.
    """

    class Devices(ReferenceDevices):
        def __init__(self, virtual_gpus):
            super().__init__(virtual_gpus)
            self.queued = set()

        def synchronize(self, device):
            self.queued.discard(device)

        def is_idle(self, device):
            return device not in self.queued

    class Tensors(OneByOne):
        own_methods = ("to", "clone")

        def random(self, distribution, shape, seed, dtype, native):
            self.framework.devices.queued.add(self.framework.devices.from_native(native))
            return super().random(distribution, shape, seed, dtype, native)


class Crashing(Mutant):
    """Ends the process."""

    def __init__(self, virtual_gpus=None):
        os.kill(os.getpid(), signal.SIGKILL)


class Hanging(Mutant):
    """Never answers."""

    def __init__(self, virtual_gpus=None):
        threading.Event().wait()


class Stumbling(Mutant):
    """Calls what it does not have."""

    class Models(ReferenceModels):
        def mlp(self, layers, activation):
            return self.make_one(layers, activation)


class StumblingAtOnce(Mutant):
    """Does so before a test has begun."""

    class Devices(ReferenceDevices):
        def set_matmul_precision(self, precision):
            return self.switch(precision)
