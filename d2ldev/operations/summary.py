"""The table of a model's modules: how many numbers they hold, in how many bytes, and where.

The tensors are those of ``place``, by the same walk. Nothing is computed, moved or waited for.

Held by the requirements ``show.*`` of the conformance suite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from d2ldev.contract import Framework, Role
from d2ldev.device import Device
from d2ldev.display import format_html_table, format_number, format_text_table
from d2ldev.errors import D2LDevError, UnsupportedValueError, describe, text_of
from d2ldev.nesting.kinds import PLAIN
from d2ldev.operations.inventory import Inventory

_HEADER = ("module", "class", "parameters", "trained", "buffers", "MB", "dtype", "device")
_NUMBERS = ("parameters", "trained", "buffers", "MB")
_MOST_NOTES = 8


class ModuleSize(NamedTuple):
    """The size of a module, without the modules inside it.

    Args:
        name: its name in the model; empty for the model itself.
        kind: the name of its class.
        parameters: how many numbers its parameters have.
        trained: how many of them training changes. The others are frozen.
        buffers: how many numbers its other tensors have, such as running means.
        nbytes: the bytes of each dtype.
        devices: where its tensors are.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    buffers: int
    nbytes: Mapping[str, int]
    devices: tuple[Device, ...]


class Summary:
    """The sizes of the modules of a model; as text it is a table with a row for each module.

    A tensor under several names counts once, under the first. Gradients do not count.

    Args:
        modules: a ``ModuleSize`` for each module, in the order of the model.
        notes: a line for each tensor that does not count, with the reason.

    Attributes:
        total: the ``ModuleSize`` of the whole model.

    >>> summary = backend.summarize(backend.mlp([2, 4, 1]))
    >>> summary.total.parameters, [each.parameters for each in summary.modules]
    (17, [12, 5])
    """

    def __init__(self, modules: Sequence[ModuleSize], notes: Sequence[str] = ()) -> None:
        self.modules, self.notes = tuple(modules), tuple(notes)
        nbytes: Counter[str] = Counter()
        for each in modules:
            nbytes.update(each.nbytes)
        self.total = ModuleSize(
            "",
            "total",
            sum(each.parameters for each in modules),
            sum(each.trained for each in modules),
            sum(each.buffers for each in modules),
            dict(nbytes),
            tuple(sorted({device for each in modules for device in each.devices})),
        )

    def __repr__(self) -> str:
        lines = [format_text_table(_HEADER, self._rows(), numbers=_NUMBERS), *self._list_remarks()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        table = format_html_table(_HEADER, self._rows(), numbers=_NUMBERS)
        remarks = "<br>".join(map(escape, self._list_remarks()))
        return f"{table}\n<p>{remarks}</p>" if remarks else table

    def _rows(self) -> Iterator[list[str]]:
        for each in (*self.modules, self.total):
            yield [
                each.name,
                each.kind,
                *(f"{number:,}" for number in (each.parameters, each.trained, each.buffers)),
                _format_megabytes(sum(each.nbytes.values())),
                ", ".join(each.nbytes),
                ", ".join(map(str, each.devices)),
            ]

    def _list_remarks(self) -> list[str]:
        """Return the lines below the table."""
        lines = []
        if len(self.total.nbytes) > 1:
            by_dtype = (
                f"{name} {_format_megabytes(nbytes)} MB"
                for name, nbytes in self.total.nbytes.items()
            )
            lines.append(", ".join(by_dtype))
        lines += self.notes[:_MOST_NOTES]
        if len(self.notes) > _MOST_NOTES:
            lines.append(f"and {len(self.notes) - _MOST_NOTES} more")
        return lines


def _format_megabytes(nbytes: int) -> str:
    """Return a number of bytes in millions, with three digits."""
    megabytes = nbytes / 1e6
    if 0 < megabytes < 0.001:
        return "< 0.001"
    return format_number(megabytes)


def summarize(framework: Framework, obj: Any) -> Summary:
    """Return the sizes of the modules of an object; see ``Backend.summarize``."""
    return _Walk(framework, obj).summarize()


class _Walk(Inventory):
    """The walk of ``place`` through a model, with the module of each tensor."""

    def __init__(self, framework: Framework, obj: Any) -> None:
        attempted = "summarize a model"
        super().__init__(framework, obj, attempted, is_saved=True)
        if self._kinds[type(obj)] is PLAIN:
            problem, fix = f"{describe(obj)} has no tensors", "backend.summarize(net), with a model"
            raise UnsupportedValueError(attempted, problem, fix)
        self._rows = {
            self._seen[id(each)]: _Row(self._seen[id(each)], each)
            for each in self.objects
            if id(each) not in self.variables
        }
        self._slots = dict(self.slots)
        self._notes: list[str] = []

    def summarize(self) -> Summary:
        """Return the sizes of the modules."""
        known: dict[int, str] = {}
        for name, x in self.entries:
            if id(x) not in known:
                self._count(name, x)
                known[id(x)] = name
            elif self._find_role(name, self.framework.tensors.dtype_of(x)) is not None:
                # An optimizer lists the parameters again, and they are not its own.
                self._note_tie(name, known[id(x)])
        for name, first in self.again.items():
            if first not in self._rows:  # a variable in two modules
                self._note_tie(name, first)
        self._note_missing(has_tensors=bool(known))
        self._notes += [f"{name} {clause}" for name, clause in self.foreign]
        return Summary([row.to_size() for row in self._rows.values()], self._notes)

    def _note_missing(self, *, has_tensors: bool) -> None:
        """Note where tensors are missing, with the line that makes them, each line once."""
        top, told = type(self.top).__name__, set()
        for name, lacking in self.without_tensors:
            # Beside a module of linen are its parameters. The modules in it lack them, too.
            if lacking.is_kept_apart and (has_tensors or lacking.problem in told):
                continue
            fix = "" if lacking.fix in told else f"; fix: {lacking.fix}"
            self._notes.append(f"{name or top} {lacking.problem}{fix}")
            told |= {lacking.problem, lacking.fix}

    def _note_tie(self, name: str, first: str) -> None:
        # A module may list a tensor as an attribute, too.
        if self._find_row(name) is not self._find_row(first):
            self._notes.append(f"{name} is {first}, and counts once")

    def _count(self, name: str, x: Any) -> None:
        tensors = self.framework.tensors
        try:
            device = tensors.device_of(x)
            number = math.prod(int(size) for size in x.shape)
            dtype, nbytes = tensors.dtype_of(x), tensors.nbytes(x)
        except Exception as error:  # it has no shape yet, or is on several devices
            problem = error.problem if isinstance(error, D2LDevError) else text_of(error)
            self._notes.append(f"{name} does not count: {problem.partition('. ')[0]}")
            return
        row = self._find_row(name)
        is_trained = self._find_role(name, dtype)
        if is_trained is None:
            row.buffers += number
        else:
            row.parameters += number
            row.trained += number * is_trained
        row.nbytes[dtype] = row.nbytes.get(dtype, 0) + nbytes
        row.devices[device] = None

    def _find_row(self, name: str) -> _Row:
        """Return the row of the innermost module around a tensor, else of its container."""
        for outer in _list_prefixes(name):
            if outer in self._rows:
                return self._rows[outer]
        container = name.rpartition(".")[0]
        return self._rows.setdefault(container, _Row(container, None))

    def _find_role(self, name: str, dtype: str) -> bool | None:
        """Return whether training changes a parameter; None for a buffer."""
        slot = self._slots.get(name)
        if slot is not None:
            return slot.is_trained if slot.role is Role.PARAMETER else None
        for outer in _list_prefixes(name):
            if outer in self._slots:  # a container
                return True if self._slots[outer].role is Role.PARAMETER else None
        # A pytree does not say what its arrays are for.
        return True if dtype.startswith(("float", "bfloat", "complex")) else None


class _Row:
    """The size of a module, while it is counted."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.kind = name, "" if module is None else type(module).__name__
        self.parameters = self.trained = self.buffers = 0
        self.nbytes: dict[str, int] = {}
        self.devices: dict[Device, None] = {}

    def to_size(self) -> ModuleSize:
        """Return the size."""
        numbers = self.parameters, self.trained, self.buffers
        return ModuleSize(self.name, self.kind, *numbers, self.nbytes, tuple(self.devices))


def _list_prefixes(name: str) -> Iterator[str]:
    """Yield the names of everything around a tensor, from the inside to the outside."""
    while name:
        name = name.rpartition(".")[0]
        yield name
