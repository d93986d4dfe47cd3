"""``load_into``: compare a file with an object, read the file, then put its values in place.

Three steps, in this order, so that an error leaves everything as it was:

1. each tensor is paired with one of the file, of the same name, shape and dtype;
2. all of them are read, each to the device of the one that it replaces;
3. they are put in place, which cannot fail.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from d2ldev.device import CPU
from d2ldev.errors import (
    CheckpointError,
    D2LDevError,
    UnsupportedValueError,
    describe,
    said,
    shown,
)
from d2ldev.files.description import (
    MODEL,
    SETS,
    STATE,
    Outline,
    Stored,
    flat,
    settings_of,
    unlisted_in,
)
from d2ldev.files.format.dtypes import bytes_of
from d2ldev.files.layouts import layouts_of_model
from d2ldev.files.load import Checkpoint, Wanted, opened
from d2ldev.files.tensors_by_name import TensorsByName, dtype_and_shape
from d2ldev.framework import Framework, Layout
from d2ldev.nesting.containers import Container
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, Kind
from d2ldev.nesting.walk import container_refusal, depth_refusal, flatten, joined, labelled, leaves
from d2ldev.operations.arguments import as_path, flag
from d2ldev.operations.other_backends import of_another_backend
from d2ldev.operations.placing import Inventory

# A file may have millions of names, and long ones. So an error lists as many, looks for the nearest
# one among so many, by so many of their last characters, and shows so many characters of one.
_SHOWN = 10
_COMPARED = 500
_TAIL = 60
_LONGEST = 1000


class Loaded(NamedTuple):
    """What ``load_into(..., strict=False)`` has done, with names as ``named_tensors`` gives them.

    Args:
        value: the object to use from then on.
        matched: what was read.
        missing: what the file lacks, which stays as it was; first what has no shape yet.
        unexpected: what only the file has.
    """

    value: Any
    matched: list[str]
    missing: list[str]
    unexpected: list[str]


def load_into(
    framework: Framework, obj: Any, source: Any, *, strict: bool = True, only: str = ""
) -> Any:
    """Read a file, or a mapping, into a nesting; see ``Backend.load_into``."""
    strict = flag("load parameters", "strict", strict)
    if isinstance(source, Mapping):
        given = TensorsByName(framework, source, f"load a mapping into {type(obj).__name__}")
        return _loaded(Fitting(framework, given, is_strict=strict), obj, given, only)
    path = as_path(source, "load_into")
    attempted = f"load {path} into {type(obj).__name__}"
    with opened(framework, path, attempted) as checkpoint:
        return _loaded(Fitting(framework, checkpoint, is_strict=strict), obj, checkpoint, only)


def _loaded(fitting: Fitting, obj: Any, checkpoint: Checkpoint | TensorsByName, only: str) -> Any:
    if not isinstance(only, str):
        problem = f"only={describe(only)} is no name"
        raise UnsupportedValueError(checkpoint.attempted, problem, "only='parts.model'")
    found = _under(checkpoint.outline, only) if only else checkpoint.outline
    if only and found is None:
        few = islice(flat(checkpoint.outline), _COMPARED)
        names = {part for name in few for part in _beginnings(name[: 5 * _TAIL])}
        nearest = _nearest(only.rstrip("."), sorted(names))
        raise CheckpointError(
            checkpoint.attempted,
            f"it has nothing under {only!r}",
            f"only={nearest or 'the name of a part of the file'!r}",
        )
    value = fitting.prepared(obj, found)()
    if fitting.is_strict:
        return value
    return Loaded(value, fitting.matched, fitting.missing, fitting.unexpected)


def _under(node: Any, name: str) -> Any:
    """Return the part of a file under a dotted name; None if there is none."""
    if not isinstance(node, Outline):
        return None
    inner: dict[Any, Any] = {}
    unlisted = set()
    beginning = f"{name}."
    settings = {
        each.removeprefix(beginning): text
        for each, text in node.settings.items()
        if each.startswith(beginning)
    }
    for label, child in node.children().items():
        if str(label) == name:
            return child
        if name.startswith(f"{label}."):
            found = _under(child, name.removeprefix(f"{label}."))
            if found is not None:
                return found
        elif str(label).startswith(f"{name}."):
            rest = str(label).removeprefix(f"{name}.")
            inner[rest] = child
            if label in node.unlisted:
                unlisted.add(rest)
    # The names of a model, or of another program's file; the number is that of no container.
    labels, items = list(inner), list(inner.values())
    part = replace(
        replace(node, type=MODEL, labels=labels, items=items, number=-1, layouts=None),
        unlisted=unlisted,
        settings=settings,
    )
    return part if inner else None


def _beginnings(name: str) -> Iterator[str]:
    """Yield the names of the parts that a tensor of this name is in."""
    while name := name.rpartition(".")[0]:
        yield name


def _first_name(name: str, again: Mapping[str, str], depth: int) -> str:
    """Return the name under which the tensor of a name was found first.

    Args:
        again: other names of objects, and for each the first.
        depth: how many dots they have at most.
    """
    parts = name.split(".", depth + 1)[:-1]  # a file's name may have millions
    for count in range(len(parts), 0, -1):
        part = ".".join(parts[:count])
        if part in again:
            rest = name.removeprefix(f"{part}.")
            return _first_name(joined(again[part], rest), again, depth)
    return name


def _nearest(name: str, names: Sequence[str]) -> str:
    """Return the most similar name; empty if none is similar."""
    tails = {other[-_TAIL:]: other for other in names[:_COMPARED]}
    return "".join(tails[tail] for tail in difflib.get_close_matches(name[-_TAIL:], tails, 1))


class _Pair(NamedTuple):
    """A tensor or an array, and what it is in the file.

    Args:
        value: the tensor or the array.
        stored: what it is in the file.
        layouts: its layout in the file, and here, if they differ.
    """

    value: Any
    stored: Stored
    layouts: tuple[Layout, Layout] | None


class Fitting:
    """One file, or one mapping, that is read into one nesting.

    With ``is_strict``, each tensor has to be on both sides.

    Attributes:
        matched, missing, unexpected: see ``Loaded``.
    """

    def __init__(
        self,
        framework: Framework,
        checkpoint: Checkpoint | TensorsByName,
        *,
        is_strict: bool = True,
    ) -> None:
        self.is_strict = is_strict
        self._framework = framework
        self._checkpoint = checkpoint
        self._attempted = checkpoint.attempted
        self.matched: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        # What is of another shape, dtype or kind.
        self._different: list[str] = []
        # (id of the tensor or the array, its name in the file) -> both.
        self._pairs: dict[tuple[int, str], _Pair] = {}
        # (the name of a place, the id of what is there) -> its name in the file. What is refilled
        # has one place, of no name.
        self._places: dict[tuple[str, int], str] = {}
        # Keys of two pairs of one place, whose values have to be equal.
        self._ties: list[tuple[tuple[int, str], tuple[int, str]]] = []
        # id of a model -> (its name, what it keeps).
        self._models: dict[int, tuple[str, Inventory]] = {}
        # id -> (the optimizer, its state in the file).
        self._states: dict[int, tuple[Any, Outline]] = {}
        # A container that is shared both here and in the file is compared once, and stays shared.
        self._compared: dict[tuple[int, int], Callable[[], Any]] = {}
        # The key of a pair -> the new tensor. One immutable tensor that stands in two places is
        # replaced by two, if the file has two.
        self._replaced: dict[tuple[int, str], Any] = {}
        # id of a container and of its new children -> what was made of them.
        self._made: dict[tuple[int, ...], Any] = {}
        # What leaves the models as they were.
        self._undo = ExitStack()

    def prepared(self, obj: Any, found: Any) -> Callable[[], Any]:
        """Compare a nesting with a part of the file, and read that; nothing is changed yet.

        Args:
            obj: an object like the one that was saved.
            found: the part: ``checkpoint.outline`` or a child of it.

        Returns:
            A function that puts what was read in place, and returns what to use from then on. It
            cannot fail.

        Raises:
            CheckpointError: if it does not fit.
            HeaderError: if the file is damaged.
        """
        try:
            with self._undo:
                remade = self._compare(obj, found, "")
                self._check()
                pairs = list(self._pairs.values())
                tensors = self._checkpoint.read([self._wanted(pair) for pair in pairs])
                self._check_ties(dict(zip(self._pairs, tensors, strict=True)))
                puts = [self._state_put(*state) for state in self._states.values()]
                self._check()
                put = self._putting(list(zip(pairs, tensors, strict=True)), puts, remade)
                self._undo.pop_all()
                return put
        except RecursionError:
            raise depth_refusal(self._attempted) from None

    def _check_ties(self, news: Mapping[tuple[int, str], Any]) -> None:
        """Note the tensors that are one here, and of which the file has two that differ."""
        for first, second in self._ties:
            if not np.array_equal(self._bits(news[first]), self._bits(news[second])):
                names = f"{first[1]} and {second[1]}"
                self._different.append(
                    f"{names} are one tensor here, and {self._checkpoint.called} has two values"
                )

    def _bits(self, x: Any) -> Any:
        return bytes_of(x if isinstance(x, np.ndarray) else self._framework.files.borrow(x))

    def _check(self) -> None:
        """Raise one error that names everything that does not fit, if anything does not."""
        told = []
        if self.missing and self.is_strict:
            told.append(f"it lacks {_some(self.missing)}")
        if self.unexpected and self.is_strict:
            told.append(f"it has unexpected {_some(self.unexpected)}")
            nearest = [(name, _nearest(name, self.unexpected)) for name in self.missing[:_SHOWN]]
            told += [f"{_short(name)} may be {_short(other)}" for name, other in nearest if other]
        if self._different:
            told.append(f"misfits: {_some(self._different)}")
        if told:
            writer = self._checkpoint.writer
            is_ours = writer in (None, self._framework.name)
            by = "" if is_ours else f", which the {_short(writer)} backend wrote"
            part = self._fitting_part()
            fix = f"{self._checkpoint.look}{by}"
            if part:
                fix = f"backend.load_into(..., only={shown(part)}), or {fix}"
            # Such as a module whose parameters are kept apart from it.
            elif self.unexpected and not (self._pairs or self.missing or self._different):
                told.append("what it is loaded into holds no tensors")
                fix = f"give what holds them: params = backend.load_into(params, ...); {fix}"
            raise CheckpointError(self._attempted, f"{'; '.join(told)}; nothing was changed", fix)

    def _fitting_part(self) -> str:
        """Return the part of the file that would fit; empty if there is none."""
        if not self.missing or len(self.missing) > len(self.unexpected):
            return ""
        ends = [other for other in self.unexpected if other.endswith(f".{self.missing[0]}")]
        part = ends[0].removesuffix(f".{self.missing[0]}") if len(ends) == 1 else ""
        is_whole = {f"{part}.{name}" for name in self.missing} == set(self.unexpected)
        return part if is_whole else ""

    # -- comparing --------------------------------------------------------------------------------

    def _compare(self, x: Any, found: Any, path: str) -> Callable[[], Any]:
        """Compare a value with its part of the file; return a function that gives its new value."""
        if not isinstance(found, Outline):
            return self._compare_once(x, found, path)
        key = (id(x), found.number)
        if key not in self._compared:
            self._compared[key] = self._compare_once(x, found, path)
        return self._compared[key]

    def _compare_once(self, x: Any, found: Any, path: str) -> Callable[[], Any]:
        kind = self._framework.kinds[type(x)]
        if kind is PLAIN or isinstance(x, np.generic):
            return self._compare_plain(x, found, path)
        if kind is TENSOR or type(x) is np.ndarray:
            self._pair(x, found, None, path, path)
        elif kind is OBJECT and self._framework.files.state(x) is not None:
            if isinstance(found, Outline) and found.type == STATE:
                self._states[id(x)] = (x, found)
                self.matched.append(path)
            else:
                self._differs(path, f"is a {type(x).__name__}", found)
        elif isinstance(kind, Kind) and kind is not OBJECT:
            foreign = of_another_backend(self._framework, self._attempted, x, path)
            raise foreign or UnsupportedValueError(
                self._attempted,
                f"the {type(x).__name__} at {path or 'the top'} is in no file",
                "backend.load_into(obj, path), where obj has what backend.save takes: tensors, "
                "models, optimizers, numbers, text, and containers of them",
            )
        elif not isinstance(found, Outline):
            self._differs(path, f"is a {type(x).__name__}", found)
        elif isinstance(kind, Kind) or layouts_of_model(self._framework, x) is not None:
            self._compare_names(x, found, path)
        else:
            # What is an attribute beside the items is in no file.
            return self._compare_container(x, kind.in_files, found, path)
        return lambda: self._remade(x, path)

    def _compare_names(self, x: Any, found: Outline, path: str) -> None:
        """Compare a model, or any object and another program's file, by the tensors' names."""
        stored, theirs = flat(found), found.layouts or {}
        plain_name, passed = self._framework.files.plain_name, unlisted_in(found)
        plain = {plain_name(name): each for name, each in stored.items()}
        if len(plain) == len(stored):  # else two of them would be one
            stored, passed = plain, set(map(plain_name, passed))
        by_role = {layout.role: name for name, layout in theirs.items()}
        mine = layouts_of_model(self._framework, x) or {}
        if id(x) in self._models:
            other = self._models[id(x)][0]
            self._differs(path, f"is the {type(x).__name__} that is {other}, too", found)
        is_model = isinstance(self._framework.kinds[type(x)], Kind)
        if is_model:
            shapes = {name: each.shape for name, each in stored.items()}
            dtypes = {name: each.dtype for name, each in stored.items()}
            complete = self._framework.files.complete
            try:
                lacking = complete(x, shapes, dtypes, found.inputs, self._undo.callback)
            except D2LDevError:
                raise
            except Exception as error:  # whatever the file's shapes and arguments make it raise
                self._different.append(f"{path or 'the top'}: {_short(error)}")
                return
            self.missing += [joined(path, name) for name in lacking]
        named = self._named(x, path)
        # An object's tensors have other names where it has; they may be in the file.
        again = self._models[id(x)][1].again
        depth = max((name.count(".") for name in again), default=0)
        firsts = {name: _first_name(name, again, depth) for name in stored} if again else {}
        named |= {name: named[first] for name, first in firsts.items() if first in named}
        unlisted = self._models[id(x)][1].unlisted
        unlisted |= {name for name, first in firsts.items() if first in unlisted}
        others = self._of_other_settings(x, named, unlisted, found, path)
        named = {
            name: value
            for name, value in named.items()
            if name not in unlisted or (name not in others and self._fits(value, stored.get(name)))
        }
        # What neither side needs is passed over, if it is on one side only, or differs.
        stored = {
            name: each
            for name, each in stored.items()
            if name in named or name not in passed | unlisted
        }
        free: AbstractSet[str] = frozenset()
        if is_model:
            files = self._framework.files
            strange = frozenset() if self.is_strict else files.strangers(x, named, stored.keys())
            free = frozenset() if strange else files.dispensable(x, named, stored.keys())
            self.unexpected += [joined(path, name) for name in stored if name in strange]
            stored = {name: each for name, each in stored.items() if name not in strange}
            named = {name: value for name, value in named.items() if name not in free}
        its_names = {
            name: by_role.get(mine[name].role, name) if name in mine else name for name in named
        }
        firsts = {name: firsts.get(name, name) for name in named}
        places = {
            name: ("" if is_model or self._is_refilled(value) else firsts[name], id(value))
            for name, value in named.items()
        }
        # A tensor with several names is in most files once, under one of them.
        ties = {
            places[name]: its_names[name] for name in reversed(named) if its_names[name] in stored
        }
        used = set()
        for name, value in named.items():
            its_name, layouts = its_names[name], None
            if its_name not in stored:
                its_name = ties.get(places[name], its_name)
            elif name in mine and mine[name].role in by_role and theirs[its_name] != mine[name]:
                layouts = (theirs[its_name], mine[name])
            used.add(its_name)
            full_name, first = joined(path, name), joined(path, firsts[name])
            if its_name in stored:
                self._pair(value, stored[its_name], layouts, full_name, first)
            else:
                self.missing.append(full_name)
        self.unexpected += [joined(path, name) for name in stored if name not in used | free]

    def _of_other_settings(
        self,
        x: Any,
        named: Collection[str],
        unlisted: AbstractSet[str],
        found: Outline,
        path: str,
    ) -> set[str]:
        """Return the names of what is in containers that have other settings in the file.

        Notes those settings, if one of the names is needed.

        Args:
            named: the names in the model ``x``.
            unlisted: the names of those that are not needed.
            found, path: the model in the file, and its name.
        """
        if not found.settings:
            return set()
        others: set[str] = set()
        mine = settings_of(self._framework, self._models[id(x)][1])
        for name, (place, text) in mine.items():
            theirs = found.settings.get(name, text)
            if theirs != text:
                inner = {each for each in named if each.startswith(f"{place}.")}
                others |= inner
                if not inner <= unlisted:
                    told = f"{joined(path, name)} is {text}"
                    self._different.append(f"{told}, and {self._checkpoint.called} has {theirs}")
        return others

    def _fits(self, x: Any, found: Stored | None) -> bool:
        if found is None:
            return False
        try:
            return dtype_and_shape(self._framework, x) == (found.dtype, found.shape)
        except (D2LDevError, RuntimeError):  # it has no shape
            return False

    def _is_refilled(self, x: Any) -> bool:
        return type(x) is not np.ndarray and self._framework.models.is_refilled(x)

    def _named(self, x: Any, path: str) -> dict[str, Any]:
        """Return the tensors and arrays that are read by their names."""
        kinds, attempted = self._framework.kinds, self._attempted
        found = leaves(x, kinds, "", attempted)
        arrays = {name: leaf for name, leaf, _ in found if type(leaf) is np.ndarray}
        # ``Inventory`` refuses arrays, and a model has none.
        flattened = flatten(x, kinds, attempted)
        others = flattened.others.items()
        without = {key: None for key, x in others if isinstance(x, (np.ndarray, np.generic))}
        learned = Inventory(self._framework, flattened.unflatten(without), attempted, is_saved=True)
        self._models[id(x)] = (path, learned)
        return {**dict(learned.entries), **arrays}

    def _compare_plain(self, x: Any, found: Any, path: str) -> Callable[[], Any]:
        is_plain = not isinstance(found, (Outline, Stored))
        if not is_plain or (type(x) is not type(found) and x is not None and found is not None):
            self._differs(path, f"is a {type(x).__name__}", found)
        is_same = is_plain and type(x) is type(found) and x == found
        return lambda: x if is_same else found

    def _compare_container(
        self, x: Any, kind: Container, found: Outline, path: str
    ) -> Callable[[], Any]:
        if found.type in SETS or isinstance(x, AbstractSet):
            if found.type not in SETS or not isinstance(x, AbstractSet):
                self._differs(path, f"is a {type(x).__name__}", found)
                return lambda: x
            # The elements of a set have no names, and have another order in the next process.
            is_same = {(type(e), e) for e in x} == {(type(e), e) for e in found.items}
            return cache(lambda: x if is_same else self._rebuilt(x, kind, list(found.items), path))
        mine = dict(labelled(x, kind, path, self._attempted))
        theirs = found.children()
        is_of_names = found.type == MODEL or self._checkpoint.writer is None
        if is_of_names and list(mine) != list(theirs):
            self._compare_names(x, found, path)
            return lambda: self._remade(x, path)
        self.missing += [joined(path, label) for label in mine if label not in theirs]
        self.unexpected += [joined(path, label) for label in theirs if label not in mine]
        parts = {
            label: self._compare(child, theirs[label], joined(path, label))
            for label, child in mine.items()
            if label in theirs
        }

        @cache
        def remade() -> Any:
            new = [parts[label]() if label in parts else old for label, old in mine.items()]
            return x if all(map(is_, new, mine.values())) else self._rebuilt(x, kind, new, path)

        return remade

    def _rebuilt(self, x: Any, kind: Container, new: list[Any], path: str) -> Any:
        try:
            return kind.rebuild(x, new)
        except Exception as error:  # whatever a class's own methods raise
            raise container_refusal(x, "made again", path, self._attempted, error) from error

    def _differs(self, path: str, mine: str, found: Any) -> None:
        told = f"{shown(found)}, of type {type(found).__name__}"
        if isinstance(found, Stored):
            told = f"{found.dtype} {found.shape}"
        elif isinstance(found, Outline):
            told = f"a {found.type}"
        self._different.append(
            f"{path or 'the top'} {mine}, and {self._checkpoint.called} has {told}"
        )

    def _pair(
        self, x: Any, found: Any, layouts: tuple[Layout, Layout] | None, path: str, first: str
    ) -> None:
        """Note that a tensor is read.

        Args:
            x, found, layouts: see ``_Pair``.
            path, first: its name, and that under which it was found first.
        """
        try:
            dtype, shape = dtype_and_shape(self._framework, x)
        except RuntimeError as error:  # a lazy module's, before its first batch
            if self.is_strict:
                self._differs(path, f"has no shape yet ({said(error)})", found)
            else:
                self.missing.append(path)
                self.unexpected.append(path)
            return
        if not isinstance(found, Stored):
            self._differs(path, f"is {dtype} {shape}", found)
            return
        theirs, wanted = found.shape, shape
        if layouts is not None:
            theirs, wanted = (layout.shape for layout in layouts)
        # A file may have a layout of another tensor.
        is_lie = math.prod(found.shape) != math.prod(theirs)
        if is_lie or (dtype, wanted) != (found.dtype, theirs):
            self._differs(path, f"is {dtype} {shape}", found)
            return
        self._pairs.setdefault((id(x), found.name), _Pair(x, found, layouts))
        place = ("" if self._is_refilled(x) else first, id(x))
        name = self._places.setdefault(place, found.name)
        if name != found.name:
            self._ties.append(((id(x), name), (id(x), found.name)))
        self.matched.append(path)

    # -- reading ----------------------------------------------------------------------------------

    def _wanted(self, pair: _Pair) -> Wanted:
        if isinstance(pair.value, np.ndarray):
            return Wanted(pair.stored._replace(kind="array"), CPU)
        stored = pair.stored._replace(kind="tensor")
        device = self._framework.tensors.device_of(pair.value)
        if pair.layouts is None:
            return Wanted(stored, device)
        theirs, mine = pair.layouts
        shape = tuple(int(size) for size in pair.value.shape)

        def convert(array: Any) -> Any:
            return np.ascontiguousarray(mine.native(theirs.canonical(array), shape))

        return Wanted(stored, device, convert)

    def _state_put(self, optimizer: Any, found: Outline) -> Any:
        # On the CPU, because the optimizer decides which part of its state belongs where.
        assert isinstance(self._checkpoint, Checkpoint)  # a mapping has no states
        state = self._checkpoint.part(found)
        try:
            return self._framework.files.checked_state(optimizer, state)
        except D2LDevError:
            raise
        except Exception as error:  # whatever a state that is none makes the backend raise
            name = type(optimizer).__name__
            self._different.append(f"the state is none of this {name}: {_short(error)}")
            return None

    # -- putting in place -------------------------------------------------------------------------

    def _putting(
        self, news: list[tuple[_Pair, Any]], puts: list[Any], remade: Callable[[], Any]
    ) -> Callable[[], Any]:
        framework = self._framework
        refilled = []
        for pair, new in news:
            if self._is_refilled(pair.value):
                refilled.append((pair.value, new))
            else:
                self._replaced[id(pair.value), pair.stored.name] = new
        parts = [
            (value, self._remade(value, joined(path, name)), put, key)
            for path, learned in self._models.values()
            for name, value, put, key in learned.parts
        ]
        placed = remade()

        def put() -> Any:
            for tensor, new in refilled:
                framework.models.write(tensor, new)
            for value, new, put, key in parts:
                if new is not value:
                    put(key, new)
            for put_state in puts:
                put_state()
            for _, learned in self._models.values():
                for loaded in learned.objects:
                    framework.models.finish(loaded)
            return placed

        return put

    def _remade(self, x: Any, path: str) -> Any:
        """Return a nesting with the tensors that were read; what nothing was read for stays."""
        kind = self._framework.kinds[type(x)]
        if isinstance(kind, Kind):
            return self._replaced.get((id(x), self._places.get((path, id(x)), "")), x)
        kind = kind.items or kind
        old = labelled(x, kind, path, self._attempted)
        new = [self._remade(child, joined(path, label)) for label, child in old]
        if all(child is new_child for new_child, (_, child) in zip(new, old, strict=True)):
            return x
        # A container that is shared stays shared.
        key = (id(x), *map(id, new))
        if key not in self._made:
            self._made[key] = self._rebuilt(x, kind, new, path)
        return self._made[key]


def _short(text: object) -> str:
    """Return what a file may have made long, or of characters that cannot be printed."""
    told = str(text)
    if len(told) > _LONGEST:
        told = f"{told[: _LONGEST // 2]}...{told[-_LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else "?" for c in told)


def _some(names: Sequence[str]) -> str:
    text = ", ".join(map(_short, names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{text} and {more} more" if more > 0 else text
