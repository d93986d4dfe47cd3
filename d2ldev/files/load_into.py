"""``load_into``: a file is compared with what it is read into, then read, then put in place.

Three steps, in this order, so that an error leaves everything as it was:

1. each tensor is paired with one of the file, of the same name, shape and dtype;
2. all of them are read, each to the device of the one that it replaces;
3. they are put in place, which cannot fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError
from d2ldev.files import nodes
from d2ldev.files.load import Checkpoint, Stored, Wanted, opened
from d2ldev.files.matching import Conversion, flat, matched
from d2ldev.files.misfits import Misfits
from d2ldev.files.nesting import brief, name_of
from d2ldev.files.objects import Learned
from d2ldev.files.remaking import Remaking
from d2ldev.files.restoring import Outline
from d2ldev.nesting.containers import Container
from d2ldev.nesting.walk import (
    OBJECT,
    PLAIN,
    TENSOR,
    Kind,
    flatten,
    flatten_all,
    joined,
    leaves,
    too_deep,
)

if TYPE_CHECKING:
    from d2ldev.interface import Backend


def load_into(backend: Backend, obj: Any, path: str) -> Any:
    """Read a file into a nesting; see ``Backend.load_into``."""
    attempted = f"load {path} into {type(obj).__name__}"
    with opened(backend, path, attempted) as checkpoint:
        try:
            return _Fitting(backend, checkpoint, attempted).result(obj)
        except RecursionError:
            raise too_deep(attempted) from None


class _Pair(NamedTuple):
    """A tensor or an array, and what it is in the file."""

    value: Any
    stored: Stored
    conversion: Conversion | None


class _Fitting:
    """One file that is read into one nesting."""

    def __init__(self, backend: Backend, checkpoint: Checkpoint, attempted: str) -> None:
        self._backend = backend
        self._checkpoint = checkpoint
        self._attempted = attempted
        self._misfits = Misfits()
        self._pairs: dict[int, _Pair] = {}
        # id -> (the model, what it keeps).
        self._models: dict[int, tuple[Any, Learned]] = {}
        # id -> (the optimizer, its state in the file).
        self._states: dict[int, tuple[Any, Outline]] = {}
        self._compared: set[tuple[int, int]] = set()

    def result(self, obj: Any) -> Any:
        found = self._checkpoint.outline
        self._compare(obj, found, "")
        hint = "backend.load(path) shows what is in the file" + (
            f", which the {self._checkpoint.writer} backend wrote"
            if self._checkpoint.writer not in (None, self._backend.name)
            else ""
        )
        if (error := self._misfits.error(self._attempted, hint)) is not None:
            raise error
        pairs = list(self._pairs.values())
        tensors = self._checkpoint.read(self._wanted(pair) for pair in pairs)
        news = list(zip(pairs, tensors, strict=True))
        rows = self._checkpoint.rows(self._values_of_states())
        puts = [self._state_put(*state, rows) for state in self._states.values()]
        if (error := self._misfits.error(self._attempted, hint)) is not None:
            raise error
        return self._put(obj, news, rows, puts)

    # -- comparing ------------------------------------------------------------------------

    def _compare(self, x: Any, found: Any, path: str) -> None:
        if isinstance(found, Outline):
            if (id(x), found.number) in self._compared:
                return
            self._compared.add((id(x), found.number))
        backend, kind = self._backend, self._backend.kinds[type(x)]
        if kind is TENSOR or type(x) is np.ndarray:
            self._pair(x, found, None, path)
        elif kind is OBJECT or self._is_model(x, kind):
            self._compare_object(x, found, path)
        elif kind is PLAIN or isinstance(x, np.generic):
            self._compare_plain(x, found, path)
        elif isinstance(kind, Kind):
            raise UnsupportedValueError(
                self._attempted,
                f"{brief(x)}, of type {type(x).__name__}, at {path or 'the top'} is in no file",
                f"load what it holds: x = backend.load_into(x, path); see {backend.name}'s tensors",
            )
        else:
            self._compare_container(x, kind, found, path)

    def _is_model(self, x: Any, kind: Any) -> bool:
        return not isinstance(kind, Kind) and self._backend._layouts(x) is not None

    def _compare_object(self, x: Any, found: Any, path: str) -> None:
        if self._backend._state(x) is None:
            self._compare_names(x, found, path)
        elif isinstance(found, Outline) and found.type == nodes.STATE:
            self._states[id(x)] = (x, found)
        else:
            self._differs(path, f"is a {type(x).__name__}", found)

    def _compare_names(self, x: Any, found: Any, path: str) -> None:
        """A model, or whatever is read from a file of names: by the names of its tensors."""
        if not isinstance(found, Outline):
            self._differs(path, f"is a {type(x).__name__}", found)
            return
        mine = self._named(x)
        match = matched(self._backend._layouts(x), flat(found), found.layouts, list(mine))
        self._misfits.missing += [joined(path, name) for name in match.missing]
        self._misfits.unexpected += [joined(path, name) for name in match.unexpected]
        for name, (stored, conversion) in match.pairs.items():
            self._pair(mine[name], stored, conversion, joined(path, name))

    def _named(self, x: Any) -> dict[str, Any]:
        """The tensors and arrays that are read by their names."""
        kinds, attempted = self._backend.kinds, self._attempted
        arrays = {
            name: leaf
            for name, leaf, _ in leaves(x, kinds, "", attempted)
            if type(leaf) is np.ndarray
        }

        # A model has no arrays, and what looks for its tensors refuses them.
        flattened = flatten(x, kinds, attempted)
        others = flattened.others.items()
        without = {key: None for key, x in others if isinstance(x, (np.ndarray, np.generic))}
        learned = Learned(self._backend, flattened.unflatten(without), attempted)
        self._models[id(x)] = (x, learned)
        return {**dict(learned.entries), **arrays}

    def _compare_plain(self, x: Any, found: Any, path: str) -> None:
        is_plain = not isinstance(found, (Outline, Stored))
        if not is_plain or (type(x) is not type(found) and x is not None and found is not None):
            self._differs(path, f"is a {type(x).__name__}", found)

    def _compare_container(self, x: Any, kind: Container, found: Any, path: str) -> None:
        if not isinstance(found, Outline):
            self._differs(path, f"is a {type(x).__name__}", found)
            return
        if found.type in nodes.SETS or isinstance(x, (set, frozenset)):
            # The elements of a set have no names, and another order in the next process.
            if found.type not in nodes.SETS or flat(found):
                self._differs(path, f"is a {type(x).__name__}", found)
            return
        mine = dict(zip(kind.labels(x), kind.children(x), strict=True))
        is_of_names = found.type == nodes.MODEL or self._checkpoint.writer is None
        if is_of_names and list(mine) != list(found.children):
            self._compare_names(x, found, path)
            return
        self._misfits.missing += [
            joined(path, name_of(label)) for label in mine if label not in found.children
        ]
        self._misfits.unexpected += [
            joined(path, name_of(label)) for label in found.children if label not in mine
        ]
        for label, child in mine.items():
            if label in found.children:
                self._compare(child, found.children[label], joined(path, name_of(label)))

    def _differs(self, path: str, mine: str, found: Any) -> None:
        self._misfits.different.append(
            f"{path or 'the top'} {mine}, and the file has {_told(found)}"
        )

    def _pair(self, x: Any, found: Any, conversion: Conversion | None, path: str) -> None:
        try:
            dtype, shape = self._dtype_and_shape(x)
        except RuntimeError as error:  # a lazy module's, before its first batch
            self._differs(path, f"has no shape yet ({error})", found)
            return
        if not isinstance(found, Stored):
            self._differs(path, f"is {dtype} {shape}", found)
            return
        theirs = found.shape if conversion is None else conversion.shape(found.shape)
        wanted = shape if conversion is None else conversion.to.shape
        if (dtype, wanted) != (found.dtype, theirs):
            self._differs(path, f"is {dtype} {shape}", found)
        elif self._pairs.setdefault(id(x), _Pair(x, found, conversion)).stored.name != found.name:
            self._differs(path, "is one tensor under two names", found)

    def _dtype_and_shape(self, x: Any) -> tuple[str, tuple[int, ...]]:
        if isinstance(x, np.ndarray):
            return x.dtype.name, x.shape
        dtype = self._backend.dtype_of(x)
        if self._backend._numbers_dtype(dtype) is not None:
            return dtype, self._backend._to_numpy(x).shape
        return dtype, tuple(int(size) for size in x.shape)

    # -- reading --------------------------------------------------------------------------

    def _wanted(self, pair: _Pair) -> Wanted:
        if isinstance(pair.value, np.ndarray):
            return Wanted(pair.stored._replace(kind=nodes.ARRAY), CPU)
        stored = pair.stored._replace(kind=nodes.TENSOR)
        device, conversion = self._backend.device_of(pair.value), pair.conversion
        if conversion is None:
            return Wanted(stored, device)
        shape = tuple(int(size) for size in pair.value.shape)

        def convert(array: Any) -> Any:
            return np.ascontiguousarray(conversion(array, shape))

        return Wanted(stored, device, convert)

    def _values_of_states(self) -> dict[Stored, Any]:
        """The tensors of optimizers, on the CPU: what of them belongs where, they know."""
        states = [outline for _, outline in self._states.values()]
        wanted = dict.fromkeys(stored for state in states for stored in flat(state).values())
        for stored in wanted:
            if (refusal := self._checkpoint.refusal(stored)) is not None:
                raise refusal
        tensors = self._checkpoint.read(Wanted(stored, CPU) for stored in wanted)
        return dict(zip(wanted, tensors, strict=True))

    def _state_put(self, optimizer: Any, outline: Outline, rows: list[Any]) -> Any:
        try:
            return self._backend._state_put(optimizer, rows[outline.number])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            name = type(optimizer).__name__
            self._misfits.different.append(f"the state is none of this {name}: {error}")
            return None

    # -- putting in place -----------------------------------------------------------------

    def _put(
        self, obj: Any, news: list[tuple[_Pair, Any]], rows: list[Any], puts: list[Any]
    ) -> Any:
        backend = self._backend
        refilled = []
        replaced: dict[int, Any] = {}
        for pair, new in news:
            is_tensor = not isinstance(pair.value, np.ndarray)
            if is_tensor and backend._is_refilled(pair.value):
                refilled.append((pair.value, new))
            else:
                replaced[id(pair.value)] = new

        parts = [part for _, learned in self._models.values() for part in learned.parts]
        models = [("", model) for model, _ in self._models.values()]
        nestings = [*[(name, part.value) for name, part in parts], *models]
        remade = flatten_all(nestings, backend.kinds, self._attempted).unflatten_all(dict(replaced))
        for (_, model), new in zip(models, remade[len(parts) :], strict=True):
            replaced[id(model)] = new
        placed = Remaking(backend, self._attempted, replaced, rows).of(
            obj, self._checkpoint.outline
        )
        # Nothing from here on can fail.
        for tensor, new in refilled:
            backend._write(tensor, new)
        for (_, part), value in zip(parts, remade, strict=False):
            if value is not part.value:
                part.put(value)
        for put in puts:
            put()
        for _, learned in self._models.values():
            for loaded in learned.objects:
                backend._finish(loaded)
        return placed


def _told(found: Any) -> str:
    if isinstance(found, Stored):
        return f"{found.dtype} {found.shape}"
    if isinstance(found, Outline):
        return f"a {found.type}"
    return f"{brief(found)}, of type {type(found).__name__}"
