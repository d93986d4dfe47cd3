"""``load_into``: a file is compared with what it is read into, then read, then put in place.

Three steps, in this order, so that an error leaves everything as it was:

1. each tensor is paired with one of the file, of the same name, shape and dtype;
2. all of them are read, each to the device of the one that it replaces;
3. they are put in place, which cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError
from d2ldev.files import nodes
from d2ldev.files.layouts import layouts_of_model
from d2ldev.files.load import Checkpoint, Wanted, opened
from d2ldev.files.matching import Conversion, matched
from d2ldev.files.misfits import Misfits
from d2ldev.files.nesting import brief, name_of
from d2ldev.files.objects import Learned
from d2ldev.files.paths import PathLike, as_path
from d2ldev.files.remaking import Remaking
from d2ldev.files.restoring import Outline, Stored, flat
from d2ldev.framework import Framework
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


def load_into(framework: Framework, obj: Any, path: PathLike) -> Any:
    """Read a file into a nesting; see ``Backend.load_into``."""
    path = as_path(path, "load")
    attempted = f"load {path} into {type(obj).__name__}"
    with opened(framework, path, attempted) as checkpoint:
        return prepared(framework, obj, checkpoint, checkpoint.outline)()


def prepared(
    framework: Framework, obj: Any, checkpoint: Checkpoint, found: Any
) -> Callable[[], Any]:
    """Compare a nesting with a part of a file, and read it; nothing is changed yet.

    Args:
        framework: whose tensors they are.
        obj: what is like what was saved.
        checkpoint: the open file.
        found: the part, as ``checkpoint.outline`` or a child of it.

    Returns:
        A function that puts what was read in place and returns what to use from then on. It cannot
        fail.

    Raises:
        CheckpointError: if it does not fit.
        HeaderError: if the file is damaged.
    """
    try:
        return _Fitting(framework, checkpoint).prepared(obj, found)
    except RecursionError:
        raise too_deep(checkpoint.attempted) from None


class _Pair(NamedTuple):
    """A tensor or an array, and what it is in the file."""

    value: Any
    stored: Stored
    conversion: Conversion | None


class _Fitting:
    """One file that is read into one nesting."""

    def __init__(self, framework: Framework, checkpoint: Checkpoint) -> None:
        self._framework = framework
        self._checkpoint = checkpoint
        self._attempted = checkpoint.attempted
        self._misfits = Misfits()
        self._pairs: dict[int, _Pair] = {}
        # id -> (the model, what it keeps).
        self._models: dict[int, tuple[Any, Learned]] = {}
        # id -> (the optimizer, its state in the file).
        self._states: dict[int, tuple[Any, Outline]] = {}
        self._compared: set[tuple[int, int]] = set()

    def prepared(self, obj: Any, found: Any) -> Callable[[], Any]:
        self._compare(obj, found, "")
        hint = "backend.load(path) shows what is in the file" + (
            f", which the {self._checkpoint.writer} backend wrote"
            if self._checkpoint.writer not in (None, self._framework.name)
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
        return self._putting(obj, found, news, rows, puts)

    # -- comparing ------------------------------------------------------------------------

    def _compare(self, x: Any, found: Any, path: str) -> None:
        if isinstance(found, Outline):
            if (id(x), found.number) in self._compared:
                return
            self._compared.add((id(x), found.number))
        framework, kind = self._framework, self._framework.kinds[type(x)]
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
                "load what it holds: x = backend.load_into(x, path)",
            )
        else:
            self._compare_container(x, kind, found, path)

    def _is_model(self, x: Any, kind: Any) -> bool:
        return not isinstance(kind, Kind) and layouts_of_model(self._framework, x) is not None

    def _compare_object(self, x: Any, found: Any, path: str) -> None:
        if self._framework.files.state(x) is None:
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
        match = matched(
            layouts_of_model(self._framework, x), flat(found), found.layouts, list(mine)
        )
        self._misfits.missing += [joined(path, name) for name in match.missing]
        self._misfits.unexpected += [joined(path, name) for name in match.unexpected]
        for name, (stored, conversion) in match.pairs.items():
            self._pair(mine[name], stored, conversion, joined(path, name))

    def _named(self, x: Any) -> dict[str, Any]:
        """The tensors and arrays that are read by their names."""
        kinds, attempted = self._framework.kinds, self._attempted
        arrays = {
            name: leaf
            for name, leaf, _ in leaves(x, kinds, "", attempted)
            if type(leaf) is np.ndarray
        }

        # A model has no arrays, and what looks for its tensors refuses them.
        flattened = flatten(x, kinds, attempted)
        others = flattened.others.items()
        without = {key: None for key, x in others if isinstance(x, (np.ndarray, np.generic))}
        learned = Learned(self._framework, flattened.unflatten(without), attempted)
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
        dtype = self._framework.tensors.dtype_of(x)
        if self._framework.files.numbers_dtype(dtype) is not None:
            return dtype, self._framework.tensors.to_numpy(x).shape
        return dtype, tuple(int(size) for size in x.shape)

    # -- reading --------------------------------------------------------------------------

    def _wanted(self, pair: _Pair) -> Wanted:
        if isinstance(pair.value, np.ndarray):
            return Wanted(pair.stored._replace(kind=nodes.ARRAY), CPU)
        stored = pair.stored._replace(kind=nodes.TENSOR)
        device, conversion = self._framework.tensors.device_of(pair.value), pair.conversion
        if conversion is None:
            return Wanted(stored, device)
        shape = tuple(int(size) for size in pair.value.shape)

        def convert(array: Any) -> Any:
            return np.ascontiguousarray(conversion(array, shape))

        return Wanted(stored, device, convert)

    def _values_of_states(self) -> dict[Stored, Any]:
        """The tensors of optimizers, on the CPU: what of them belongs where, they know."""
        states = [outline for _, outline in self._states.values()]
        return self._checkpoint.read_on_cpu(
            stored for state in states for stored in flat(state).values()
        )

    def _state_put(self, optimizer: Any, outline: Outline, rows: list[Any]) -> Any:
        try:
            return self._framework.files.checked_state(optimizer, rows[outline.number])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            name = type(optimizer).__name__
            self._misfits.different.append(f"the state is none of this {name}: {error}")
            return None

    # -- putting in place -----------------------------------------------------------------

    def _putting(
        self,
        obj: Any,
        found: Any,
        news: list[tuple[_Pair, Any]],
        rows: list[Any],
        puts: list[Any],
    ) -> Callable[[], Any]:
        framework = self._framework
        refilled = []
        replaced: dict[int, Any] = {}
        for pair, new in news:
            is_tensor = not isinstance(pair.value, np.ndarray)
            if is_tensor and framework.models.is_refilled(pair.value):
                refilled.append((pair.value, new))
            else:
                replaced[id(pair.value)] = new

        parts = [part for _, learned in self._models.values() for part in learned.parts]
        models = [("", model) for model, _ in self._models.values()]
        nestings = [*[(name, part.value) for name, part in parts], *models]
        remade = flatten_all(nestings, framework.kinds, self._attempted).unflatten_all(
            dict(replaced)
        )
        for (_, model), new in zip(models, remade[len(parts) :], strict=True):
            replaced[id(model)] = new
        placed = Remaking(framework, self._attempted, replaced, rows).of(obj, found)

        def put() -> Any:
            for tensor, new in refilled:
                framework.models.write(tensor, new)
            for (_, part), value in zip(parts, remade, strict=False):
                if value is not part.value:
                    part.put(value)
            for put_state in puts:
                put_state()
            for _, learned in self._models.values():
                for loaded in learned.objects:
                    framework.models.finish(loaded)
            return placed

        return put


def _told(found: Any) -> str:
    if isinstance(found, Stored):
        return f"{found.dtype} {found.shape}"
    if isinstance(found, Outline):
        return f"a {found.type}"
    return f"{brief(found)}, of type {type(found).__name__}"
