"""The differences between an object and a file, and the error that tells all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from d2ldev.contract import Framework
from d2ldev.errors import CheckpointError, quote
from d2ldev.files.load import Checkpoint, shorten
from d2ldev.files.tensors_by_name import TensorsByName
from d2ldev.options import nearest

# A file may have millions of long names. An error shows this many of them. It looks for the name
# that was meant among this many.
_SHOWN = 10
COMPARED = 500

Source = Checkpoint | TensorsByName


class Differences:
    """The names in an object and in a file.

    Args:
        source: the file, or a mapping.

    Attributes:
        matched, missing, unexpected: the names that are on both sides, here, and there.
        different: in words, the differences of shape, dtype or kind.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.matched: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []

    def note(self, name: str, mine: str, theirs: str) -> None:
        """Note that a value is of another shape, dtype or kind in the file.

        Args:
            name: its name.
            mine, theirs: in words, what it is here, and what the file has: ``'is float32 (2, 3)'``,
                ``'float64 (2, 3)'``.
        """
        called = self.source.called
        self.different.append(f"{name or 'the top'} {mine}, and {called} has {theirs}")

    def check(self, framework: Framework, *, is_strict: bool) -> None:
        """Raise one error that names everything that does not fit, if anything does not.

        Args:
            framework: which reads the file.
            is_strict: whether each name has to be on both sides.
        """
        source, told = self.source, []
        if self.missing and is_strict:
            told.append(f"it lacks {_some(self.missing)}")
        if self.unexpected and is_strict:
            told.append(f"it has unexpected {_some(self.unexpected)}")
            near = [(name, find_nearest(name, self.unexpected)) for name in self.missing[:_SHOWN]]
            told += [f"{shorten(name)} may be {shorten(other)}" for name, other in near if other]
        if self.different:
            told.append(f"these do not fit: {_some(self.different, '; ')}")
        if not told:
            return
        is_ours = source.writer in (None, framework.name)
        by = "" if is_ours else f", which the {shorten(source.writer)} backend wrote"
        fix = f"{source.look}{by}"
        if fitting := _find_fitting_node(self.missing, self.unexpected):
            fix = f"backend.load_into(..., only={quote(fitting)}), or {fix}"
        elif fitting := _find_fitting_node(self.unexpected, self.missing):
            fix = f"load it into the value at {quote(fitting)} of the object alone, or {fix}"
        # Such as a module whose parameters are kept apart from it.
        elif self.unexpected and not (self.matched or self.missing or self.different):
            told.append("the object holds no tensors")
            fix = (
                "give what was saved, or what holds its tensors: "
                f"params = backend.load_into(params, ...); {fix}"
            )
        raise CheckpointError(source.attempted, f"{'; '.join(told)}; nothing was changed", fix)


def find_nearest(name: str, names: Sequence[str]) -> str:
    """Return the name that was meant: spelt in another way, or with a part more or less in front.

    Empty if there is none.
    """
    parts, found = name.split("."), ""
    for other in names[:COMPARED]:
        others = other.split(".")
        number = min(len(parts), len(others))
        mine, tail = (".".join(each[-number:]) for each in (parts, others))
        if abs(len(parts) - len(others)) < 2:
            if mine == tail:
                return other
            found = found or (other if nearest(mine, [tail]) else "")
    return found


def _find_fitting_node(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the name of the only node in ``others`` that has these names; empty if none has."""
    if not names or len(names) > len(others):
        return ""
    nodes = [
        other.removesuffix(f".{names[0]}") for other in others if other.endswith(f".{names[0]}")
    ]
    wanted = set(names)
    # A file may have millions of names, and each node is compared with all of them.
    fitting = [
        node
        for node in nodes[:_SHOWN]
        if wanted == {each[len(node) + 1 :] for each in others if each.startswith(f"{node}.")}
    ]
    return fitting[0] if len(fitting) == 1 else ""


def _some(names: Sequence[str], separator: str = ", ") -> str:
    text = separator.join(map(shorten, names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{text} and {more} more" if more > 0 else text
