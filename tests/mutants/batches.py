"""Mutants that take batches apart and put them together wrongly."""

from __future__ import annotations

import collections
import dataclasses

from mutants.base import Mutant


class Careless(Mutant):
    """Moves a nesting by hand: what the subclasses say is done instead of the right thing."""

    def _copied(self, x, target, attempted, *, always):
        moved = self._carelessly(x, target, attempted, always)
        return super()._copied(x, target, attempted, always=always) if moved is None else moved

    def _carelessly(self, x, target, attempted, always):
        """The wrong result; None where it would be right."""


class DegradesNamedtuples(Careless, caught_by="containers.namedtuple"):
    def _carelessly(self, x, target, attempted, always):
        if hasattr(x, "_fields"):
            return tuple(self._copied(list(x), target, attempted, always=always))
        return None


class TurnsTuplesIntoLists(Careless, caught_by="containers.list-and-tuple"):
    def _carelessly(self, x, target, attempted, always):
        return self._copied(list(x), target, attempted, always=always) if type(x) is tuple else None


class SortsKeys(Careless, caught_by="containers.dict"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is not dict or list(x) == sorted(x, key=str):
            return None
        return self._copied(dict(sorted(x.items(), key=str)), target, attempted, always=always)


class LosesTheFactory(Careless, caught_by="containers.defaultdict"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is collections.defaultdict:
            moved = self._copied(dict(x), target, attempted, always=always)
            return collections.defaultdict(None, moved)
        return None


class LosesTheOrder(Careless, caught_by="containers.ordereddict"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is collections.OrderedDict:
            moved = self._copied(dict(x), target, attempted, always=always)
            return collections.OrderedDict(sorted(moved.items(), reverse=True))
        return None


class LosesTheMaximalLength(Careless, caught_by="containers.deque"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is collections.deque:
            return collections.deque(self._copied(list(x), target, attempted, always=always))
        return None


class LosesAttributes(Careless, caught_by="containers.subclass-attributes"):
    def _carelessly(self, x, target, attempted, always):
        if isinstance(x, dict) and getattr(x, "tag", None):
            return type(x)(self._copied(dict(x), target, attempted, always=always))
        return None


class RunsConstructors(Careless, caught_by="containers.no-constructor-runs"):
    def _carelessly(self, x, target, attempted, always):
        if not dataclasses.is_dataclass(x):
            return None
        values = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        return type(x)(**self._copied(values, target, attempted, always=always))


class StopsAtTheFirstLevel(Careless, caught_by="containers.nested"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is not dict:
            return None
        return {
            key: self._copied(value, target, attempted, always=always)
            if isinstance(value, self.tensor_types)
            else value
            for key, value in x.items()
        }


class BreaksTies(Careless, caught_by="containers.tied-tensors"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is not dict:
            return None
        return {k: self._copied(v, target, attempted, always=always) for k, v in x.items()}


class WritesIntoTheBatch(Careless, caught_by="containers.input-unchanged"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is dict:
            moved = super()._copied(list(x.values()), target, attempted, always=always)
            x.update(zip(x, moved, strict=True))
            return dict(x)
        return None


class MovesOneAfterTheOther(Careless, caught_by="containers.all-or-nothing"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is dict and len(x) == 2:
            for key in x:
                x[key] = self._copied(x[key], target, attempted, always=always)
            return x
        return None


class RebuildsWhatIsThere(Mutant, caught_by="containers.noop-returns-same-object"):
    def to(self, x, device):
        moved = super().to(x, device)
        return type(moved)(moved) if type(moved) in (dict, list) else moved


class RebuildsWhatIsThereInside(Careless, caught_by="containers.noop-inside"):
    def _carelessly(self, x, target, attempted, always):
        if type(x) is list and not always:
            return [self._copied(item, target, attempted, always=always) for item in x]
        if type(x) is dict:
            return {k: self._copied(v, target, attempted, always=always) for k, v in x.items()}
        return None


class PassesUnknownObjects(Careless, caught_by="containers.unknown-object-is-named"):
    def _carelessly(self, x, target, attempted, always):
        if isinstance(x, dict) and "meta" in x:
            known = {key: value for key, value in x.items() if key != "meta"}
            return {**self._copied(known, target, attempted, always=always), "meta": x["meta"]}
        return None


class CopiesTiesTwice(Mutant, caught_by="copy.ties-are-copied-once"):
    def copy(self, x, device=None):
        super().copy(x, device)
        return super().copy(x, device)
