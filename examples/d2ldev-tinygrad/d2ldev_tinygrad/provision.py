"""Set-up of the conformance suite: builders of the objects that it tests with."""

from __future__ import annotations

from typing import Any

from d2ldev.framework.testing import Builders


def samples(backend: Any) -> Builders:
    """Return builders of small objects of every kind that ``place`` moves, by name."""
    return {}
