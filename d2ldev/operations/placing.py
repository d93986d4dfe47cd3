"""How ``place`` moves models and optimizers: all of it, once, or nothing.

A framework's object (a module, an optimizer) is to this module a list of *parts*: a name, a
value (a tensor, a nesting of tensors, or another object) and where that value is kept. Three
steps, in this order, so that an error leaves everything as it was:

1. find every tensor that the object looks after;
2. copy those that are elsewhere, and make the containers that will hold the copies;
3. put them in place, which cannot fail.

Held by the requirements ``place.*`` of the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.errors import D2LDevError, UnsupportedValueError, describe
from d2ldev.nesting.walk import (
    OBJECT,
    TENSOR,
    UNKNOWN,
    Kind,
    flatten_all,
    joined,
    leaves,
    too_deep,
)

if TYPE_CHECKING:
    from d2ldev.device import Device
    from d2ldev.interface import Backend


class Part(NamedTuple):
    """One thing that a framework's object keeps.

    Args:
        name: its name in the object, dotted: ``'weight'``, ``'state.0.exp_avg'``.
        value: a tensor, a nesting, or another object of the framework.
        put: stores another value in its stead. It must not fail.
    """

    name: str
    value: Any
    put: Callable[[Any], object]


class Inventory:
    """Everything that ``place`` looks after in a nesting of tensors, models and optimizers.

    Args:
        backend: whose tensors and objects they are.
        obj: a tensor, a model, an optimizer, or any nesting of them.
        attempted: what the caller is doing, for messages.

    Raises:
        UnsupportedValueError: if the nesting holds something else. Inside a model, which may
            keep whatever it likes, values of other kinds are passed over.
    """

    def __init__(self, backend: Backend, obj: Any, attempted: str) -> None:
        self._backend = backend
        self._kinds = backend.kinds
        self._attempted = attempted
        self._seen: set[int] = set()
        self.parts: list[tuple[str, Part]] = []
        """What may have to be put back, with its full name."""
        self.entries: list[tuple[str, Any]] = []
        """The tensors that were found, each under its full names."""
        self.objects: list[Any] = []
        """The models, optimizers and the like, each once."""
        try:
            for name, value, kind in leaves(obj, self._kinds, "", attempted):
                if kind is UNKNOWN:
                    raise self.refusal(name, value)
                self._add(name, value, kind)
        except RecursionError:
            raise too_deep(attempted) from None

    def refusal(self, name: str, value: object) -> UnsupportedValueError:
        where = f" at {name}" if name else ""
        return UnsupportedValueError(
            self._attempted,
            f"{describe(value)}{where} is no tensor, model or optimizer of the "
            f"{self._backend.name} backend, and no container",
            "place what it holds: obj.x = backend.place(obj.x, device)",
        )

    def _add(self, name: str, value: Any, kind: Kind) -> None:
        if kind is TENSOR:
            self._add_tensor(name, value)
        elif kind is OBJECT and id(value) not in self._seen:
            self._add_object(name, value)

    def _add_tensor(self, name: str, value: Any) -> None:
        self.entries.append((name, value))
        key = id(value)
        if key not in self._seen:
            self._seen.add(key)
            for part in self._attached_to(value):
                full_name = joined(name, part.name)
                self.parts.append((full_name, part))
                self.entries.append((full_name, part.value))

    def _add_object(self, name: str, value: Any) -> None:
        self._seen.add(id(value))
        self.objects.append(value)
        kinds, seen = self._kinds, self._seen
        prefix = f"{name}." if name else ""
        for part in self._parts_of(value, name):
            part_name, inner, _ = part
            full_name = prefix + part_name
            kind = kinds[type(inner)]
            if kind is TENSOR:
                self._add_tensor(full_name, inner)
                self.parts.append((full_name, part))
            elif kind is OBJECT:
                if id(inner) not in seen:
                    self._add_object(full_name, inner)
            elif not isinstance(kind, Kind) and self._add_nesting(full_name, inner):
                self.parts.append((full_name, part))

    def _parts_of(self, value: Any, name: str) -> list[Part]:
        try:
            return list(self._backend._parts(value))
        except (D2LDevError, MemoryError, RecursionError):
            raise
        except Exception as error:  # a module whose ``__init__`` never called its parent's
            where = f" at {name}" if name else ""
            raise UnsupportedValueError(
                self._attempted,
                f"the {type(value).__name__}{where} cannot be looked through: {error}",
                "make it whole first: super().__init__() in its __init__",
            ) from error

    def _attached_to(self, value: Any) -> Iterable[Part]:
        return self._backend._attached(value)

    def _add_nesting(self, name: str, value: Any) -> bool:
        """Whether there is anything in a container that may have to be put back."""
        found = False
        for path, leaf, kind in leaves(value, self._kinds, name, self._attempted):
            self._add(path, leaf, kind)
            found = found or kind is TENSOR
        return found


def place(backend: Backend, obj: Any, device: Device, attempted: str) -> Any:
    """Move everything that ``obj`` looks after to ``device``; see ``Backend.place``."""
    inventory = Inventory(backend, obj, attempted)
    elsewhere = [
        tensor
        for tensor in {id(tensor): tensor for _, tensor in inventory.entries}.values()
        if backend.device_of(tensor) is not device
    ]
    if not elsewhere:
        return obj

    copies = list(zip(elsewhere, backend._copies(elsewhere, device, attempted), strict=True))
    refilled: list[tuple[Any, Any]] = []
    replaced: dict[int, Any] = {}
    for old, new in copies:
        if backend._is_refilled(old):
            refilled.append((old, new))
        else:
            replaced[id(old)] = new

    # One walk for all of them: a list that two modules share is made again once, and stays shared.
    nestings = [(name, part.value) for name, part in inventory.parts]
    flat = flatten_all([*nestings, ("", obj)], backend.kinds, attempted)
    *news, placed = flat.unflatten_all(replaced)
    # Nothing from here on can fail.
    for tensor, new in refilled:
        backend._refill(tensor, new)
    for (_, part), value in zip(inventory.parts, news, strict=True):
        if value is not part.value:
            part.put(value)
    for moved in inventory.objects:
        backend._finish(moved)
    return placed


def named_tensors(backend: Backend, obj: Any) -> list[tuple[str, Any]]:
    """The tensors that ``place`` looks after, with their names."""
    return Inventory(backend, obj, "list the tensors of an object").entries
