"""D2L 6.7.2, "Tensors and GPUs": nothing but d2ldev's errors comes out of d2ldev's functions.

A user's mistake reaches a framework as an argument that it does not expect. Its own error names
lines that the user never wrote.

Each public function is called with one argument that it does not expect, and the others right. The
functions and their parameters are looked up, so that a new one is among them. 300 calls are drawn
for each backend, and as many as ``D2LDEV_TEST_EXAMPLES`` says.
"""

from __future__ import annotations

import inspect
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice, repeat
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d2ldev import Backend, D2LDevError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.tensors import hostile

SOURCE = "contract, Containers and errors"

EXAMPLES = int(os.environ.get("D2LDEV_TEST_EXAMPLES", "300"))
SECONDS = 60
"""A call that takes longer hangs."""
# It makes attributes of what is around it, as the book's does, and is given no value of a user's.
LEFT_OUT = {"save_hyperparameters"}
# What is given although it has a default, which takes a second.
LIMITS = {"seconds"}
# What the caller's own objects are given, or are asked.
GIVEN_TO_MODELS = {"data", "train_data", "val_data"}
CALLED = {"function", "loss", "metrics"}


class Argument(NamedTuple):
    """One argument of one function: the class, the function's name, and the parameter's name."""

    owner: type
    function: str
    parameter: str


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a method without ``self``."""
    return list(inspect.signature(function).parameters.values())[1:]


def arguments(backend: Backend) -> list[Argument]:
    """Return the arguments of all public functions."""
    return [
        Argument(owner, name, each.name)
        for owner in hostile.owners(backend)
        for name, function in inspect.getmembers(owner, inspect.isfunction)
        if name not in LEFT_OUT and (name == "__init__" or not name.startswith("_"))
        for each in parameters_of(function)
    ]


def call(backend: Backend, right: dict[str, Any], at: Argument, value: Any) -> Any:
    """Call a function with a value as one of its arguments, and right ones otherwise."""
    positional, named = [], {}
    for each in parameters_of(getattr(at.owner, at.function)):
        if each.name == at.parameter:
            given = value
        elif each.default is each.empty or each.name in LIMITS:
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


class HangError(BaseException):
    """A call takes too long.

    The core makes errors of its own of each ``Exception``, which would hide this one.
    """


@contextmanager
def limit_time() -> Iterator[None]:
    """Raise in what takes too long, where the system has alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def hangs(*_: Any) -> None:
        raise HangError(f"it takes more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fails_alone(
    backend: Backend, right: dict[str, Any], at: Argument, make: Callable[[], Any]
) -> bool:
    """Tell whether the caller's own function or model raises without d2ldev, too, as given here."""
    try:
        value = make()
        if at.parameter in CALLED:
            for function in value if isinstance(value, (list, tuple)) else [value]:
                function(right["x"](), right["x"]())
        elif at.parameter in GIVEN_TO_MODELS:
            model = right["model"]()
            for batch in map(backend.to, islice(value, 3), repeat("cpu")):
                model(batch[0] if isinstance(batch, (list, tuple)) and batch else batch)
    except Exception as alone:
        return not isinstance(alone, D2LDevError)
    return False


def outcome(backend: Backend, right: dict[str, Any], at: Argument, make: Callable[[], Any]) -> str:
    """Return what is wrong with how a call with a value ended; empty if nothing is."""
    try:
        with limit_time(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(backend, right, at, make())
            if inspect.isgenerator(result):
                list(islice(result, 3))
            elif at.function == "on" and isinstance(result, AbstractContextManager):
                with result:
                    pass
    except HangError as error:
        return str(error)
    except Exception as error:
        is_expected = isinstance(error, (D2LDevError, hostile.OwnError))
        if not is_expected and not fails_alone(backend, right, at, make):
            return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


@requirement("errors.hostile-arguments", section="6.7.2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_warm_training")
def test_hostile_calls_raise_only_errors_of_d2ldev(backend, tmp_path, monkeypatch):
    """Answer 300 random wrong calls of public functions with errors of d2ldev only."""
    monkeypatch.chdir(tmp_path)
    right, values = hostile.right(backend, tmp_path), hostile.values(backend)
    found: dict[str, str] = {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=EXAMPLES == 300,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(arguments(backend)),
        st.sampled_from(sorted(values)),
        st.lists(st.sampled_from(sorted(hostile.WRAPPERS)), max_size=2),
    )
    def check(at, name, wrappers):
        def make():
            value = values[name]()
            for wrapper in wrappers:
                value = hostile.WRAPPERS[wrapper](value)
            return value

        wrong = outcome(backend, right, at, make)
        if wrong:
            shown = f"{at.owner.__name__}.{at.function}({at.parameter}={name}, in {wrappers})"
            found[shown] = wrong

    check()
    assert not found, "\n".join(f"{shown}: {wrong}" for shown, wrong in found.items())


@requirement("errors.hostile-values-of-each-kind", section="6.7.2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_warm_training")
@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        *(("to", "x"), ("copy", "x"), ("place", "obj"), ("to_numpy", "x"), ("device_of", "x")),
        *(("address", "x"), ("accuracy", "prediction"), ("save", "obj"), ("prefetch", "batches")),
    ],
)
def test_functions_of_tensors_refuse_hostile_values(backend, tmp_path, function, parameter):
    """Refuse each kind of wrong value in nine functions that take tensors.

    The random calls do not reach every pair.
    """
    right = hostile.right(backend, tmp_path)
    wrong = {
        name: outcome(backend, right, Argument(Backend, function, parameter), make)
        for name, make in hostile.values(backend).items()
    }
    assert {name: text for name, text in wrong.items() if text} == {}
