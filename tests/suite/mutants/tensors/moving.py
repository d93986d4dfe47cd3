"""Mutants that move and copy wrongly: tensors, and the batches that hold them."""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import time

import array_api_strict as xp
import numpy as np
from reference_backend import ReferenceDevices, ReferenceTensors

from d2ldev import Backend, Device, DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework import CPU, flatten
from d2ldev.framework.testing import framework_of
from mutants import Mutant, OneByOne, is_tensor

# -- tensors --------------------------------------------------------------------------------------


class DropsValues(Mutant, caught_by="copy.to-keeps-values"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            return xp.zeros(x.shape, dtype=x.dtype, device=native)


class LosesTheDtype(Mutant, caught_by="copy.to-keeps-the-dtype"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            copied = super().copy(x, native)
            return xp.astype(copied, xp.float32) if x.dtype == xp.float64 else copied


class LosesTheShape(Mutant, caught_by="copy.to-keeps-the-shape"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            copied = super().copy(x, native)
            return xp.reshape(copied, (1,)) if x.shape == () else copied


class LosesNan(Mutant, caught_by="copy.to-keeps-special-values"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            data = self.to_numpy(x)
            data = np.nan_to_num(data) if data.dtype.kind == "f" else data
            return xp.asarray(data, dtype=x.dtype, device=native)


class LosesTheEndOfLargeTensors(Mutant, caught_by="copy.to-takes-large-tensors"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            data = self.to_numpy(x)
            if data.size > 2**19:
                data[2**19 :] = 0
            return xp.asarray(data, dtype=x.dtype, device=native)


class GoesNowhere(Mutant, caught_by=("copy.to-moves", "copy.sum-stays")):
    class Tensors(OneByOne):
        def copy(self, x, native):
            return super().copy(x, x.device)


class AlwaysClones(
    Mutant,
    caught_by=(
        "copy.noop-returns-same-object",
        "chapter.z-to-where-it-is",
        "copy.noop-after-a-move",
    ),
):
    class Backend(Backend):
        def to(self, x, device):
            return self.copy(x, device)


class ComparesSpellings(Mutant, caught_by="copy.noop-in-every-spelling"):
    class Backend(Backend):
        def to(self, x, device):
            return super().to(x, device) if isinstance(device, Device) else self.copy(x, device)


class AliasesInsteadOfCopying(Mutant, caught_by=("copy.copy-is-new-memory", "chapter.copy-of-z")):
    class Backend(Backend):
        def copy(self, x, device=None):
            return x if device is None else super().copy(x, device)


class SharesWithItsCopies(Mutant, caught_by="copy.copy-is-new-memory"):
    """Has a copy see what is written, and takes the number of an object for its address."""

    class Tensors(OneByOne):
        def copy(self, x, native):
            return x[...] if x.device == native else super().copy(x, native)

        def address(self, x):
            return id(x)


class KeepsItsCopies(Mutant, caught_by="copy.new-memory-each-time"):
    """As TensorFlow keeps a copy with the tensor, for the next operation there."""

    class Tensors(OneByOne):
        kept = {}

        def copy(self, x, native):
            if x.device == native:
                return super().copy(x, native)
            if (id(x), native) not in self.kept:
                self.kept[id(x), native] = x, super().copy(x, native)
            data = np.from_dlpack(self.kept[id(x), native][1])
            return xp.asarray(data, dtype=x.dtype, device=native, copy=False)


class SharesMemoryBetweenDevices(Mutant, caught_by="copy.to-shares-no-memory"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            return xp.asarray(x._array, dtype=x.dtype, device=native, copy=False)


class SharesMemoryOnOneDevice(Mutant, caught_by="copy.copy-never-aliases"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            if x.device == native:
                return xp.asarray(x._array, dtype=x.dtype, device=native, copy=False)
            return super().copy(x, native)


class CopiesToTheScope(Mutant, caught_by="copy.copy-stays-unless-told"):
    class Backend(Backend):
        def copy(self, x, device=None):
            return super().copy(x, device or self._framework.here)


class FallsBackToTheCpu(
    Mutant, caught_by=("copy.to-a-missing-device", "containers.missing-device")
):
    class Backend(Backend):
        def to(self, x, device):
            try:
                return super().to(x, device)
            except DeviceUnavailableError:
                return super().to(x, CPU)


class ChangesTheDefaultDevice(Mutant, caught_by="copy.to-leaves-the-default-device"):
    class Devices(ReferenceDevices):
        copied_last = None

        def default(self):
            return self.copied_last or super().default()

    class Tensors(OneByOne):
        def copy(self, x, native):
            self.framework.devices.copied_last = native
            return super().copy(x, native)


class EmptiesTheSource(
    Mutant, caught_by=("copy.to-leaves-the-source", "chapter.z-is-x-on-the-second-gpu")
):
    class Tensors(OneByOne):
        def copy(self, x, native):
            copied = super().copy(x, native)
            if x.device != native and x.shape:
                x[...] = xp.zeros(x.shape, dtype=x.dtype, device=x.device)
            return copied


class TakesWhatIsNoTensor(Mutant, caught_by="copy.refuses-what-is-no-tensor"):
    class Backend(Backend):
        def to(self, x, device):
            return super().to(x, device) if is_tensor(self, x) or isinstance(x, dict) else x


class MovesIntoTheScope(Mutant, caught_by="copy.a-device-beats-the-scope"):
    class Backend(Backend):
        def to(self, x, device):
            return super().to(x, self._framework.here or device)


# -- batches --------------------------------------------------------------------------------------


class Careless(Backend):
    """Moves a nesting by hand: subclasses say what is done wrongly.

    Tensors that are there already are left alone, and so are values that are taken apart no
    further.
    """

    def to(self, x, device):
        return self._move(x, lambda part: self.to(part, device), super().to, device)

    def copy(self, x, device=None):
        return self._move(x, lambda part: self.copy(part, device), super().copy, device)

    def _move(self, x, move, rightly, device):
        if is_tensor(self, x) or (device is not None and self.is_there(x, device)):
            return rightly(x, device)
        moved = self.carelessly(x, lambda part: move(part) if self.has_tensors(part) else part)
        return rightly(x, device) if moved is None else moved

    def carelessly(self, x, move):
        """Return the wrong result; None where it would be right."""

    def is_there(self, x, device):
        try:
            return set(self.placement(x).values()) <= {self.device(device)}
        except UnsupportedValueError:  # what may be moved, and not placed
            return False

    def has_tensors(self, x):
        try:
            return bool(self.placement(x))
        except UnsupportedValueError:
            return True


class DegradesNamedtuples(Mutant, caught_by="containers.namedtuple"):
    class Backend(Careless):
        def carelessly(self, x, move):
            return tuple(move(list(x))) if hasattr(x, "_fields") else None


class TurnsTuplesIntoLists(Mutant, caught_by="containers.list-and-tuple"):
    class Backend(Careless):
        def carelessly(self, x, move):
            return move(list(x)) if type(x) is tuple else None


class SortsKeys(Mutant, caught_by="containers.dict"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is not dict or list(x) == sorted(x, key=str):
                return None
            return move({name: x[name] for name in sorted(x, key=str)})


class LosesTheFactory(Mutant, caught_by="containers.defaultdict"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is collections.defaultdict:
                return collections.defaultdict(None, move(dict(x)))
            return None


class LosesTheOrder(Mutant, caught_by="containers.ordereddict"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is collections.OrderedDict:
                return collections.OrderedDict(sorted(move(dict(x)).items(), reverse=True))
            return None


class LosesTheMaximalLength(Mutant, caught_by="containers.deque"):
    class Backend(Careless):
        def carelessly(self, x, move):
            return collections.deque(move(list(x))) if type(x) is collections.deque else None


class LosesAttributes(Mutant, caught_by="containers.subclass-attributes"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if isinstance(x, dict) and getattr(x, "tag", None):
                return type(x)(move(dict(x)))
            return None


def _without_attributes(moved, x):
    """Give what was moved an attribute as it was before."""
    if moved is not x and hasattr(x, "mask"):
        moved.mask = x.mask
    return moved


class LooksBeforeItMoves(Mutant, caught_by="containers.walked-once"):
    class Backend(Backend):
        def to(self, x, device):
            flatten(x, framework_of(self).state.kinds, "look through a batch")
            return super().to(x, device)


class LeavesAttributesBehind(Mutant, caught_by="containers.attributes-move"):
    class Backend(Backend):
        def to(self, x, device):
            return _without_attributes(super().to(x, device), x)

        def copy(self, x, device=None):
            return _without_attributes(super().copy(x, device), x)


class RebuildsForAttributes(Mutant, caught_by="containers.attributes-noop"):
    class Backend(Backend):
        def to(self, x, device):
            moved = super().to(x, device)
            return copy.copy(moved) if hasattr(moved, "mask") else moved


class RunsConstructors(Mutant, caught_by="containers.no-constructor-runs"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if not dataclasses.is_dataclass(x):
                return None
            values = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
            return type(x)(**move(values))


class StopsAtTheFirstLevel(Mutant, caught_by=("containers.nested", "containers.registered")):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is not dict:
                return None
            return {k: move(v) if is_tensor(self, v) else v for k, v in x.items()}


class WalksTheKeysOfChildren(Mutant, caught_by="containers.registered-children-are-a-list"):
    class Backend(Careless):
        def carelessly(self, x, move):
            is_registered = type(x) is dict and type(x.get("batch")).__name__ == "Batch"
            return x if is_registered else None


class BreaksTies(Mutant, caught_by="containers.tied-tensors"):
    class Backend(Careless):
        def carelessly(self, x, move):
            return {k: move(v) for k, v in x.items()} if type(x) is dict else None


class WritesIntoTheBatch(Mutant, caught_by="containers.input-unchanged"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is not dict:
                return None
            x.update(zip(x, move(list(x.values())), strict=True))
            return dict(x)


class MovesOneAfterTheOther(Mutant, caught_by="containers.all-or-nothing"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is not dict or len(x) != 2:
                return None
            for key in x:
                x[key] = move(x[key])
            return x


class RebuildsWhatIsThere(
    Mutant, caught_by=("containers.noop-returns-same-object", "containers.empty")
):
    class Backend(Backend):
        def to(self, x, device):
            moved = super().to(x, device)
            return type(moved)(moved) if type(moved) in (dict, list) else moved


class RebuildsWhatIsThereInside(Mutant, caught_by="containers.noop-inside"):
    class Backend(Careless):
        def to(self, x, device):
            if type(x) is list:
                return [self.to(item, device) for item in x]
            return super().to(x, device)

        def carelessly(self, x, move):
            return {k: move(v) for k, v in x.items()} if type(x) is dict else None


class PassesUnknownObjects(Mutant, caught_by="containers.unknown-object-is-named"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if isinstance(x, dict) and "meta" in x:
                known = {key: value for key, value in x.items() if key != "meta"}
                return {**move(known), "meta": x["meta"]}
            return None


class MovesTensorsOnly(Mutant, caught_by="containers.arrays-become-tensors"):
    class Backend(Backend):
        def to(self, x, device):
            self.copy(x)  # which refuses arrays
            return super().to(x, device)


class LeavesMovingObjectsBehind(Mutant, caught_by="containers.objects-that-move"):
    class Tensors(ReferenceTensors):
        own_methods = ("to", "clone")

    class Backend(Backend):
        def to(self, x, device):
            left = (
                [each for each in x.get("a", ()) if hasattr(each, "to")] if type(x) is dict else []
            )
            moved = super().to(x, device)
            return {**moved, "a": [*left, *moved["a"][len(left) :]]} if left else moved


class Moving(Mutant):
    """The sound base of those whose objects move by themselves."""

    class Tensors(ReferenceTensors):
        own_methods = ("to", "clone")


class CopiesMovingObjectsByReference(Moving, caught_by="containers.objects-that-move-are-copied"):
    class Backend(Backend):
        def copy(self, x, device=None):
            is_moving = type(x) is dict and hasattr(x.get("a"), "to")
            return dict(x) if is_moving else super().copy(x, device)


class GivesMovingObjectsToAll(Moving, caught_by="containers.objects-that-move-stay-whole"):
    class Backend(Backend):
        def split(self, batch, devices):
            if type(batch) is dict and hasattr(batch.get("a"), "to"):
                shards = super().split({**batch, "a": None}, devices)
                return [{**shard, "a": batch["a"]} for shard in shards]
            return super().split(batch, devices)


class NamesNoIncoherence(Mutant, caught_by="containers.incoherent-is-named"):
    class Backend(Careless):
        def carelessly(self, x, move):
            for each in x.values() if type(x) is dict else ():
                dict(zip(each, each.values(), strict=True)) if type(each).__name__ == "Rows" else 0


class TakesArraysInContainersAlone(Mutant, caught_by="containers.slide-prepare-batch"):
    class Backend(Backend):
        def to(self, x, device):
            if isinstance(x, np.ndarray):
                self.copy(x)  # which refuses it
            return super().to(x, device)


class DegradesContainersOfArrays(
    Mutant, caught_by=("containers.arrays-keep-containers", "containers.mapping-proxy")
):
    class Backend(Backend):
        def to(self, x, device):
            if isinstance(x, collections.abc.Mapping):
                return {key: self.to(value, device) for key, value in x.items()}
            if type(x) is list:
                return [self.to(value, device) for value in x]
            return super().to(x, device)


class BreaksTiesOfArrays(Mutant, caught_by="containers.arrays-stay-tied"):
    class Backend(Backend):
        def to(self, x, device):
            if type(x) is dict:
                return {key: self.to(value, device) for key, value in x.items()}
            return super().to(x, device)


class ForgetsWhereTheArrayIs(Mutant, caught_by="containers.arrays-are-named"):
    class Backend(Backend):
        def to(self, x, device):
            try:
                return super().to(x, device)
            except UnsupportedValueError as error:
                raise UnsupportedValueError(
                    error.attempted, "it is not a tensor", error.fix
                ) from error


class MakesListsOfText(Mutant, caught_by="containers.text-stays-on-the-host"):
    class Backend(Backend):
        def to(self, x, device):
            moved = super().to(x, device)
            if type(moved) is not dict:
                return moved
            return {k: y.tolist() if isinstance(y, np.ndarray) else y for k, y in moved.items()}


class SharesTextWithItsCopy(Mutant, caught_by="containers.text-is-copied"):
    class Backend(Backend):
        def copy(self, x, device=None):
            copied = super().copy(x, device)
            if type(x) is dict and isinstance(x.get("text"), np.ndarray):
                copied["text"] = x["text"]
            return copied


class CopiesTiesTwice(Mutant, caught_by="copy.ties-are-copied-once"):
    class Backend(Backend):
        def copy(self, x, device=None):
            super().copy(x, device)
            return super().copy(x, device)


# -- copies ---------------------------------------------------------------------------------------


class CopiesWhereItIs(Mutant, caught_by="copy.copy-goes-where-it-is-told"):
    class Backend(Backend):
        def copy(self, x, device=None):
            return super().copy(x)


class CopiesFromTheStart(Mutant, caught_by="copy.views-move-whole"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            data = np.from_dlpack(x)
            start = data if data.base is None else np.asarray(x._array.base)
            start = start.ravel()[: data.size].reshape(data.shape)
            return xp.asarray(start, dtype=x.dtype, device=native, copy=True)


class EmptiesCopiesInPlace(Mutant, caught_by="copy.copy-keeps-values"):
    class Tensors(OneByOne):
        def copy(self, x, native):
            copied = super().copy(x, native)
            return xp.zeros_like(copied) if x.device == native else copied


class RoundsOnTheWayBack(Mutant, caught_by=("copy.there-and-back", "place.there-and-back")):
    class Tensors(OneByOne):
        def copy(self, x, native):
            data = self.to_numpy(x)
            if data.dtype == np.float32 and x.device != self.framework.devices.native(CPU):
                data = data.astype("float16")
            return xp.asarray(data, dtype=x.dtype, device=native)


class CopiesThroughOneBuffer(Mutant, caught_by="threads.copies-at-once"):
    class Tensors(OneByOne):
        buffer = None

        def copy(self, x, native):
            self.buffer = x
            time.sleep(0.001)  # another thread has its turn
            return super().copy(self.buffer, native)


class AssignsFields(Mutant, caught_by="containers.frozen-dataclass"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if not dataclasses.is_dataclass(x):
                return None
            moved = copy.copy(x)
            for field in dataclasses.fields(x):
                setattr(moved, field.name, move(getattr(x, field.name)))
            return moved


class MakesNumbersOfPython(Mutant, caught_by="containers.plain-values"):
    class Backend(Careless):
        def carelessly(self, x, move):
            if type(x) is not list or not any(isinstance(each, np.generic) for each in x):
                return None
            return move([each.item() if isinstance(each, np.generic) else each for each in x])


class MovesEachListByItself(Mutant, caught_by="containers.tied-containers"):
    class Backend(Careless):
        def carelessly(self, x, move):
            return tuple(map(move, x)) if type(x) is tuple else None


class WalksWithoutALimit(
    Mutant, caught_by=("containers.cycles-are-refused", "containers.too-deep-is-refused")
):
    class Backend(Backend):
        def to(self, x, device):
            _count(x)
            return super().to(x, device)

        def copy(self, x, device=None):
            _count(x)
            return super().copy(x, device)


def _count(x):
    """Return how many objects a nesting has, by recursion."""
    items = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return 1 + sum(map(_count, items))
