"""The operators of ``d2ldev.typing.Array``, and the functions of docs/guides/operators.md."""

import importlib
import re
from typing import Protocol

import numpy as np
import pytest
from conftest import NAMES
from pages import ROOT

import d2ldev
from d2ldev.typing import Array

PAGE = (ROOT / "docs" / "guides" / "operators.md").read_text(encoding="utf-8")
NAMESPACES = dict(re.findall(r'^    "(\w+)": "([\w.]+)",$', PAGE, re.MULTILINE))
FUNCTIONS = {
    group: re.findall(r"`(\w+)`", names)
    for group, names in re.findall(r"^\| of (\w+ ?\w+) \| (.+) \|$", PAGE, re.MULTILINE)
}

X = np.asarray([[1.5, -2.0], [3.0, 0.25]], np.float32)
OPERATORS = {
    "__add__": "x + x[0, :]",
    "__radd__": "2 + x",
    "__sub__": "x - x[0, :]",
    "__rsub__": "2 - x",
    "__mul__": "x * x[0, :]",
    "__rmul__": "2 * x",
    "__truediv__": "x / x[0, :]",
    "__rtruediv__": "2 / x",
    "__matmul__": "x @ x",
    "__rmatmul__": "x.__rmatmul__(x)",
    "__pow__": "x**2",
    "__and__": "(x > 0) & (x > 1)",
    "__or__": "(x > 0) | (x > 1)",
    "__neg__": "-x",
    "__abs__": "abs(x)",
    "__getitem__": "x[:, None, :][..., -1]",
    "__bool__": "bool(x[0, 0])",
    "__int__": "int(x[0, 0])",
    "__eq__": "x == x[0, :]",
    "__ne__": "x != x[0, :]",
    "__lt__": "x < x[0, :]",
    "__le__": "x <= x[0, :]",
    "__gt__": "x > x[0, :]",
    "__ge__": "x >= x[0, :]",
    "dtype": "x.dtype == (x + x).dtype",
    "shape": "tuple(x.shape)",
}
CALLS = {
    "clip": "xp.clip(x, 0, 1)",
    "log": "xp.log(abs(x))",
    "log1p": "xp.log1p(abs(x))",
    "sqrt": "xp.sqrt(abs(x))",
    "logical_not": "xp.logical_not(x > 1)",
    "where": "xp.where(x > 0, x, -x)",
    "all": "xp.all(x > 0, axis=1)",
    "any": "xp.any(x > 0, axis=1)",
    "broadcast_to": "xp.broadcast_to(x, (3, 2, 2))",
    "expand_dims": "xp.expand_dims(x, axis=0)",
    "moveaxis": "xp.moveaxis(x, 0, 1)",
    "repeat": "xp.repeat(x, 2, axis=0)",
    "reshape": "xp.reshape(x, (4,))",
    "roll": "xp.roll(x, 1, axis=0)",
    "squeeze": "xp.squeeze(x[None], axis=0)",
    "stack": "xp.stack([x, x], axis=1)",
    "take": "xp.take(x, index, axis=0)",
    "tile": "xp.tile(x, (2, 1))",
    "tensordot": "xp.tensordot(x, x, axes=1)",
}
BINARY = ("equal", "maximum", "minimum", "not_equal", "remainder", "matmul")


def compute(source, **names):
    """Evaluate an expression; return what it gives as a NumPy array."""
    value = eval(source, names)
    if isinstance(value, (bool, int, tuple, np.ndarray, np.generic)):
        return np.asarray(value)
    return d2ldev.backend_of(value).to_numpy(value)


def test_each_operator_of_an_array_is_tried():
    def names(cls):
        return {name for each in cls.__mro__[:-2] for name in vars(each)}

    class Empty(Protocol):
        pass

    assert names(Array) - names(Empty) - {"__hash__"} == {*OPERATORS}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_gives_the_numbers_of_numpy(name, operator):
    source, backend = OPERATORS[operator], d2ldev.get_backend(name)
    x = backend.asarray(X, device="gpu:1")
    np.testing.assert_allclose(compute(source, x=x), compute(source, x=X), rtol=1e-6)


def find_calls():
    for group, names in FUNCTIONS.items():
        arguments = "x, axis=0" if group in ("an axis", "shapes") else "x"
        for name in names:
            usual = f"xp.{name}({'x, x' if name in BINARY else arguments})"
            yield CALLS.get(name, usual)


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("call", [*find_calls()])
def test_a_function_of_the_guide_gives_the_numbers_of_numpy(name, call):
    backend, xp = d2ldev.get_backend(name), importlib.import_module(NAMESPACES[name])
    index = np.asarray([1, 0, 1])
    expected = compute(call, xp=np, x=X, index=index)
    x, index = (backend.asarray(each, device="gpu:1") for each in (X, index))
    with backend.strict():
        found = compute(call, xp=xp, x=x, index=index)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
