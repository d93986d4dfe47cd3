"""What an exercise measured: rows with figures, or with the reason why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from d2ldev.operations.timing import Timing

VIRTUAL = "virtual"


@dataclass(frozen=True)
class Figures:
    """How long the work of a row takes.

    Args:
        seconds: the median.
        low, high: the quartiles.
        rate: work in each second, in the exercise's unit.
    """

    seconds: float
    low: float
    high: float
    rate: float


@dataclass(frozen=True)
class Row:
    """One way of doing the work of an exercise, on one device.

    Args:
        way: the measured operation.
        device: where; ``'gpu:0 + gpu:1'`` for two.
        platform: of the device: ``'cuda'``, ``'virtual'`` ...
        size: the width of the matrices, where an exercise has several.
        figures: None if it was not measured.
        note: why it was not measured.
        precision: what products of float32 were computed in: see ``backend.matmul_precision``.
    """

    way: str
    device: str
    platform: str
    size: int | None = None
    figures: Figures | None = None
    note: str = ""
    precision: str = ""

    def with_timing(self, timing: Timing, work: float) -> Row:
        """Return the row with the figures of a timing of so much work."""
        rate = work / max(timing.median, 1e-12)
        return replace(self, figures=Figures(timing.median, timing.low, timing.high, rate))


@dataclass(frozen=True)
class Result:
    """An exercise on one backend.

    Args:
        exercise: its name.
        backend: the backend's name.
        question: its question.
        unit: of the rates.
        rows: the measurements.
        error: why it ended before it was done; None if it did not.
    """

    exercise: str
    backend: str
    question: str
    unit: str
    rows: list[Row] = field(default_factory=list)
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return its fields, the fields of its rows, and ``best``."""
        return asdict(self) | {"best": find_bests(self.rows)}


def find_bests(rows: Sequence[Row]) -> dict[str, float]:
    """Return the best rate of each device, over all rows: of products, its measured peak."""
    found: dict[str, float] = {}
    for row in rows:
        if row.figures is not None:
            found[row.device] = max(row.figures.rate, found.get(row.device, 0.0))
    return found
