"""Mutants that take batches apart and put them together wrongly."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from d2ldev.errors import UnsupportedValueError
from mutants.base import Mutant


class Careless(Mutant):
    """Moves a nesting by hand: what the subclasses say is done instead of the right thing."""

    def _moved(self, x, target, attempted):
        return self._either(x, target, attempted, always=False)

    def _copied(self, x, target, attempted):
        return self._either(x, target, attempted, always=True)

    def _either(self, x, target, attempted, *, always):
        moved = self._carelessly(x, target, attempted, always)
        whole = super()._copied if always else super()._moved
        return whole(x, target, attempted) if moved is None else moved

    def _carelessly(self, x, target, attempted, always):
        """The wrong result; None where it would be right."""


class DegradesNamedtuples(Careless, caught_by="containers.namedtuple"):
    def _carelessly(self, x, target, attempted, always):
        if hasattr(x, "_fields"):
            return tuple(self._either(list(x), target, attempted, always=always))
        return None


class TurnsTuplesIntoLists(Careless, caught_by="containers.list-and-tuple"):
    def _carelessly(self, x, target, attempted, always):
        return self._either(list(x), target, attempted, always=always) if type(x) is tuple else None


class SortsKeys(Careless, caught_by="containers.dict"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is not dict or list(x) == sorted(x, key=str):
            return None
        return self._either(dict(sorted(x.items(), key=str)), target, attempted, always=always)


class LosesTheFactory(Careless, caught_by="containers.defaultdict"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is collections.defaultdict:
            moved = self._either(dict(x), target, attempted, always=always)
            return collections.defaultdict(None, moved)
        return None


class LosesTheOrder(Careless, caught_by="containers.ordereddict"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is collections.OrderedDict:
            moved = self._either(dict(x), target, attempted, always=always)
            return collections.OrderedDict(sorted(moved.items(), reverse=True))
        return None


class LosesTheMaximalLength(Careless, caught_by="containers.deque"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is collections.deque:
            return collections.deque(self._either(list(x), target, attempted, always=always))
        return None


class LosesAttributes(Careless, caught_by="containers.subclass-attributes"):
    def _carelessly(self, x, target, attempted, always):
        if isinstance(x, dict) and getattr(x, "tag", None):
            return type(x)(self._either(dict(x), target, attempted, always=always))
        return None


class RunsConstructors(Careless, caught_by="containers.no-constructor-runs"):
    def _carelessly(self, x, target, attempted, always):
        if not dataclasses.is_dataclass(x):
            return None
        values = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        return type(x)(**self._either(values, target, attempted, always=always))


class StopsAtTheFirstLevel(Careless, caught_by="containers.nested"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is not dict:
            return None
        return {
            key: self._either(value, target, attempted, always=always)
            if isinstance(value, self.tensor_types)
            else value
            for key, value in x.items()
        }


class BreaksTies(Careless, caught_by="containers.tied-tensors"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is not dict:
            return None
        return {k: self._either(v, target, attempted, always=always) for k, v in x.items()}


class WritesIntoTheBatch(Careless, caught_by="containers.input-unchanged"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is dict:
            moved = super()._either(list(x.values()), target, attempted, always=always)
            x.update(zip(x, moved, strict=True))
            return dict(x)
        return None


class MovesOneAfterTheOther(Careless, caught_by="containers.all-or-nothing"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is dict and len(x) == 2:
            for key in x:
                x[key] = self._either(x[key], target, attempted, always=always)
            return x
        return None


class RebuildsWhatIsThere(Mutant, caught_by="containers.noop-returns-same-object"):
    def to(self, x, device):
        moved = super().to(x, device)
        return type(moved)(moved) if type(moved) in (dict, list) else moved


class RebuildsWhatIsThereInside(Careless, caught_by="containers.noop-inside"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is list and not always:
            return [self._either(item, target, attempted, always=always) for item in x]
        if type(x) is dict:
            return {k: self._either(v, target, attempted, always=always) for k, v in x.items()}
        return None


class PassesUnknownObjects(Careless, caught_by="containers.unknown-object-is-named"):
    def _carelessly(self, x, target, attempted, always):
        if isinstance(x, dict) and "meta" in x:
            known = {key: value for key, value in x.items() if key != "meta"}
            return {**self._either(known, target, attempted, always=always), "meta": x["meta"]}
        return None


class MovesTensorsOnly(Mutant, caught_by="containers.arrays-become-tensors"):
    def to(self, x, device):
        self.copy(x)  # which refuses arrays
        return super().to(x, device)


class DegradesContainersOfArrays(Mutant, caught_by="containers.arrays-keep-containers"):
    def to(self, x, device):
        if isinstance(x, Mapping):
            return {key: self.to(value, device) for key, value in x.items()}
        return [self.to(value, device) for value in x] if type(x) is list else super().to(x, device)


class BreaksTiesOfArrays(Mutant, caught_by="containers.arrays-stay-tied"):
    def to(self, x, device):
        if type(x) is dict:
            return {key: self.to(value, device) for key, value in x.items()}
        return super().to(x, device)


class ForgetsWhereTheArrayIs(Mutant, caught_by="containers.arrays-are-named"):
    def to(self, x, device):
        try:
            return super().to(x, device)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(error.attempted, "it is no tensor", error.fix) from error


class CopiesTiesTwice(Mutant, caught_by="copy.ties-are-copied-once"):
    def copy(self, x, device=None):
        super().copy(x, device)
        return super().copy(x, device)
