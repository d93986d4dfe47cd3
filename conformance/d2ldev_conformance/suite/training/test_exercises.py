"""D2L 6.7.5: the exercises that ``d2ldev bench`` measures.

The book asks its readers to measure. The time of a wrong result says nothing.
"""

from __future__ import annotations

import pytest

from d2ldev.bench.exercises import EXERCISES
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.5"
SOURCE = "D2L"


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES.keys())
@requirement("bench.exercises-are-measured", section=SECTION)
@pytest.mark.needs("multiply in float32")
def test_an_exercise_computes_correctly_on_the_device_of_each_row(backend, exercise):
    """Compute each exercise correctly, on the device of each row."""
    backend.mlp([1, 1])  # a result has an error as text only
    result = exercise.run(backend, exercise.small, seconds=0)
    assert result.error is None
    assert result.rows
    assert all((row.figures is None) == bool(row.note) for row in result.rows)
