"""Fixtures for the tests of training: batches and devices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def batches() -> list[tuple[Any, Any]]:
    """A line in four batches; the last one is smaller."""
    inputs = np.linspace(-1, 1, 28, dtype="float32").reshape(14, 2)
    targets = inputs @ np.array([[2.0], [-3.4]], "float32") + np.float32(4.2)
    return [(inputs[i : i + 4], targets[i : i + 4]) for i in range(0, 14, 4)]


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.needs_gpus(1))], ids=["cpu", "gpu0"])
def num_gpus(request: pytest.FixtureRequest) -> Any:
    """For the trainer: the CPU, or the first GPU."""
    return request.param


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, as in a terminal; what a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
