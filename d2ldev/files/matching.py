"""Which tensor of a model is which of a file: by its name, or by what it is in the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.files.layouts import by_role
from d2ldev.files.restoring import Stored
from d2ldev.framework import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Conversion(NamedTuple):
    """From the layout of a tensor in the file to that in the model."""

    come_from: Layout
    to: Layout

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The canonical shape of what is stored; one that none has, if its layout is a lie."""
        is_true = math.prod(stored) == math.prod(self.come_from.split)
        return self.come_from.shape if is_true else (-1,)

    def __call__(self, array: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """The values as the model has them."""
        return self.to.native(self.come_from.canonical(array), shape)


class Match(NamedTuple):
    """What was found.

    Args:
        pairs: by name in the model: what it is in the file, and how it is converted.
        missing: names of the model.
        unexpected: names of the file.
    """

    pairs: Mapping[str, tuple[Stored, Conversion | None]]
    missing: Sequence[str]
    unexpected: Sequence[str]


def matched(
    mine: Mapping[str, Layout] | None,
    stored: Mapping[str, Stored],
    theirs: Mapping[str, Layout] | None,
    names: Sequence[str],
) -> Match:
    """Pair the tensors of a model with those of a file.

    Args:
        mine: the layouts of the model, if they are known.
        stored: the tensors of the file, by their names.
        theirs: the layouts there, if they are known.
        names: of the model's tensors.
    """
    found_by_role = by_role(theirs or {})
    pairs: dict[str, tuple[Stored, Conversion | None]] = {}
    used = set()
    for name in names:
        its_name, conversion = name, None
        layout = (mine or {}).get(name)
        if layout is not None and theirs is not None and layout.role in found_by_role:
            its_name = found_by_role[layout.role]
            if theirs[its_name] != layout:
                conversion = Conversion(theirs[its_name], layout)
        if its_name in stored:
            pairs[name] = (stored[its_name], conversion)
            used.add(its_name)
    return Match(
        pairs,
        [name for name in names if name not in pairs],
        [name for name in stored if name not in used],
    )
