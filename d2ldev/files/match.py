"""Match the contents of an object and of a file by names. No other module compares names.

A name is the path to a value: keys, indices and fields, with dots between them. In a model it is
the name of a tensor. So a model of another framework, another program's file and a nesting are
matched alike. Where the layers of a model are known on both sides, their roles are its names.

Held by the requirements ``io.load-into-*`` of the suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeVar

import numpy as np

from d2ldev.contract import Framework, Layout
from d2ldev.errors import D2LDevError, UnsupportedValueError, quote, text_of
from d2ldev.files.format.container import name_of, storage_of
from d2ldev.files.load import shorten
from d2ldev.files.save import array_refusal, is_array_of_numbers, is_model, is_plain_leaf
from d2ldev.files.structure import (
    MODEL,
    STATE,
    Outline,
    Parameter,
    Stored,
    flatten,
    make_unique,
)
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, Kind
from d2ldev.nesting.walk import join_path, label_children
from d2ldev.operations.creation import shape_of
from d2ldev.operations.inventory import Inventory
from d2ldev.operations.other_backends import of_another_backend

T = TypeVar("T")

# An error names this many parameters of an optimizer.
_SHOWN = 3


class Pair(NamedTuple):
    """A tensor or an array, and its description in the file.

    Args:
        value: the tensor or the array.
        stored: its description in the file.
        layouts: its layout in the file, and here, if they differ.
    """

    value: Any
    stored: Stored
    layouts: tuple[Layout, Layout] | None


Path = str | tuple[Any, ...]


class Place(NamedTuple):
    """Where in an object a value is.

    Args:
        path: the labels of the containers around it; in a model, its name.
        now: the id of the value that is there.
    """

    path: Path
    now: int


class Match:
    """What of a file goes where in an object; nothing is changed but what ``complete`` makes.

    Args:
        framework: whose object it is.
        obj: an object like the one that was saved.
        found: the file's ``Outline``, or its contents.
        attempted: the current operation, for messages.
        called: how messages call the file.
        is_strict: whether each name has to be on both sides.
        is_by_name: whether only tensors have names in the file.
        undo: see ``Files.complete``.

    Attributes:
        matched, missing, unexpected: the names that are on both sides, here, and there.
        different: in words, the differences of shape, dtype or kind.
        pairs: the tensors to read, each once: by the id of the tensor here and its name there.
        places: for each place the key of its pair.
        listed: the ids of tensors in the framework's own list of a model.
        ties: pairs of such keys whose values have to be equal.
        values: for each place the number or the text of the file.
        states: optimizers, and the state of each in the file.
        models: the models in the object by their names.

    Raises:
        UnsupportedValueError: if the object holds something that no file can.
    """

    def __init__(
        self,
        framework: Framework,
        obj: Any,
        found: Any,
        attempted: str,
        called: str,
        *,
        is_strict: bool,
        is_by_name: bool,
        undo: Callable[..., object],
    ) -> None:
        self._framework, self._attempted, self._called = framework, attempted, called
        self._is_strict, self._is_by_name = is_strict, is_by_name
        self.matched: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []
        self.pairs: dict[tuple[int, str], Pair] = {}
        self.places: dict[Place, tuple[int, str]] = {}
        self.listed: set[int] = set()
        self.ties: list[tuple[tuple[int, str], tuple[int, str]]] = []
        self.values: dict[Place, Any] = {}
        self.states: list[tuple[Any, Outline]] = []
        self.models: dict[str, Inventory] = {}
        # Here: name -> the path and the value; the models by their names; other name -> first.
        self._mine: dict[str, tuple[Path, Any]] = {}
        self._objects: dict[str, Any] = {}
        self._first_names: dict[str, str] = {}
        self._seen: dict[int, str] = {}
        self._survey(obj, "", ())
        # There: name -> a tensor, a number, text, or the state of an optimizer.
        self._their_models: dict[str, Outline] = {}
        self._optional: set[str] = set()
        self._left_alone: dict[str, set[str]] = {}
        self._theirs = flatten(found, self._visit_container)
        # The key of a pair, by the id of a tensor that is filled in place, or by a path.
        self._keys: dict[int | Path, tuple[int, str]] = {}
        # The layouts of tensors in models, and the names of the file for them.
        self._layouts: dict[str, tuple[Layout, Layout]] = {}
        self._renamed: dict[str, str] = {}
        for path, model in self._objects.items():
            self._add_model(path, model, undo)
        self._mine = dict(self._with_tensors())
        self._match_tensors()
        for name, (place, x) in self._mine.items():
            if name in self._theirs or not (is_by_name or self._is_in_model(name)):
                self._match_value(name, Place(place, id(x)), x)
        self.unexpected += [name for name in self._theirs if name not in self._used]
        for path, inventory in self.models.items():
            self._check_orders(path, inventory)

    # -- the object and the file ------------------------------------------------------------------

    def _survey(self, x: Any, path: str, labels: tuple[Any, ...]) -> None:
        """Note the contents of the object by their names."""
        framework = self._framework
        kind = framework.state.kinds[type(x)]
        if is_model(framework, x):
            if id(x) in self._seen:
                self._first_names[path] = self._seen[id(x)]
                return
            self._seen[id(x)] = path
            is_optimizer = kind is OBJECT and framework.files.state(x) is not None
            self._mine[path] = labels, x
            if not is_optimizer or self._is_by_name:
                self._objects[path] = x
        elif isinstance(x, np.ndarray) and isinstance(kind, Kind) and not is_array_of_numbers(x):
            raise array_refusal(self._attempted, x, path)
        elif kind is PLAIN or kind is TENSOR or isinstance(x, (np.generic, np.ndarray)):
            self._mine[make_unique(path, self._mine)] = labels, x
        elif (
            isinstance(x, AbstractSet)
            and self._is_by_name
            and not framework.state.kinds.has_tensors(x)
        ):
            pass  # where only tensors have names
        elif isinstance(kind, Kind) or isinstance(x, AbstractSet):
            foreign = of_another_backend(framework, self._attempted, x, path)
            raise foreign or UnsupportedValueError(
                self._attempted,
                f"the {type(x).__name__} at {path or 'the top'} is in no file",
                "backend.load_into(obj, path), where obj has what backend.save takes: tensors, "
                "models, optimizers, numbers, text, and dicts, lists and tuples of them",
            )
        else:
            for label, child in label_children(x, kind.in_files, path, self._attempted):
                self._survey(child, join_path(path, label), (*labels, label))

    def _visit_container(self, path: str, outline: Outline) -> bool:
        """Note a container of the file, and return whether it stays whole.

        It does where it is the state of an optimizer, which takes it as it is.
        """
        if outline.type == MODEL:
            self._their_models[path] = outline
        self._optional |= {join_path(path, name) for name in outline.optional}
        first = self._first_names.get(path, path)
        is_optimizer = first in self._mine and self._is_object(self._mine[first][1])
        return outline.type == STATE and is_optimizer and first not in self._objects

    def _is_object(self, x: Any) -> bool:
        return self._framework.state.kinds[type(x)] is OBJECT

    def _is_in_model(self, name: str) -> bool:
        """Return whether the file has a model at this name or around it, and so names alone."""
        return any(not path or f"{name}.".startswith(f"{path}.") for path in self._their_models)

    def _add_model(self, path: str, model: Any, undo: Callable[..., object]) -> None:
        """Complete a model as the file has it, list its tensors, and match its layers."""
        files, outline = self._framework.files, self._their_models.get(path)
        prefix = f"{path}." if path else ""
        if self._is_object(model):
            theirs = list_below(path, self._theirs)
            stored = {name: x for name, x in theirs.items() if isinstance(x, Stored)}
            shapes = {name: x.shape for name, x in stored.items()}
            dtypes = {name: x.dtype for name, x in stored.items()}
            try:
                strict = self._is_strict
                lacking, others = files.complete(model, shapes, dtypes, undo, is_strict=strict)
            except D2LDevError:
                raise
            except Exception as error:  # whatever the file's shapes and arguments make it raise
                self.different.append(f"{path or 'the top'}: {shorten(error)}")
                lacking, others = (), ()
            self._left_alone[path] = {join_path(path, name) for name in others}
            self.missing += [prefix + name for name in lacking]
        inventory = Inventory(self._framework, model, self._attempted, is_saved=True)
        self.models[path] = inventory
        for name, first in inventory.again.items():
            self._first_names[prefix + name] = prefix + first if first else path
        layouts = {} if outline is None else outline.layouts
        names = {layout.role: name for name, layout in layouts.items()}
        for name, layout in (inventory.find_layouts() or {}).items():
            if layout.role in names:
                its_name = names[layout.role]
                self._renamed[prefix + name] = prefix + its_name
                if layouts[its_name] != layout:
                    self._layouts[prefix + name] = layouts[its_name], layout

    def _with_tensors(self) -> Iterator[tuple[str, tuple[Path, Any]]]:
        """Yield the contents of the object, with the tensors of its models in their places."""
        for name, (path, x) in self._mine.items():
            if name in self.models:
                for inner, tensor in self.models[name].entries:
                    full_name = join_path(name, inner) if inner else name
                    yield full_name, (full_name, tensor)
            else:
                yield name, (path, x)

    def _first_name(self, name: str, depth: int) -> str:
        """Return the name under which what has a name was found first.

        Args:
            name: one of the file's.
            depth: how many dots the names of objects have at most.
        """
        segments = name.split(".", depth + 1)  # a file's name may have millions
        for count in range(len(segments), 0, -1):
            prefix = ".".join(segments[:count])
            if prefix in self._first_names:
                rest = name.removeprefix(prefix).removeprefix(".")
                first = self._first_names[prefix]
                return self._first_name(join_path(first, rest) if rest else first, depth)
        return name

    # -- tensors ----------------------------------------------------------------------------------

    def _match_tensors(self) -> None:
        """Match tensors and arrays, each under one of its names."""
        self._used: set[str] = set()
        mine, theirs = self._mine, self._theirs
        kinds = self._framework.state.kinds
        self._names = {
            id(x): name for name, (_, x) in reversed(mine.items()) if kinds[type(x)] is TENSOR
        }
        # Under its other names, too, an object's tensors may be in the file.
        depth = max((name.count(".") for name in self._first_names), default=0)
        firsts = {name: self._first_name(name, depth) for name in theirs} if mine else {}
        firsts = {name: first for name, first in firsts.items() if first in mine}
        mine.update({name: mine[first] for name, first in firsts.items() if name not in mine})
        unlisted = {
            f"{path}.{name}" if path else name
            for path, model in self.models.items()
            for name in model.unlisted
        }
        unlisted |= {name for name, first in firsts.items() if first in unlisted}
        others = self._compare_settings(unlisted)
        # A tensor that neither side needs may be on one side only, or differ.
        for name in unlisted & mine.keys():
            if name in others or not self._fits(mine[name][1], theirs.get(name)):
                del mine[name]
        for name in (unlisted | self._optional) - mine.keys():
            theirs.pop(name, None)
        for names in self._left_alone.values():
            self._leave_out(names)
        # A tensor with several names is in most files once, under one of them.
        ties = {
            id(x): name
            for name, (place, x) in reversed(mine.items())
            if self._renamed.get(name, name) in theirs and self._has_one_value(place, x)
        }
        lacking: set[int] = set()  # a tensor with several names is missing once, under the first
        for name, (place, x) in list(mine.items()):
            if not isinstance(x, np.ndarray) and self._framework.state.kinds[type(x)] is not TENSOR:
                continue
            del mine[name]
            its_name = self._renamed.get(name, name)
            if its_name not in theirs and self._has_one_value(place, x) and id(x) in ties:
                its_name = self._renamed.get(ties[id(x)], ties[id(x)])
            self._used.add(its_name)
            if its_name in theirs:
                self._match_tensor(name, Place(place, id(x)), x, theirs[its_name])
                if isinstance(place, str) and name not in unlisted:
                    self.listed.add(id(x))
            elif id(x) not in lacking or not self._has_one_value(place, x):
                lacking.add(id(x))
                self.missing.append(name)

    def _compare_settings(self, unlisted: AbstractSet[str]) -> set[str]:
        """Return the names of values whose containers have other settings in the file.

        Notes these settings, if one of the names is needed, and not in ``unlisted``.
        """
        others: set[str] = set()
        for path, model in self.models.items():
            outline = self._their_models.get(path)
            settings = {} if outline is None else outline.settings
            for name, (container, text) in model.find_settings().items():
                if settings.get(name, text) != text:
                    prefix = f"{join_path(path, container)}."
                    inner = {each for each in self._mine if each.startswith(prefix)}
                    others |= inner
                    if not inner <= unlisted:
                        told = f"{join_path(path, name)} is {text}, and {self._called}"
                        self.different.append(f"{told} has {settings[name]}")
        return others

    def _leave_out(self, names: AbstractSet[str]) -> None:
        """Leave out what ``Files.complete`` has named, on both sides."""
        for side, lacking in ((self._mine, self.missing), (self._theirs, self.unexpected)):
            for name in [name for name in side if name in names]:
                del side[name]
                if not self._is_strict:
                    lacking.append(name)

    def _has_one_value(self, path: Path, x: Any) -> bool:
        """Return whether a tensor has one value, under however many names it is kept."""
        return isinstance(path, str) or self.is_refilled(x)

    def is_refilled(self, x: Any) -> bool:
        is_tensor = self._framework.state.kinds[type(x)] is TENSOR
        return is_tensor and self._framework.models.find_refill(x) is not None

    def _fits(self, x: Any, found: Any) -> bool:
        try:
            form = form_of(self._framework, x)
            return isinstance(found, Stored) and form == (found.dtype, found.shape)
        except (D2LDevError, RuntimeError):  # it has no shape
            return False

    def _match_tensor(self, name: str, place: Place, x: Any, found: Any) -> None:
        try:
            dtype, shape = form_of(self._framework, x)
        except RuntimeError as error:  # a lazy module's, before its first batch
            if self._is_strict:
                self._differ(name, f"has no shape yet ({text_of(error)})", found)
            else:
                self.missing.append(name)
                self.unexpected.append(name)
            return
        layouts = self._layouts.get(name)
        if not isinstance(found, Stored):
            self._differ(name, f"is {dtype} {shape}", found)
            return
        theirs, wanted = found.shape, shape
        if layouts is not None:
            theirs, wanted = (layout.shape for layout in layouts)
        # A file may have a layout of another tensor.
        is_lie = math.prod(found.shape) != math.prod(theirs)
        if is_lie or (dtype, wanted) != (found.dtype, theirs):
            self._differ(name, f"is {dtype} {shape}", found)
            return
        key = id(x), found.name
        self.pairs.setdefault(key, Pair(x, found, layouts))
        self.places.setdefault(place, key)
        other = self._keys.setdefault(id(x) if self.is_refilled(x) else place.path, key)
        if other != key and other[0] == id(x):
            self.ties.append((other, key))
        self.matched.append(name)

    # -- optimizers -------------------------------------------------------------------------------

    def find_order(
        self, mine: Sequence[tuple[str, Any]], theirs: Sequence[Parameter]
    ) -> list[int] | None:
        """Return for each parameter of an optimizer its position in the file.

        The tensor of the file that it takes decides, then the name that the optimizer gives it. A
        parameter without either has its own position. None means that all have their own.

        Args:
            mine: see ``Files.list_parameters``.
            theirs: the parameters in the file.

        Raises:
            ValueError: if only one of the two has a parameter.
        """
        if not mine or not theirs:
            return None
        taken: dict[int, list[str]] = {}
        for key, name in self.pairs:
            taken.setdefault(key, []).append(name)
        by_name = {x.name: j for j, x in enumerate(theirs) if x.name}
        by_label = {x.label: j for j, x in enumerate(theirs) if x.label}
        found: dict[int, int] = {}
        left = dict(enumerate(theirs))
        for positions_of in (
            lambda _, x: [by_name.get(name) for name in taken.get(id(x), ())],
            lambda label, _: [by_label.get(label)],
        ):
            for i, (label, x) in enumerate(mine):
                position = next((j for j in positions_of(label, x) if j in left), None)
                if position is not None and i not in found:
                    found[i] = position
                    del left[position]
        rest = [i for i in range(len(mine)) if i not in found]
        have_names = any(id(mine[i][1]) in self._names for i in rest) and any(
            other.name for other in left.values()
        )
        have_labels = any(mine[i][0] for i in rest) and any(x.label for x in left.values())
        if len(mine) != len(theirs) or have_names or have_labels:
            here = [self._names.get(id(x)) or label or str(i) for i, (label, x) in enumerate(mine)]
            there = [x.name or x.label or str(j) for j, x in enumerate(theirs)]
            told = [f"{shorten(here[i])} only here" for i in rest[:_SHOWN]]
            told += [f"{shorten(there[j])} only in {self._called}" for j in [*left][:_SHOWN]]
            raise ValueError(f"it has other parameters: {', '.join(told)}")
        found.update(zip(rest, left, strict=True))
        order = [found[i] for i in range(len(mine))]
        return None if order == list(range(len(mine))) else order

    def _check_orders(self, path: str, inventory: Inventory) -> None:
        """Note each optimizer in a model whose state belongs to parameters in another order."""
        outline = self._their_models.get(path)
        lists = {} if outline is None else outline.optimizers
        for name, mine in inventory.find_optimizers().items():
            full_name = join_path(path, name) if name else path
            theirs = lists.get(name, ())
            if not any(each.startswith(f"{full_name}.") for each in self.matched):
                continue
            try:
                if self.find_order(mine, theirs) is not None:
                    raise ValueError("it has the parameters in another order")
            except ValueError as error:
                self.different.append(f"{full_name}: {error}")

    # -- numbers and text -------------------------------------------------------------------------

    def _match_value(self, name: str, place: Place, x: Any) -> None:
        self._used.add(name)
        if name not in self._theirs:
            self.missing.append(name)
            return
        found = self._theirs[name]
        if self._is_object(x):
            if not isinstance(found, Outline):
                self._differ(name, f"is a {type(x).__name__}", found)
            elif all(optimizer is not x for optimizer, _ in self.states):
                self.states.append((x, found))
                self.matched.append(name)
            return
        is_plain = not isinstance(found, (Outline, Stored))
        is_alike = type(x) is type(found) or x is None or found is None
        if found is None and not is_plain_leaf(x):
            return  # a function, which the program has made
        if not is_plain or not is_alike:
            self._differ(name, f"is a {type(x).__name__}", found)
        elif type(x) is not type(found) or x != found:
            self.values[place] = found

    def _differ(self, name: str, mine: str, found: Any) -> None:
        told = f"{quote(found)}, of type {type(found).__name__}"
        if isinstance(found, Stored):
            told = f"{found.dtype} {found.shape}"
        elif isinstance(found, Outline):
            told = f"a {found.type}"
        self.different.append(f"{name or 'the top'} {mine}, and {self._called} has {told}")


def list_below(path: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return what is in the node of this name, by names that begin after it; empty is the top.

    >>> list_below("a", {"a": 1, "a.b": 2, "ab": 3})
    {'b': 2}
    """
    prefix = f"{path}." if path else ""
    return {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}


def form_of(framework: Framework, x: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor or an array; of random keys that of their numbers.

    Raises:
        RuntimeError: if it has no shape yet, as before the first batch of a lazy module.
        UnsupportedValueError: if its shape does not consist of numbers, as that of a nested tensor.
    """
    if isinstance(x, np.ndarray):
        return name_of(x.dtype), x.shape
    dtype = framework.tensors.dtype_of(x)
    if storage_of(dtype) is None:  # numbers represent it
        return dtype, framework.files.borrow(x).shape
    _ = x.shape  # where the RuntimeError comes from
    return dtype, shape_of(x, "read the shape of a tensor")
