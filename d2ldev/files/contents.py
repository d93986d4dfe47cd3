"""What an object holds, by the names that a file has for it.

A name is the path to a value: keys, indices and fields, with dots between them. In a model it is
the name of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from d2ldev.contract import Framework
from d2ldev.errors import UnsupportedValueError
from d2ldev.files.format.container import name_of, storage_of
from d2ldev.files.save import array_refusal, is_array_of_numbers, is_model
from d2ldev.files.structure import Stored, make_unique
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR
from d2ldev.nesting.walk import Tree, join_path
from d2ldev.operations.creation import shape_of
from d2ldev.operations.inventory import Inventory
from d2ldev.operations.other_backends import of_another_backend


class Place(NamedTuple):
    """Where in an object a value is.

    Args:
        name: its name there.
        now: the id of the value that is there.
    """

    name: str
    now: int


class Entry:
    """A value in an object: a tensor, an array, a number, text, or an optimizer.

    Args:
        framework: whose object it is.
        name: the first of its names.
        value: the value.
        is_in_model: whether a model keeps it.
    """

    def __init__(
        self, framework: Framework, name: str, value: Any, *, is_in_model: bool = False
    ) -> None:
        self._framework = framework
        self.value, self.is_in_model = value, is_in_model
        self.place = Place(name, id(value))

    @property
    def is_native(self) -> bool:
        """Whether it is a tensor of the framework."""
        return self._framework.state.kinds[type(self.value)] is TENSOR

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or an array."""
        return self.is_native or isinstance(self.value, np.ndarray)

    @property
    def is_object(self) -> bool:
        """Whether it is an optimizer, or a model before its tensors are listed."""
        return self._framework.state.kinds[type(self.value)] is OBJECT

    @property
    def is_refilled(self) -> bool:
        """Whether the tensor stays, and other memory is put into it."""
        return self.is_native and self._framework.models.find_refill(self.value) is not None

    @property
    def has_one_value(self) -> bool:
        """Whether a tensor has one value, under however many names it is kept."""
        return self.is_in_model or self.is_refilled

    def form(self) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the shape of a tensor or an array; see ``form_of``."""
        return form_of(self._framework, self.value)


class Contents:
    """What an object holds.

    Args:
        framework: whose object it is.
        obj: an object like one that was saved.
        attempted: the current operation, for messages.
        is_by_name: whether only tensors have names, as in another program's file.

    Attributes:
        entries: the values by their names. Models are among them until ``list_tensors``.
        models: the models by their names.
        inventories: what is in each model, by the names of the models.
        unlisted: the names of tensors that are not needed; see ``Slot.is_saved``.

    Raises:
        UnsupportedValueError: if it holds something that no file can.
    """

    def __init__(self, framework: Framework, obj: Any, attempted: str, *, is_by_name: bool) -> None:
        self._framework, self._attempted = framework, attempted
        self.is_by_name = is_by_name
        self.entries: dict[str, Entry] = {}
        self.models: dict[str, Any] = {}
        self.inventories: dict[str, Inventory] = {}
        self.unlisted: set[str] = set()
        # The names of optimizers whose state a file has whole.
        self._with_state: set[str] = set()
        # The other names of models and of what is in them, and for each the first.
        self._first_names: dict[str, str] = {}
        self._seen: dict[int, str] = {}
        kinds = framework.state.kinds
        self._tree = Tree(obj, kinds, attempted, is_leaf=self._is_leaf, is_saved=True)
        self._names = [self._add(name, x) for name, x in self._tree.leaves]

    def _is_leaf(self, x: Any) -> bool:
        return is_model(self._framework, x) or isinstance(x, AbstractSet)

    def _add(self, name: str, x: Any) -> str:
        """Add the value of a leaf, and return the name of its entry."""
        framework, kinds = self._framework, self._framework.state.kinds
        kind = kinds[type(x)]
        if is_model(framework, x):
            return self._add_model(name, x)
        if kind is PLAIN or kind is TENSOR or isinstance(x, (np.generic, np.ndarray)):
            if isinstance(x, np.ndarray) and not is_array_of_numbers(x):
                raise array_refusal(self._attempted, x, name)
            unique = make_unique(name, self.entries)
            self.entries[unique] = Entry(framework, unique, x)
            return unique
        if isinstance(x, AbstractSet) and self.is_by_name and not kinds.has_tensors(x):
            return name  # where only tensors have names
        raise of_another_backend(framework, self._attempted, x, name) or UnsupportedValueError(
            self._attempted,
            f"no file holds the {type(x).__name__} at {name or 'the top'}",
            "backend.load_into(obj, path), where obj has what backend.save takes: tensors, "
            "models, optimizers, numbers, text, and dicts, lists and tuples of them",
        )

    def _add_model(self, name: str, x: Any) -> str:
        if id(x) in self._seen:
            self._first_names[name] = self._seen[id(x)]
            return self._seen[id(x)]
        self._seen[id(x)] = name
        entry = self.entries[name] = Entry(self._framework, name, x)
        has_state = entry.is_object and self._framework.files.state(x) is not None
        if has_state and not self.is_by_name:
            self._with_state.add(name)
        else:
            self.models[name] = x
        return name

    def takes_state(self, name: str) -> bool:
        """Return whether what has this name is an optimizer that takes its state as it is."""
        return self._first_names.get(name, name) in self._with_state

    # -- models -----------------------------------------------------------------------------------

    def complete(
        self, name: str, theirs: Mapping[str, Any], undo: Callable[..., object], *, is_strict: bool
    ) -> tuple[Collection[str], Collection[str]]:
        """Make the tensors that a model lacks, as a file has them; see ``Files.complete``.

        Args:
            name: the name of the model.
            theirs: what the file has in it.
            undo, is_strict: see ``Files.complete``.
        """
        if not self.entries[name].is_object:
            return (), ()
        stored = {inner: x for inner, x in theirs.items() if isinstance(x, Stored)}
        shapes = {inner: x.shape for inner, x in stored.items()}
        dtypes = {inner: x.dtype for inner, x in stored.items()}
        complete = self._framework.files.complete
        return complete(self.models[name], shapes, dtypes, undo, is_strict=is_strict)

    def list_tensors(self) -> None:
        """Put the tensors of the models in the places of the models."""
        for name, model in self.models.items():
            inventory = Inventory(self._framework, model, self._attempted, is_saved=True)
            self.inventories[name] = inventory
            self.unlisted |= {join_path(name, inner) for inner in inventory.unlisted}
            for inner, first in inventory.again.items():
                self._first_names[join_path(name, inner)] = (
                    join_path(name, first) if first else name
                )
        self.entries = dict(self._with_tensors())

    def _with_tensors(self) -> Iterator[tuple[str, Entry]]:
        for name, entry in self.entries.items():
            if name not in self.inventories:
                yield name, entry
                continue
            for inner, tensor in self.inventories[name].entries:
                full_name = join_path(name, inner) if inner else name
                yield full_name, Entry(self._framework, full_name, tensor, is_in_model=True)

    def add_other_names(self, names: Iterable[str]) -> None:
        """Add those of a file's names that are other names of what is in a model."""
        if not self.entries:
            return
        depth = max((name.count(".") for name in self._first_names), default=0)
        firsts = {name: self._first_name(name, depth) for name in names}
        firsts = {name: first for name, first in firsts.items() if first in self.entries}
        added = {name: self.entries[first] for name, first in firsts.items()}
        self.entries.update({name: x for name, x in added.items() if name not in self.entries})
        self.unlisted |= {name for name, first in firsts.items() if first in self.unlisted}

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

    # -- new values -------------------------------------------------------------------------------

    def replace(self, new: Mapping[Place, Any]) -> tuple[Any, list[Callable[[], object]]]:
        """Return the object with other values, and functions that put them into its models.

        Args:
            new: the values by their places; others stay.

        Raises:
            UnsupportedValueError: if a container cannot be made again.
        """
        # Of a container and its new children the ids -> the new container.
        made: dict[tuple[int, ...], Any] = {}
        puts: list[Callable[[], object]] = []
        for path, inventory in self.inventories.items():
            for name, slot in inventory.slots:
                value = self._replace_in_model(slot.value, join_path(path, name), new, made)
                if slot.put is not None and value is not slot.value:
                    puts.append(partial(slot.put, value))
        leaves = [
            self._replace_in_model(x, name, new, made)
            if name in self.inventories
            else new.get(Place(name, id(x)), x)
            for name, (_, x) in zip(self._names, self._tree.leaves, strict=True)
        ]
        return self._tree.put_together(leaves, made), puts

    def _replace_in_model(
        self, x: Any, name: str, new: Mapping[Place, Any], made: dict[tuple[int, ...], Any]
    ) -> Any:
        tree = Tree(x, self._framework.state.kinds, self._attempted, name)
        leaves = [new.get(Place(name, id(leaf)), leaf) for name, leaf in tree.leaves]
        return tree.put_together(leaves, made)


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
