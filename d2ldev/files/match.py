"""Match the contents of an object and of a file by names. No other module compares names.

A model of another framework, another program's file and a nesting are matched alike. Where the
layers of a model are known on both sides, their roles are its names.

Held by the requirements ``io.load-into-*`` of the suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeVar

from d2ldev.contract import Layout
from d2ldev.errors import D2LDevError, quote, text_of
from d2ldev.files.contents import Contents, Entry, Place
from d2ldev.files.differences import Differences
from d2ldev.files.parameters import find_positions
from d2ldev.files.save import is_plain_leaf
from d2ldev.files.structure import MODEL, STATE, Outline, Parameter, Stored, flatten
from d2ldev.nesting.walk import join_path

T = TypeVar("T")

Key = tuple[int, str]
"""The id of a tensor here, and its name in the file."""


class Pair(NamedTuple):
    """A tensor or an array, and its description in the file.

    Args:
        entry: the tensor or the array.
        stored: its description in the file.
        layouts: its layout in the file, and here, if they differ.
    """

    entry: Entry
    stored: Stored
    layouts: tuple[Layout, Layout] | None


class StoredContents:
    """What a file has, by names.

    Args:
        node: the file's ``Outline``, or its contents.
        takes_state: tells of a name whether an optimizer takes the state of this name whole.

    Attributes:
        values: a tensor, a number, text, or the state of an optimizer, by its name.
        models: the models by their names.
        optional: the names of tensors that are not needed.
    """

    def __init__(self, node: Any, takes_state: Callable[[str], bool]) -> None:
        self._takes_state = takes_state
        self.models: dict[str, Outline] = {}
        self.optional: set[str] = set()
        self.values = flatten(node, self._visit_container)

    def _visit_container(self, name: str, outline: Outline) -> bool:
        """Note a container, and return whether it stays whole."""
        if outline.type == MODEL:
            self.models[name] = outline
        self.optional |= {join_path(name, inner) for inner in outline.optional}
        return outline.type == STATE and self._takes_state(name)

    def is_in_model(self, name: str) -> bool:
        """Return whether there is a model at this name or around it, and so names alone."""
        return any(not path or f"{name}.".startswith(f"{path}.") for path in self.models)


class Match:
    """What of a file goes where in an object.

    Args:
        here: the object's contents, with the tensors of its models.
        there: the file's. Tensors that neither side needs are taken out of both.
        differences: gets the names, and what does not fit.
        left_alone: the names that are matched on neither side; see ``Files.complete``.
        is_strict: whether each name has to be on both sides.

    Attributes:
        pairs: the tensors to read, each once.
        places: for each place the key of its pair.
        listed: the ids of tensors in the framework's own list of a model.
        ties: pairs of such keys whose values have to be equal.
        values: for each place the number or the text of the file.
        states: optimizers, and the state of each in the file.
    """

    def __init__(
        self,
        here: Contents,
        there: StoredContents,
        differences: Differences,
        left_alone: Collection[str],
        *,
        is_strict: bool,
    ) -> None:
        self._here, self._there = here, there
        self._differences, self._is_strict = differences, is_strict
        self.pairs: dict[Key, Pair] = {}
        self.places: dict[Place, Key] = {}
        self.listed: set[int] = set()
        self.ties: list[tuple[Key, Key]] = []
        self.values: dict[Place, Any] = {}
        self.states: list[tuple[Any, Outline]] = []
        # The key of a pair, by the id of a tensor that is filled in place, or by a name.
        self._keys: dict[int | str, Key] = {}
        self._names = {
            id(entry.value): name
            for name, entry in reversed(here.entries.items())
            if entry.is_native
        }
        # The layouts of tensors in models, and the names of the file for them.
        self._layouts: dict[str, tuple[Layout, Layout]] = {}
        self._renamed: dict[str, str] = {}
        for name in here.inventories:
            self._match_layers(name)
        # Under its other names, too, an object's tensors may be in the file.
        here.add_other_names(there.values)
        self._take_out_unneeded()
        self._take_out(left_alone)
        used = {*self._match_tensors(), *self._match_values()}
        differences.unexpected += [name for name in there.values if name not in used]
        for name in here.inventories:
            self._check_orders(name)

    # -- models -----------------------------------------------------------------------------------

    def _match_layers(self, path: str) -> None:
        """Give the tensors of known layers the names of the file's layers."""
        outline = self._there.models.get(path)
        layouts = {} if outline is None else outline.layouts
        names = {layout.role: name for name, layout in layouts.items()}
        mine = self._here.inventories[path].find_layouts() or {}
        for name, layout in mine.items():
            if layout.role in names:
                full_name, its_name = join_path(path, name), names[layout.role]
                self._renamed[full_name] = join_path(path, its_name)
                if layouts[its_name] != layout:
                    self._layouts[full_name] = layouts[its_name], layout

    def _take_out_unneeded(self) -> None:
        """Take out tensors that neither side needs, and that are on one side only, or differ."""
        unlisted, mine, theirs = self._here.unlisted, self._here.entries, self._there.values
        others = self._compare_settings(unlisted)
        for name in unlisted & mine.keys():
            if name in others or not _fits(mine[name], theirs.get(name)):
                del mine[name]
        for name in (unlisted | self._there.optional) - mine.keys():
            theirs.pop(name, None)

    def _compare_settings(self, unlisted: AbstractSet[str]) -> set[str]:
        """Return the names of values whose containers have other settings in the file.

        Notes these settings, if one of the names is needed, and not in ``unlisted``.
        """
        others: set[str] = set()
        for path, inventory in self._here.inventories.items():
            outline = self._there.models.get(path)
            settings = {} if outline is None else outline.settings
            for name, (container, text) in inventory.find_settings().items():
                if settings.get(name, text) != text:
                    prefix = f"{join_path(path, container)}."
                    inner = {each for each in self._here.entries if each.startswith(prefix)}
                    others |= inner
                    if not inner <= unlisted:
                        full_name = join_path(path, name)
                        self._differences.note(full_name, f"is {text}", settings[name])
        return others

    def _take_out(self, names: Collection[str]) -> None:
        """Take names out of both sides; with ``strict=False`` the caller is told them."""
        mine: dict[str, Any] = self._here.entries
        theirs, told = self._there.values, self._differences
        for side, lacking in ((mine, told.missing), (theirs, told.unexpected)):
            for name in [name for name in side if name in names]:
                del side[name]
                if not self._is_strict:
                    lacking.append(name)

    # -- tensors ----------------------------------------------------------------------------------

    def _match_tensors(self) -> Iterator[str]:
        """Match tensors and arrays, each under one of its names; yield the file's names."""
        theirs, renamed = self._there.values, self._renamed
        mine = {name: entry for name, entry in self._here.entries.items() if entry.is_tensor}
        # A tensor with several names is in most files once, under one of them.
        ties = {
            id(entry.value): renamed.get(name, name)
            for name, entry in reversed(mine.items())
            if renamed.get(name, name) in theirs and entry.has_one_value
        }
        lacking: set[int] = set()  # a tensor with several names is missing once, under the first
        for name, entry in mine.items():
            its_name, now = renamed.get(name, name), id(entry.value)
            if its_name not in theirs and entry.has_one_value:
                its_name = ties.get(now, its_name)
            yield its_name
            if its_name in theirs:
                self._match_tensor(name, entry, theirs[its_name])
                if entry.is_in_model and name not in self._here.unlisted:
                    self.listed.add(now)
            elif now not in lacking or not entry.has_one_value:
                lacking.add(now)
                self._differences.missing.append(name)

    def _match_tensor(self, name: str, entry: Entry, found: Any) -> None:
        told = self._differences
        try:
            dtype, shape = entry.form()
        except RuntimeError as error:  # a lazy module's, before its first batch
            if self._is_strict:
                told.note(name, f"has no shape yet ({text_of(error)})", _in_words(found))
            else:
                told.missing.append(name)
                told.unexpected.append(name)
            return
        layouts = self._layouts.get(name)
        wanted = shape if layouts is None else layouts[1].shape
        if not isinstance(found, Stored) or not _is_alike(found, dtype, wanted, layouts):
            told.note(name, f"is {dtype} {shape}", _in_words(found))
            return
        key = id(entry.value), found.name
        self.pairs.setdefault(key, Pair(entry, found, layouts))
        self.places.setdefault(entry.place, key)
        whole = id(entry.value) if entry.is_refilled else entry.place.name
        other = self._keys.setdefault(whole, key)
        if other != key and other[0] == key[0]:
            self.ties.append((other, key))
        told.matched.append(name)

    # -- numbers, text and optimizers -------------------------------------------------------------

    def _match_values(self) -> Iterator[str]:
        """Match everything else; yield the file's names."""
        here, theirs = self._here, self._there.values
        for name, entry in here.entries.items():
            if entry.is_tensor:
                continue
            if name in theirs or not (here.is_by_name or self._there.is_in_model(name)):
                yield name
                if name in theirs:
                    self._match_value(name, entry, theirs[name])
                else:
                    self._differences.missing.append(name)

    def _match_value(self, name: str, entry: Entry, found: Any) -> None:
        x = entry.value
        if entry.is_object and isinstance(found, Outline):
            if all(optimizer is not x for optimizer, _ in self.states):
                self.states.append((x, found))
                self._differences.matched.append(name)
            return
        if found is None and not entry.is_object and not is_plain_leaf(x):
            return  # a function, which the program has made
        is_plain = not isinstance(found, (Outline, Stored)) and not entry.is_object
        if not is_plain or not (type(x) is type(found) or x is None or found is None):
            self._differences.note(name, f"is a {type(x).__name__}", _in_words(found))
        elif type(x) is not type(found) or x != found:
            self.values[entry.place] = found

    # -- optimizers -------------------------------------------------------------------------------

    def find_order(
        self, mine: Sequence[tuple[str, Any]], theirs: Sequence[Parameter]
    ) -> list[int] | None:
        """Return for each parameter of an optimizer its position; see ``find_positions``.

        Raises:
            ValueError: if only one of the two has a parameter.
        """
        taken: dict[int, list[str]] = {}
        for key, name in self.pairs:
            taken.setdefault(key, []).append(name)
        return find_positions(mine, theirs, taken, self._names, self._differences.source.called)

    def _check_orders(self, path: str) -> None:
        """Note each optimizer in a model whose state belongs to parameters in another order."""
        outline, told = self._there.models.get(path), self._differences
        lists = {} if outline is None else outline.optimizers
        for name, mine in self._here.inventories[path].find_optimizers().items():
            full_name = join_path(path, name) if name else path
            if not any(each.startswith(f"{full_name}.") for each in told.matched):
                continue
            try:
                if self.find_order(mine, lists.get(name, ())) is not None:
                    raise ValueError("it has the parameters in another order")
            except ValueError as error:
                told.different.append(f"{full_name}: {error}")


def list_below(path: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return what is in the node of this name, by names that begin after it; empty is the top.

    >>> list_below("a", {"a": 1, "a.b": 2, "ab": 3})
    {'b': 2}
    """
    prefix = f"{path}." if path else ""
    return {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}


def _in_words(found: Any) -> str:
    """Return how messages call what a file has."""
    if isinstance(found, Stored):
        return f"{found.dtype} {found.shape}"
    if isinstance(found, Outline):
        return f"a {found.type}"
    return f"{quote(found)}, of type {type(found).__name__}"


def _fits(entry: Entry, found: Any) -> bool:
    try:
        return isinstance(found, Stored) and entry.form() == (found.dtype, found.shape)
    except (D2LDevError, RuntimeError):  # it has no shape
        return False


def _is_alike(
    found: Stored, dtype: str, shape: tuple[int, ...], layouts: tuple[Layout, Layout] | None
) -> bool:
    """Return whether a tensor of the file has this dtype and shape, or the shape of its layout."""
    theirs = found.shape if layouts is None else layouts[0].shape
    # A file may have a layout of another tensor.
    is_lie = math.prod(found.shape) != math.prod(theirs)
    return not is_lie and (found.dtype, theirs) == (dtype, shape)
