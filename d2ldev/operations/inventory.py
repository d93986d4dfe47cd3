"""What an object holds: the only code that takes models and optimizers apart.

``place``, ``placement``, ``summarize``, ``save`` and ``load_into`` ask it. A framework's object (a
module, an optimizer) is a list of *slots*. A slot has a name, a value, and a function that puts
another value there. The value is a tensor, a nesting of tensors, or another object.

- All that the framework counts moves, and so does each tensor that has a slot of its own.
- Other containers move if they hold a trained tensor, or an object of the framework.
- Other tensors in containers stay, and so do the tensors in attributes of other objects. They are
  noted. Further objects are not entered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from d2ldev.contract import Framework, Layout, Models, NoTensor, Role, Slot
from d2ldev.contract.files import same
from d2ldev.device import Device
from d2ldev.errors import D2LDevError, UnsupportedValueError, describe, text_of
from d2ldev.nesting.containers import is_of_numpy
from d2ldev.nesting.kinds import OBJECT, PLAIN, REFUSED, TENSOR, UNKNOWN, Kind
from d2ldev.nesting.walk import depth_refusal, flatten, join_path, label_children, leaves
from d2ldev.operations import moving
from d2ldev.operations.arguments import class_refusal
from d2ldev.operations.other_backends import of_another_backend, whose_object

# Whose attributes are a program's, and not a model's.
_NOT_SCANNED = (type, ModuleType, BaseException)


class Search:
    """The first step of ``place``: everything that it handles in a nesting.

    Args:
        framework: whose tensors and objects they are.
        obj: a tensor, a model, an optimizer, or any nesting of them.
        attempted: the current operation, for messages.
        is_saved: whether what no file has is left out, such as gradients.

    Raises:
        UnsupportedValueError: if the nesting holds something else. Inside a model, which may
            keep whatever it likes, values of other kinds are passed over.
    """

    # Of the class, because most models have none, and ``place`` is called again and again.
    again: Mapping[str, str] = MappingProxyType({})
    """The other names of objects, and for each the first."""
    uncounted: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    """The tensors among the entries that do not move under this name.

    Each with the line that registers it.
    """
    stays: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    """Those of them that do not move under another name, either."""
    notes: Sequence[tuple[str, Any]] = ()
    """Members that stay, and are no tensors, such as a device that a model has noted."""
    without_tensors: Sequence[tuple[str, NoTensor]] = ()
    """Where the framework has no tensor yet."""
    foreign: Sequence[tuple[str, str]] = ()
    """The names of objects of other frameworks, and clauses that name these."""
    has_notes = False
    """Whether there is anything in these, except ``again``."""

    def __init__(
        self, framework: Framework, obj: Any, attempted: str, *, is_saved: bool = False
    ) -> None:
        self.framework = framework
        self._kinds = framework.state.kinds
        self.attempted = attempted
        self.top = obj
        # id of an object -> the name under which it was found first.
        self._seen: dict[int, str] = {}
        # The classes of objects whose attributes are looked through: many objects have one class.
        self._scanned: set[type] = set()
        self._is_saved = is_saved
        self.slots: list[tuple[str, Slot]] = []
        """The slots that hold tensors, each with its full name."""
        self.entries: list[tuple[str, Any]] = []
        """The tensors that were found, each under its full names."""
        self.objects: list[Any] = []
        """The models, optimizers and the like, each once."""
        self.variables: set[int] = set()
        """The ids of objects that hold one tensor; see ``Role.VARIABLE``."""
        kind = self._kinds[type(obj)]
        try:
            # The common calls, without a detour.
            if kind is OBJECT:
                self._add_object("", obj)
            elif kind is TENSOR:
                self.entries.append(("", obj))
            else:
                self._add_leaves(obj)
        except RecursionError:
            raise depth_refusal(attempted) from None
        if self.uncounted:
            moved = {id(x) for name, x in self.entries if name not in self.uncounted}
            self.stays = {
                name: item for name, item in self.uncounted.items() if id(item[0]) not in moved
            }
        if not is_saved:
            self._add_attached()

    def _add_leaves(self, obj: Any) -> None:
        for name, value, kind in leaves(obj, self._kinds, "", self.attempted):
            if kind is TENSOR:
                self.entries.append((name, value))
            elif kind is OBJECT:
                self._add_object(name, value)
            elif kind is not PLAIN:
                raise self._refusal(name, value)

    def _refusal(self, name: str, value: object) -> UnsupportedValueError:
        if foreign := of_another_backend(self.framework, self.attempted, value, name):
            return foreign
        where = f" at {name}" if name else ""
        if isinstance(value, type):
            return class_refusal(self.attempted, value)
        fix = (
            f"derive its class from a model of {self.framework.name}, or place the tensors in it: "
            "obj.x = backend.place(obj.x, device)"
        )
        if moving.is_array(value):
            fix = "make it a tensor: backend.asarray(x), or leave it out of what is placed"
        elif self._kinds.method_of(type(value), 0):
            fix = "x = backend.to(x, device) moves an object by its own method"
        elif callable(value):
            fix = f"give a model of {self.framework.name}, such as net = backend.mlp([2, 1])"
        return UnsupportedValueError(
            self.attempted,
            f"{describe(value)}{where} is not a tensor, model, optimizer or container of the "
            f"{self.framework.name} backend",
            fix,
        )

    def _add_object(self, name: str, value: Any) -> None:
        """Add what an object of the framework keeps."""
        if id(value) in self._seen:
            # Gluon has a child under its name twice: as an attribute, too.
            if self._seen[id(value)] != name:
                vars(self).setdefault("again", {})[name] = self._seen[id(value)]
            return
        self._seen[id(value)] = name
        prefix = f"{name}." if name else ""
        self.objects.append(value)
        try:
            slots = self.framework.models.members(value)
            if type(slots) is not list:
                slots = tuple(slots)  # all of them, so that whatever goes wrong does so here
        except (D2LDevError, MemoryError, RecursionError):
            raise
        except Exception as error:  # a module whose ``__init__`` never called its parent's
            raise self._is_not_whole(name, value, error) from error
        self._add_slots(prefix, slots)

    def _add_slots(self, prefix: str, slots: Iterable[Slot]) -> None:
        kinds = self._kinds
        add_entry, add_slot = self.entries.append, self.slots.append
        working = Role.WORKING if self._is_saved else None
        for slot in slots:
            name, inner, _, role, _, _, _ = slot
            full_name = prefix + name
            kind = kinds[type(inner)]
            if role is working:
                continue
            if kind is TENSOR:
                add_entry((full_name, inner))
                add_slot((full_name, slot))
            elif kind is OBJECT:
                self._add_object(full_name, inner)
                if role is Role.VARIABLE:
                    self.variables.add(id(inner))
            elif kind is UNKNOWN:
                self._add_other(slot, prefix, full_name, inner)
            elif kind is REFUSED:
                raise self._refusal(full_name, inner)
            elif kind is PLAIN:
                if isinstance(inner, self.framework.tensors.plain_types):
                    self._note("notes", (full_name, inner))
            elif not self._is_plain(inner):
                self._add_nesting(prefix, slot)
                add_slot((full_name, slot))

    def check_tensors(self, *, is_saved: bool = False) -> None:
        """Refuse an object that lacks tensors.

        Args:
            is_saved: whether those that the framework makes later are needed now.
        """
        for name, lacking in self.without_tensors:
            is_needed = is_saved or not lacking.is_made_there
            if is_needed and not lacking.is_kept_apart:
                where = f"its {name}" if name else "it"
                raise UnsupportedValueError(
                    self.attempted, f"{where} {lacking.problem}", lacking.fix
                )

    def find_unsaved(self) -> list[str]:
        """Return the names of objects in a model that no file has."""
        by_themselves = [n for n, x in self.notes if self._kinds.method_of(type(x), 0) is not None]
        return [*(name for name, _ in self.foreign), *by_themselves]

    def _note(self, attribute: str, item: Any) -> None:
        vars(self).setdefault(attribute, []).append(item)
        self.has_notes = True

    def _add_other(self, slot: Slot, prefix: str, name: str, value: Any) -> None:
        """Note what stays of an object that the framework does not know, in one of its own."""
        cls = type(value)
        if cls in self._scanned:
            self._scan(slot, prefix, name, value)
        elif isinstance(value, NoTensor):
            self._note("without_tensors", (name, value))
        elif isinstance(value, Device):
            self._note("notes", (name, value))
        elif whose := whose_object(self.framework, value):
            self._note("foreign", (name, whose))
        elif self._kinds.method_of(type(value), 0) is not None:
            self._note("notes", (name, value))
        elif cls.__dictoffset__ and not isinstance(value, _NOT_SCANNED):
            self._scanned.add(cls)
            self._scan(slot, prefix, name, value)

    def _scan(self, slot: Slot, prefix: str, name: str, value: Any) -> None:
        """Find the tensors in the attributes of an object, and in containers there: they stay."""
        attributes = object.__getattribute__(value, "__dict__")
        if not attributes or id(value) in self._seen:
            return
        self._seen[id(value)] = name
        for key, inner in attributes.items():
            kind = self._kinds[type(inner)]
            if kind is not TENSOR and (isinstance(kind, Kind) or self._is_plain(inner)):
                continue
            with suppress(UnsupportedValueError):  # a container that cannot be walked
                found = leaves(inner, self._kinds, f"{name}.{key}", self.attempted)
                if tensors := [(path, leaf) for path, leaf, kind in found if kind is TENSOR]:
                    self.entries += tensors
                    put = partial(attributes.__setitem__, key)
                    self.slots.append((f"{name}.{key}", Slot(key, inner, put, Role.ATTRIBUTE)))
                    self._note_uncounted(slot, prefix, tensors)

    def _add_attached(self) -> None:
        """Add values that are attached to the found tensors, each once."""
        attached = self.framework.models.list_attached
        if type(self.framework.models).list_attached is Models.list_attached:
            return
        once: dict[int, tuple[str, Any]] = {}
        for entry in self.entries:
            once.setdefault(id(entry[1]), entry)
        for name, x in once.values():
            for slot in attached(x):
                full_name = join_path(name, slot.name)
                self.entries.append((full_name, slot.value))
                self.slots.append((full_name, slot))

    def _is_not_whole(self, name: str, value: Any, error: Exception) -> UnsupportedValueError:
        where = f" at {name}" if name else ""
        return UnsupportedValueError(
            self.attempted,
            f"the {type(value).__name__}{where} cannot be looked through: {text_of(error)}",
            "make it whole first: super().__init__() in its __init__",
        )

    def _add_nesting(self, prefix: str, slot: Slot) -> None:
        """Add the contents of a container: all of its tensors move, or stay."""
        models, tensors = self.framework.models, []
        is_counted = slot.role is not Role.ATTRIBUTE
        found = leaves(slot.value, self._kinds, prefix + slot.name, self.attempted)
        for path, leaf, kind in found:
            if kind is TENSOR:
                tensors.append((path, leaf))
                is_counted = is_counted or models.find_refill(leaf) is not None
            elif kind is OBJECT:
                self._add_object(path, leaf)
                is_counted = True
            elif kind is UNKNOWN:
                self._add_other(slot, prefix, path, leaf)
            elif kind is REFUSED:
                raise self._refusal(path, leaf)
        self.entries += tensors
        if not is_counted:
            self._note_uncounted(slot, prefix, tensors)

    def _note_uncounted(self, slot: Slot, prefix: str, tensors: list[tuple[str, Any]]) -> None:
        uncounted = vars(self).setdefault("uncounted", {})
        for path, x in tensors:
            identifier = path.removeprefix(prefix).replace(".", "_")
            uncounted[path] = x, slot.registration.format(identifier)
            self.has_notes = True

    def _is_plain(self, value: Any) -> bool:
        """Return whether all leaves of a nesting are plain values, as in a configuration.

        Most nestings are plain. A walk that names each leaf takes ten times as long.
        """
        try:
            flat = flatten(value, self._kinds, self.attempted)
        except Exception:  # the walk that names the leaves raises the error
            return False
        return not flat.tensors and not flat.others


class Inventory(Search):
    """A search that knows which of the tensors the framework itself does not list.

    It leaves out tensors without values, which the last call of a model may have left.
    """

    def __init__(
        self, framework: Framework, obj: Any, attempted: str, *, is_saved: bool = False
    ) -> None:
        super().__init__(framework, obj, attempted, is_saved=is_saved)
        self.unlisted: set[str] = set()
        """The names of tensors that are not needed; see ``Slot.is_saved``."""
        self.without_values: dict[int, Any] = {}
        """Unlisted tensors without values, by their ids. They are not entries."""
        for name, slot in self.slots:
            if not slot.is_saved:
                self._note_unlisted(name, slot.value)
        for name, (x, _) in self.uncounted.items():
            if framework.tensors.has_values(x):
                self.unlisted.add(name)
            else:
                self.without_values[id(x)] = x
        if self.unlisted or self.without_values:
            self._take_out()

    def _note_unlisted(self, name: str, value: Any) -> None:
        """Note the tensors in a slot that no file needs."""
        for path, leaf, kind in leaves(value, self._kinds, name, self.attempted):
            if kind is TENSOR and not self.framework.tensors.has_values(leaf):
                self.without_values[id(leaf)] = leaf
            elif kind is TENSOR and self.framework.models.find_refill(leaf) is None:
                self.unlisted.add(path)

    def _take_out(self) -> None:
        """Take out what has no values, and from ``unlisted`` what has another name as well."""
        self.entries = [entry for entry in self.entries if id(entry[1]) not in self.without_values]
        listed = {id(x) for name, x in self.entries if name not in self.unlisted}
        self.unlisted -= {name for name, x in self.entries if id(x) in listed}

    def find_optimizers(self) -> dict[str, Sequence[tuple[str, Any]]]:
        """Return the parameters of each optimizer in a model; see ``Files.list_parameters``."""
        list_parameters = self.framework.files.list_parameters
        lists = ((self._seen[id(x)], list_parameters(x)) for x in self.objects)
        return {name: found for name, found in lists if found}

    def find_layouts(self) -> dict[str, Layout] | None:
        """Return the layouts of a model's tensors by their names.

        None if the layers are not in one sequence, or if the model has tensors outside of them.
        """
        tensors = {name: x for name, x in self.entries if name not in self.unlisted}
        names = {id(x): name for name, x in tensors.items()}
        found: dict[str, Layout] = {}
        for index, layer in enumerate(self.framework.files.layers(self.top) or ()):
            if layer.weight is None:
                return None
            roles = ("weight", layer.weight, layer.layout), ("bias", layer.bias, same)
            for role, x, layout in roles:
                name = names.get(id(x))
                if name in found:
                    return None  # a layer that is there twice
                if name is not None:
                    found[name] = layout(f"{index}.{role}", tuple(int(size) for size in x.shape))
        # A tied tensor would be found by one of its names only: a model with ties has no layouts.
        return found if found and found.keys() == tensors.keys() else None

    def find_settings(self) -> dict[str, tuple[str, str]]:
        """Return values beside tensors in containers of a model, such as batch sizes.

        For the name of each value, the name of its container, and the value as text.
        """
        return dict(self._find_settings())

    def _find_settings(self) -> Iterator[tuple[str, tuple[str, str]]]:
        waiting = [(name, slot.value) for name, slot in reversed(self.slots)]
        seen: dict[int, Any] = {}
        while waiting:
            path, x = waiting.pop()
            kind = self.framework.state.kinds[type(x)]
            if isinstance(kind, Kind) or id(x) in seen:
                continue
            seen[id(x)] = x  # kept, so that its id stays its own
            children = label_children(x, kind, path, self.attempted)
            waiting += [(join_path(path, label), child) for label, child in reversed(children)]
            known = {label for label, _ in children}
            for label, value in label_children(x, kind.saved or kind, path, self.attempted):
                if kind.saved is not None and label not in known:
                    yield join_path(path, label), (path, self._in_words(value))

    def _in_words(self, x: Any) -> str:
        if self.framework.state.kinds[type(x)] is TENSOR:
            x = self.framework.files.borrow(x).tolist()
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(self._in_words, x))}]"
        return repr(x.item() if is_of_numpy(type(x), "generic") else x)


class NamedTensors(dict[str, Any]):
    """Tensors by their names.

    Attributes:
        unlisted: the names of those that are not needed; see ``Slot.is_saved``.
    """

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(inventory.entries)
        self.unlisted = frozenset(inventory.unlisted)


def list_named_tensors(
    framework: Framework, obj: Any, attempted: str = "list the tensors of an object"
) -> list[tuple[str, Any]]:
    """Return the tensors that ``place`` handles, with their names; see ``Inventory``."""
    return Inventory(framework, obj, attempted).entries


def list_needed_tensors(framework: Framework, obj: Any, attempted: str) -> list[tuple[str, Any]]:
    """Return the tensors that an object needs, with their names; see ``Slot.is_saved``."""
    inventory = Inventory(framework, obj, attempted)
    return [(name, x) for name, x in inventory.entries if name not in inventory.unlisted]
