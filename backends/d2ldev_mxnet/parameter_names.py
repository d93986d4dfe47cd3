"""MXNet's names of parameters count on from model to model: ``dense9_bias``, ``dense10_bias``.

A ``gluon.Trainer`` sorts them as text, so that the numbers which it gives to the same parameters
differ from one model to the next.
"""

from __future__ import annotations

import re
from typing import Any


def in_order_of_making(name: str) -> list[Any]:
    """What names are sorted by, so that a parameter that was made earlier comes first.

    >>> sorted(['dense10_bias', 'dense9_bias'], key=in_order_of_making)
    ['dense9_bias', 'dense10_bias']
    """
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def ranks(parameters: dict[Any, Any]) -> dict[Any, int]:
    """Which of an optimizer's parameters was made first, and so on: number -> rank."""
    by_age = sorted(parameters, key=lambda number: in_order_of_making(parameters[number].name))
    return {number: rank for rank, number in enumerate(by_age)}
