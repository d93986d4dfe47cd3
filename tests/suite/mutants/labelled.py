"""Mutants of a backend whose arrays know no device: a label in a table says where each is.

The table is the one that the documentation gives to authors.
"""

from __future__ import annotations

import copyreg
import re
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import ClassVar

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceDevices, ReferenceTensors

from d2ldev.framework import CPU
from d2ldev.framework.testing import array_api_of
from mutants import Mutant

ARRAY = type(xp.zeros(0))
PLAIN = xp.zeros(0).device
"""The device that all arrays are on, as array-api-strict sees it."""
_PAGE = Path(__file__).parents[3] / "docs" / "kinds-of-frameworks.md"
_OWN = SimpleNamespace(**vars(xp))
"""The functions of array-api-strict before any is replaced: what compiled code calls."""
_take = ARRAY.__getitem__
_current = []
"""The framework of this process, for pickles."""


def _read_labels():
    code = re.search(r"# labels.py\n(.*?)^```", _PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names = {}
    exec(code[1], names)  # the page's own module
    return names["Labels"]


Labels = _read_labels()


def rebuild(values, label):
    """Return the array of a pickle."""
    return _current[0].labels.put(_OWN.asarray(values), label)


def transform(function):
    """Return a function that computes in compiled code: it returns a new array."""
    return lambda x: _OWN.asarray(np.array(function(x)))


def _draw(_):
    return _OWN.asarray(np.random.random_sample((2, 2)))


def _is_public(name):
    return not name.startswith("_")


def _is_special(name):
    return name.startswith("__") or name in ("T", "mT")


class Labelled(Mutant):
    """The sound base of those that lose a label."""

    Labels = Labels
    lost: ClassVar = ()
    """The functions of the framework that are not followed."""
    pickles = True

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        _current[:] = [self]
        self.labels = self.Labels(ARRAY, CPU)
        ARRAY.__iter__ = lambda x: (_take(x, (i, ...)) for i in range(x.shape[0]))
        for owner, is_followed in ((xp, _is_public), (ARRAY, _is_special)):
            for name, value in list(vars(owner).items()):
                if is_followed(name) and name not in self.lost:
                    self.follow(owner, name, value)
        if self.pickles:
            copyreg.pickle(ARRAY, lambda x: (rebuild, (np.array(x), self.labels.of(x))))

    def follow(self, owner, name, value):
        """Let the results of a function or a property have a label."""
        if isinstance(value, property):
            setattr(owner, name, property(self.labels.follow(value.fget)))
        elif isinstance(value, FunctionType):
            setattr(owner, name, self.labels.follow(value))

    def list_own_tensors(self):
        """Return the calls of ``provision.own_tensors``."""
        follow_transform = self.labels.follow_transform
        names = ("gradient", "map", "compile", "update")
        kinds = {
            name: transform if name in self.lost else follow_transform(transform) for name in names
        }
        draw = self.labels.follow(_draw) if "random" not in self.lost else _draw
        made = {name: kind(lambda x: 2.0 * x) for name, kind in kinds.items()}
        return {**array_api_of(xp), **made, "random": draw}

    class Devices(ReferenceDevices):
        def scope(self, device):
            return self.framework.labels.scope(device)

    class Tensors(ReferenceTensors):
        def device_of(self, x):
            return self.framework.labels.of(x) if isinstance(x, ARRAY) else super().device_of(x)

        def put(self, x, native):
            """Give a new array the label of a device."""
            return self.framework.labels.put(x, self.framework.devices.from_native(native))

        def from_data(self, obj, dtype, native):
            return self.put(super().from_data(obj, dtype, PLAIN), native)

        def full(self, shape, value, dtype, native):
            return self.put(super().full(shape, value, dtype, PLAIN), native)

        def empty(self, shape, dtype, native):
            return self.put(super().empty(shape, dtype, PLAIN), native)

        def arange(self, start, stop, step, dtype, native):
            return self.put(super().arange(start, stop, step, dtype, PLAIN), native)

        def random(self, distribution, shape, seed, dtype, native):
            return self.put(super().random(distribution, shape, seed, dtype, PLAIN), native)

        def transfer(self, xs, native, *, copy):
            return [self.put(x, native) for x in super().transfer(xs, PLAIN, copy=copy)]


CREATE = "create.own-calls-in-a-scope"
DERIVE = "query.own-calls-keep-the-device"
OPERATE = "query.result-is-where-the-operands-are"
COPY = "copy.python-copies-keep-the-device"


class LosesNewTensors(Labelled, caught_by=CREATE):
    lost = ("linspace",)


class LosesRandomNumbers(Labelled, caught_by=CREATE):
    lost = ("random",)


class LosesTensorsLikeOthers(Labelled, caught_by=DERIVE):
    lost = ("zeros_like",)


class LosesPartsOfAList(Labelled, caught_by=DERIVE):
    lost = ("stack",)


class LosesGradients(Labelled, caught_by=DERIVE):
    lost = ("gradient",)


class LosesMappedFunctions(Labelled, caught_by=DERIVE):
    lost = ("map",)


class LosesCompiledFunctions(Labelled, caught_by=DERIVE):
    lost = ("compile",)


class LosesUpdates(Labelled, caught_by=DERIVE):
    lost = ("update",)


class LosesRows(Labelled, caught_by=OPERATE):
    lost = ("__iter__",)


class LosesMasked(Labelled, caught_by=OPERATE):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        follow = ARRAY.__getitem__
        ARRAY.__getitem__ = lambda x, key: (
            _take(x, key) if isinstance(key, ARRAY) else follow(x, key)
        )


class LosesOperationsWithNumbers(Labelled, caught_by=OPERATE):
    lost = ("__gt__",)


class LosesTransposedArrays(Labelled, caught_by=OPERATE):
    lost = ("T",)


class LosesCopies(Labelled, caught_by=COPY):
    pickles = False


class LosesDeepCopies(Labelled, caught_by=COPY):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        ARRAY.__deepcopy__ = lambda x, memo: _OWN.asarray(np.array(x))


class LosesPickles(Labelled, caught_by=COPY):
    """Has both copies, and leaves the label out of a pickle."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        ARRAY.__copy__ = lambda x: rebuild(np.array(x), self.labels.of(x))
        ARRAY.__deepcopy__ = lambda x, memo: ARRAY.__copy__(x)
        copyreg.pickle(ARRAY, lambda x: (rebuild, (np.array(x), CPU)))


class RefusesOperationsOnGpus(Labelled, caught_by=OPERATE):
    """Has operations with arrays of the CPU alone."""

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        for name in ("__abs__", "__iter__", "__eq__", "__iadd__"):
            setattr(ARRAY, name, self.refuse_on_gpus(getattr(ARRAY, name)))
        ARRAY.T = property(self.refuse_on_gpus(ARRAY.T.fget))

    def refuse_on_gpus(self, function):
        def call(x, *others):
            if self.labels.of(x) is not CPU:
                raise ValueError("no such label")
            return function(x, *others)

        return call


class RefusesCopiesOnGpus(Labelled, caught_by=COPY):
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        reduce = copyreg.dispatch_table[ARRAY]

        def reduce_on_cpu(x):
            if self.labels.of(x) is not CPU:
                raise ValueError("no such label")
            return reduce(x)

        copyreg.pickle(ARRAY, reduce_on_cpu)


class FollowsInBlocks(Labelled, caught_by=DERIVE):
    """Follows functions in a block for a device and in a strict block alone."""

    class Labels(Labels):
        blocks = 0

        @contextmanager
        def scope(self, device):
            self.blocks += 1
            try:
                with super().scope(device):
                    yield
            finally:
                self.blocks -= 1

    def follow(self, owner, name, value):
        super().follow(owner, name, value)
        if owner is not xp or not isinstance(value, FunctionType):
            return
        followed = getattr(xp, name)

        def call(*args, **options):
            is_in_block = self.labels.blocks or self.state.strictness.in_force()
            return (followed if is_in_block else value)(*args, **options)

        setattr(xp, name, call)


class FollowsTheBlock(Labelled, caught_by=(DERIVE, OPERATE)):
    """Takes the label of a result from the block, and not from the operands."""

    class Labels(Labels):
        def _arrays(self, values):
            is_result = len(values) == 1
            return super()._arrays(values) if is_result else iter(())


class ForgetsTheBlock(Labelled, caught_by=CREATE):
    """Makes every tensor on the CPU."""

    class Devices(ReferenceDevices):
        pass
