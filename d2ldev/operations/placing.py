"""How ``place`` moves models and optimizers: all of it, once, or nothing.

There are three steps, in an order in which an error changes nothing:

1. find every tensor of the object: ``inventory.py``;
2. copy the tensors on other devices, and make containers for the copies;
3. put them in place, which cannot fail.

Held by the requirements ``place.*`` of the conformance suite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from d2ldev.contract import DeviceLike, Framework, Models
from d2ldev.device import Device
from d2ldev.display import MOST_ROWS, format_html_table
from d2ldev.errors import UnsupportedValueError, warn
from d2ldev.nesting.kinds import TENSOR
from d2ldev.nesting.walk import flatten_all, join_path
from d2ldev.operations import devices, moving
from d2ldev.operations.inventory import Inventory, Search

T = TypeVar("T")


def place(framework: Framework, obj: Any, device: DeviceLike) -> Any:
    """Move everything that ``obj`` holds to a device; see ``Backend.place``."""
    target = devices.resolve(framework, device, "place a model")
    attempted = f"place {type(obj).__name__} on {target}"
    with framework.models.place_context(target) as transfer:
        transfer = transfer or framework.tensors.transfer
        return _place(framework, obj, target, attempted, transfer)


def _place(
    framework: Framework,
    obj: Any,
    device: Device,
    attempted: str,
    transfer: Callable[..., list[Any]],
) -> Any:
    models = framework.models
    search, elsewhere = _ask_tensors(framework, obj, attempted, lambda x: _elsewhere(x, device))
    if search.has_notes:
        search.check_tensors()
    if not elsewhere:
        if search.has_notes:
            _tell_what_stays(search, obj, device)
        _settle(search, device)
        return obj

    native = devices.native(framework, device, attempted)
    with moving.translate(framework, elsewhere, native, attempted):
        news = transfer(elsewhere, native, copy=False)
    refills: list[Callable[[], object]] = []
    replaced: dict[int, Any] = {}
    for old, new in zip(elsewhere, news, strict=True):
        if refill := models.find_refill(old):
            refills.append(partial(refill, new))
        else:
            replaced[id(old)] = new

    # A tensor that is refilled stays where it is kept.
    slots = [
        (name, slot)
        for name, slot in search.slots
        if slot.put is not None
        and (framework.state.kinds[type(slot.value)] is not TENSOR or id(slot.value) in replaced)
    ]
    # One walk for all of them: a list that two modules share is made again once, and stays shared.
    nestings = [(name, slot.value) for name, slot in slots]
    flat = flatten_all([*nestings, ("", obj)], framework.state.kinds, attempted)
    *values, placed = flat.unflatten_all(replaced)
    if search.has_notes:
        _tell_what_stays(search, obj, device, elsewhere)
    # Nothing from here on can fail.
    for fill in refills:
        fill()
    for (_, slot), new in zip(slots, values, strict=True):
        if slot.put is not None and new is not slot.value:
            slot.put(new)
    for each in search.objects:
        models.finish(each)
    _settle(search, device)
    return placed


def _ask_tensors(
    framework: Framework, obj: Any, attempted: str, ask: Callable[[Search], T]
) -> tuple[Search, T]:
    """Return a search of an object's tensors that have values, and the answer to a question.

    Args:
        framework, obj, attempted: see ``Search``.
        ask: returns the answer. It raises an ``UnsupportedValueError`` for a tensor without values.
            A traced call of a model may have left one in an attribute.
    """
    search = Search(framework, obj, attempted)
    try:
        return search, ask(search)
    except UnsupportedValueError:
        search = Inventory(framework, obj, attempted)
        return search, ask(search)


def _elsewhere(search: Search, device: Device) -> list[Any]:
    """Return the tensors that are on another device, each once."""
    is_on, left = search.framework.tensors.is_on, search.stays
    found = [x for name, x in search.entries if name not in left and not is_on(x, device)]
    return list({id(x): x for x in found}.values())


def settle(framework: Framework, obj: Any, device: Device) -> Any:
    """Adapt each object in a new model to its device, and return the model."""
    if type(framework.models).settle is not Models.settle:
        _settle(Search(framework, obj, "make a model"), device)
    return obj


_told: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()
"""What was said of the objects of a class: each thing once, and not at each ``place``."""


def _tell_what_stays(
    search: Search, obj: Any, device: Device, elsewhere: Collection[Any] = ()
) -> None:
    """Warn once of what ``place`` has found and leaves on another device.

    Args:
        search: of the object.
        obj: the object that the user gave.
        device: where it is placed.
        elsewhere: the tensors that move.
    """
    framework, cls = search.framework, type(obj)
    found = []
    # Each tensor by its first name.
    told_of: set[int] = set()
    for name, (x, line) in search.stays.items():
        place = _find_place(framework, x)
        if place not in (None, device) and id(x) not in told_of:
            told_of.add(id(x))
            found.append((name, f"is on {place}, and stays there; {line} registers it"))
    sources = {framework.tensors.device_of(x) for x in elsewhere}
    for name, x in search.notes:
        if framework.state.kinds.method_of(type(x), 0) is not None:
            found.append((name, "stays: it moves by a method of its own, which you call"))
            continue
        noted = x if isinstance(x, Device) else framework.devices.from_native(x)
        if noted is not device and noted in sources:
            found.append((name, f"names {noted}, and stays as it is"))
    found += search.foreign
    told = _told.setdefault(cls, set())
    news = [(name, text) for name, text in found if f"{name} {text}" not in told]
    if not news:
        return
    lines = [f"  {join_path(cls.__name__, name)} {text}" for name, text in news[:_SHOWN]]
    more = [f"  and {len(news) - _SHOWN} more"] if len(news) > _SHOWN else []
    beginning = f"place {cls.__name__} on {device} leaves behind what it does not move:"
    fix = "  fix: register what has to move, and ask backend.device_of(x) for a device"
    warn("\n".join([beginning, *lines, *more, fix]))
    told.update(f"{name} {text}" for name, text in news)


_SHOWN = 8
"""How many names a warning has."""


def _find_place(framework: Framework, x: Any) -> Device | None:
    """Return the device of a tensor that stays; None if it has none, as in a traced call."""
    try:
        return framework.tensors.device_of(x)
    except UnsupportedValueError:
        return None


class Placement(dict[str, Device]):
    """The device of each tensor by its name, as ``Backend.placement`` returns it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        counts = Counter(self.values())
        caption = ", ".join(f"{count} on {device}" for device, count in sorted(counts.items()))
        header = ("tensor", "device")
        return format_html_table(header, self.items(), caption=caption, limit=MOST_ROWS)


def placement(framework: Framework, obj: Any) -> Placement:
    """Return where everything is that ``obj`` holds; see ``Backend.placement``."""
    return _ask_tensors(framework, obj, "list the tensors of an object", _list_places)[1]


def _list_places(search: Search) -> Placement:
    framework, left = search.framework, search.stays
    device_of = framework.tensors.device_of
    return Placement(
        {
            name: place
            for name, x in search.entries
            if (place := device_of(x) if name not in left else _find_place(framework, x))
            is not None
        }
    )


def _settle(search: Search, device: Device) -> None:
    models = search.framework.models
    if type(models).settle is not Models.settle:
        for obj in search.objects:
            models.settle(obj, device)
