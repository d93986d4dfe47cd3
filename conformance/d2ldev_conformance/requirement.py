"""``@requirement``: the id under which a test is reported, and the chapter's section.

>>> @requirement("copy.noop-returns-same-object", section="6.7.2.2")
... def test_a_tensor_already_on_the_device_is_returned_itself(backend): ...
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from d2ldev.framework.testing import MODULES

_SUITE = Path(__file__).parent / "suite"
_ID = re.compile(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*")

SECTIONS = {
    "6.6": "File I/O",
    "6.7.1": "Computing Devices",
    "6.7.2": "Tensors and GPUs",
    "6.7.2.1": "Storage on the GPU",
    "6.7.2.2": "Copying",
    "6.7.2.3": "Side Notes",
    "6.7.3": "Neural Networks and GPUs",
    "6.7.5": "Exercises",
    "13.5": "Training on Multiple GPUs",
    "13.6": "Concise Implementation for Multiple GPUs",
}

ROOMS = MODULES
"""The rooms of the contract, in the order in which a backend is written and tested."""


class Requirement(NamedTuple):
    """One thing that every backend must do.

    Args:
        id: ``area.what-holds``; a report has one row for it.
        section: the section of D2L's chapter that it comes from.
        room: of the contract; see ``room_of``.
    """

    id: str
    section: str
    room: str = ""


def requirement(id: str, *, section: str) -> pytest.MarkDecorator:  # noqa: A002
    """Mark a test as the one that checks a requirement.

    Raises:
        ValueError: if the id is not ``area.what-holds``, or the chapter has no such section.
    """
    if not _ID.fullmatch(id) or section not in SECTIONS:
        raise ValueError(f"no id of a requirement, or no section: {id!r}, {section!r}")
    return pytest.mark.requirement(id, section)


def requirement_of(item: pytest.Item) -> Requirement | None:
    """Return the requirement that a collected test checks; None if it names none."""
    mark = item.get_closest_marker("requirement")
    if mark is None:
        return None
    id, section = mark.args  # noqa: A001
    return Requirement(id, section, room_of(item.path))


def room_of(path: Path) -> str:
    """Return the area of a file of tests, at any depth in the suite; its folder outside of it."""
    if path.is_relative_to(_SUITE):
        return path.relative_to(_SUITE).parts[0]
    return path.parent.name
