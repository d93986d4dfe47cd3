"""D2L 6.7.2, "Tensors and GPUs": nothing but d2ldev's errors comes out of d2ldev's functions.

Each public function is called with one argument that it does not expect, and the others right. The
functions and their parameters are looked up, so that a new one is among them. 300 calls are drawn
for each backend, and as many as ``D2LDEV_TEST_EXAMPLES`` says.
"""

from __future__ import annotations

import inspect
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from traceback import walk_tb
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d2ldev import Backend, D2LDevError
from d2ldev.framework import Learner
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite import hostile

EXAMPLES = int(os.environ.get("D2LDEV_TEST_EXAMPLES", "300"))
SECONDS = 60
"""A call that takes longer hangs."""
# It makes attributes of what is around it, as the book's does, and is given no value of a user's.
# What is in them is given to a model, whose own errors come out.
GIVEN_TO_MODELS = {"batches", "data", "train_data", "val_data", "loss", "metrics"}
LEFT_OUT = {"save_hyperparameters"}


class Argument(NamedTuple):
    """One argument of one function: of which class, its name, and the parameter's."""

    owner: type
    function: str
    parameter: str


def functions(backend: Backend) -> list[tuple[type, str, Any]]:
    """Return the public functions: class, name, signature without ``self``."""
    return [
        (owner, name, list(inspect.signature(function).parameters.values())[1:])
        for owner in hostile.owners(backend)
        for name, function in inspect.getmembers(owner, inspect.isfunction)
        if name not in LEFT_OUT and (name == "__init__" or not name.startswith("_"))
    ]


def called(backend: Backend, right: dict[str, Any], at: Argument, value: Any) -> Any:
    """Call a function with a value as one of its arguments, and right ones otherwise."""
    parameters = next(p for owner, name, p in functions(backend) if (owner, name) == at[:2])
    positional, named = [], {}
    for each in parameters:
        if each.name == at.parameter:
            given = value
        elif each.default is each.empty:
            given = right[each.name]()
        else:
            continue
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
            positional.append(given)
        else:
            named["a" if each.kind is each.VAR_KEYWORD else each.name] = given
    if at.function == "__init__":
        return at.owner(*positional, **named)
    return getattr(hostile.owners(backend)[at.owner](), at.function)(*positional, **named)


@contextmanager
def bounded() -> Iterator[None]:
    """Raise in what takes too long, where the system has alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_expected(error: Exception, at: Argument, value: Any) -> bool:
    """Tell whether an error is d2ldev's, the value's own, or a model's that was given the value."""
    if isinstance(error, (D2LDevError, hostile.OwnError)):
        return True
    if at.parameter not in GIVEN_TO_MODELS or isinstance(error, TimeoutError):
        return False
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    return any(owner is value or isinstance(owner, Learner) for owner in owners)


def outcome(backend: Backend, right: dict[str, Any], at: Argument, value: Any) -> str:
    """Return what is wrong with how a call ended; empty if nothing is."""
    try:
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = called(backend, right, at, value)
            if inspect.isgenerator(result):
                list(islice(result, 3))
            elif at.function == "on" and isinstance(result, AbstractContextManager):
                with result:
                    pass
    except Exception as error:
        if not is_expected(error, at, value):
            return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


@requirement("errors.hostile-arguments", section="6.7.2")
@pytest.mark.filterwarnings("ignore")
def test_nothing_but_errors_of_d2ldev_comes_out(backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    right, values = hostile.right(backend, tmp_path), hostile.values(backend)
    arguments = [
        Argument(owner, name, each.name)
        for owner, name, parameters in functions(backend)
        for each in parameters
    ]
    found: dict[str, str] = {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=EXAMPLES == 300,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(arguments),
        st.sampled_from(sorted(values)),
        st.lists(st.sampled_from(sorted(hostile.WRAPPERS)), max_size=2),
    )
    def check(at, name, wrappers):
        value = values[name]()
        for wrapper in wrappers:
            value = hostile.WRAPPERS[wrapper](value)
        wrong = outcome(backend, right, at, value)
        if wrong:
            call = f"{at.owner.__name__}.{at.function}({at.parameter}={name}, in {wrappers})"
            found[call] = wrong

    check()
    assert not found, "\n".join(f"{call}: {wrong}" for call, wrong in found.items())


@requirement("errors.hostile-values-of-each-kind", section="6.7.2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", ["to", "copy", "place", "to_numpy", "device_of", "address"])
def test_no_value_gets_through_what_takes_tensors(backend, tmp_path, function):
    right = hostile.right(backend, tmp_path)
    parameter = "obj" if function == "place" else "x"
    wrong = {
        name: outcome(backend, right, Argument(Backend, function, parameter), make())
        for name, make in hostile.values(backend).items()
    }
    assert {name: text for name, text in wrong.items() if text} == {}
