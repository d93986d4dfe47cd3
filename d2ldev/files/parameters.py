"""The order of an optimizer's parameters, here and in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from d2ldev.files.load import shorten
from d2ldev.files.structure import Parameter

# An error names this many parameters.
_SHOWN = 3


def find_positions(
    mine: Sequence[tuple[str, Any]],
    theirs: Sequence[Parameter],
    taken: Mapping[int, Sequence[str]],
    names: Mapping[int, str],
    called: str,
) -> list[int] | None:
    """Return for each parameter of an optimizer its position in the file.

    The tensor of the file that it takes decides, then the name that the optimizer gives it. A
    parameter without either has its own position. None means that all have their own.

    Args:
        mine: see ``Files.list_parameters``.
        theirs: the parameters in the file.
        taken: the names of the file's tensors that a tensor takes, by its id.
        names: the name of each tensor here, by its id.
        called: how messages call the file.

    Raises:
        ValueError: if only one of the two has a parameter.
    """
    if not mine or not theirs:
        return None
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
    have_names = any(id(mine[i][1]) in names for i in rest) and any(
        other.name for other in left.values()
    )
    have_labels = any(mine[i][0] for i in rest) and any(x.label for x in left.values())
    if len(mine) != len(theirs) or have_names or have_labels:
        here = [names.get(id(x)) or label or str(i) for i, (label, x) in enumerate(mine)]
        there = [x.name or x.label or str(j) for j, x in enumerate(theirs)]
        told = [f"{shorten(here[i])} only here" for i in rest[:_SHOWN]]
        told += [f"{shorten(there[j])} only in {called}" for j in [*left][:_SHOWN]]
        raise ValueError(f"it has other parameters: {', '.join(told)}")
    found.update(zip(rest, left, strict=True))
    order = [found[i] for i in range(len(mine))]
    return None if order == list(range(len(mine))) else order
