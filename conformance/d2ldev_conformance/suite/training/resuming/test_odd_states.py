"""D2L 6.6 with 6.7.3: whatever stands in the checkpoint of a run, it goes on or is refused.

A checkpoint may come from another version, or from a stranger. It must neither crash the process
nor restore nonsense.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import numpy as np
import pytest

from d2ldev import ArrayLoader, Trainer
from d2ldev.errors import D2LDevError
from d2ldev.files.save import save
from d2ldev.framework.testing import framework_of
from d2ldev.training import run
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"
SOURCE = "contract, Resuming a run"


def _share():
    """Return a list with 2**60 values, made of 60 lists of two items."""
    nesting = [1]
    for _ in range(60):
        nesting = [nesting, nesting]
    return nesting


ODD = {
    "a large number": lambda _: 2**70,
    "text": lambda _: "x" * 10_000,
    "a list": lambda _: [None, {1: 2}],
    "shared lists": lambda _: _share(),
    "a tensor": lambda backend: backend.zeros((2,)),
}


def _with_each_part_replaced(value, odd):
    """Yield a nesting once for each of its parts, which is then another value."""
    yield odd
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            for part in _with_each_part_replaced(value[key], odd):
                other = value.copy()
                other[key] = part
                yield other


@pytest.fixture
def fitted(backend, tmp_path, monkeypatch):
    """Runs a training of one epoch, and returns what it saved at its end."""

    def make(*, resume):
        saved = []

        def record(framework, state, path):
            saved.append(state)
            save(framework, state, path)

        loader = ArrayLoader(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=2)
        with monkeypatch.context() as patch:
            patch.setattr(run, "save", record)
            options = {"checkpoint": tmp_path / "run", "resume": resume, "optimizer": "adam"}
            Trainer(1, backend=backend).fit(backend.mlp([2, 1], seed=0), loader, **options)
        return saved[-1] if saved else None

    return make


@requirement("fit.refuses-odd-states", section=SECTION)
@pytest.mark.parametrize("odd", ODD)
def test_a_run_whose_state_is_odd_goes_on_or_is_refused(backend, tmp_path, fitted, odd):
    """Refuse a run whose state is odd, or continue it, without any other error."""
    state = fitted(resume=False)
    # What the framework reads; the rest is the same for all of them.
    parts = {name: state["run"][name] for name in ("modes", "random")}
    for value in _replace(backend, parts, odd):
        odd_run = {**state["run"], **value} if isinstance(value, dict) else value
        save(framework_of(backend), {**state, "run": odd_run}, tmp_path / "run")
        _is_resumed_or_refused(fitted)


@requirement("fit.refuses-odd-states", section=SECTION)
@pytest.mark.parametrize("odd", ODD)
def test_a_run_whose_optimizer_has_an_odd_state_goes_on_or_is_refused(
    backend, tmp_path, fitted, odd, monkeypatch
):
    """Refuse an odd state of an optimizer, or continue, without any other error.

    Each framework reads this state by itself.
    """
    state, files = fitted(resume=False), framework_of(backend).files
    optimizer, state_of = state["components"]["optimizer"], files.state
    told = state_of(optimizer) or {}
    for value in [{**told, key: new} for key in told for new in _replace(backend, told[key], odd)]:
        with monkeypatch.context() as patch:
            patch.setattr(files, "state", lambda x, v=value: v if x is optimizer else state_of(x))
            save(framework_of(backend), state, tmp_path / "run")
        _is_resumed_or_refused(fitted)


def _replace(backend, value, odd):
    replaced = _with_each_part_replaced(value, ODD[odd](backend))
    # To count shared lists until they are too many takes a second.
    return islice(replaced, 0, None, 8 if odd == "shared lists" else 1)


def _is_resumed_or_refused(fitted):
    with suppress(D2LDevError):
        fitted(resume=True)
