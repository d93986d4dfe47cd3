"""Tensors and numbers for the suite's tests, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from d2ldev import Backend

# Every call that makes a tensor.
CREATORS = {
    "asarray": lambda backend, **where: backend.asarray([1.0, 2.0], **where),
    "zeros": lambda backend, **where: backend.zeros((2, 3), **where),
    "ones": lambda backend, **where: backend.ones((2, 3), **where),
    "full": lambda backend, **where: backend.full((2, 3), 7.0, **where),
    "empty": lambda backend, **where: backend.empty((2, 3), **where),
    "arange": lambda backend, **where: backend.arange(5.0, **where),
    "rand": lambda backend, **where: backend.rand((2, 3), **where),
    "rand with a seed": lambda backend, **where: backend.rand((2, 3), seed=1, **where),
    "randn": lambda backend, **where: backend.randn((2, 3), **where),
    "randn with a seed": lambda backend, **where: backend.randn((2, 3), seed=1, **where),
}
creators = pytest.mark.parametrize("make", CREATORS.values(), ids=CREATORS)

needs_float32 = pytest.mark.needs("multiply in float32")
"""Of a test whose numbers come from several products, and are compared to float32's rounding."""


def numbers(dtype: str, shape: tuple[int, ...] = (3, 4)) -> NDArray[Any]:
    """Return NumPy data of a dtype, extremes included, in which no two neighbours are equal."""
    if dtype.startswith(("bfloat16", "float8")):
        import ml_dtypes

        numpy_dtype = np.dtype(getattr(ml_dtypes, dtype))
    else:
        numpy_dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    data = (np.arange(count) % 7 - (0 if numpy_dtype.kind in "bu" else 3)).astype(numpy_dtype)
    if numpy_dtype.kind in "iu" and count:
        data[0], data[-1] = np.iinfo(numpy_dtype).min, np.iinfo(numpy_dtype).max
    if numpy_dtype.kind == "c":
        data = data + 1j * data[::-1]
    return data.astype(numpy_dtype).reshape(shape)


def make_aligned(count: int, alignment: int) -> NDArray[np.float32]:
    """Return zeros that begin at a multiple of ``alignment`` bytes; some frameworks want it."""
    buffer = np.zeros(4 * count + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + 4 * count].view(np.float32)


def fail_if_called(*_operands: Any, **_options: Any) -> None:
    """Fail the test, in the place of a method that no call should need."""
    pytest.fail("the test has taken this method away")


def assert_same(x: NDArray[Any], y: NDArray[Any]) -> None:
    """Check that dtype, shape and bytes are the same: also NaN and the sign of zero."""
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    assert x.tobytes() == y.tobytes()


def room_for(count: int, transfer: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return ``transfer`` as on a device that holds ``count`` tensors, in one call or several.

    One call for all and a call for each have to fail at the same tensor. Otherwise a backend that
    puts the first in place before it copies the last would not be found.
    """
    copied: list[Any] = []

    def copies(xs: list[Any], native: Any, *, copy: bool) -> list[Any]:
        room = count - len(copied)
        made = transfer(xs[:room], native, copy=copy) if room else []
        copied.extend(made)
        if len(xs) > room:
            raise MemoryError("none left")
        return made

    return copies


def values_of(backend: Backend, obj: Any) -> dict[str, NDArray[Any]]:
    """Return the values of all that ``place`` handles, by name."""
    named = backend.named_tensors(obj, gradients=True)
    return {name: backend.to_numpy(x) for name, x in named.items()}


def read_contents(backend: Backend, tensors: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the values of an object's tensors, and assert that there are some."""
    assert tensors
    return [backend.to_numpy(x) for x in tensors]


def read_saved_values(backend: Backend, obj: Any) -> dict[str, NDArray[Any]]:
    """Return the values of all that is saved of an object, by name: no gradients."""
    return {name: backend.to_numpy(x) for name, x in backend.named_tensors(obj).items()}


def assert_same_values(backend: Backend, obj: Any, values: Mapping[str, NDArray[Any]]) -> None:
    """Check that the names are the same, in the same order, and the bytes too."""
    after = values_of(backend, obj)
    assert list(after) == list(values)
    for name, value in values.items():
        assert_same(after[name], value)


def flip_bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers with the lowest bit of every byte flipped."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return (array.reshape(-1).view(np.uint8) ^ 1).view(array.dtype).reshape(array.shape)


def assert_saved(backend: Backend, obj: Any, values: Mapping[str, NDArray[Any]]) -> None:
    """Check that what is saved of an object has these names and values."""
    after = read_saved_values(backend, obj)
    assert list(after) == list(values)
    for name, value in values.items():
        assert_same(after[name], value)


def outcome_of(backend: Backend, operation: Callable[..., Any], *operands: Any) -> Any:
    """Return the device of an operation's result, or the class of its error."""
    try:
        return backend.device_of(operation(*operands))
    except Exception as error:
        return type(error)


ROUNDING: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
"""For runs on several devices or processes, which add up the gradients of parts in another order.

It is some rounding of float32 in each of a dozen steps.
"""


def assert_near(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> None:
    """Check that two models have the same values, to rounding."""
    assert list(found) == list(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], err_msg=name, **ROUNDING)


def assert_same_run(run: Any, other: Any) -> None:
    """Check that two runs end with the same values and history, to rounding."""
    (values, history, *_), (other_values, other_history, *_) = run, other
    assert_near(values, other_values)
    assert list(history) == list(other_history)
    for name, curve in history.items():
        np.testing.assert_allclose(curve, other_history[name], **ROUNDING)


def make_normal_batches(*, has_equal_halves: bool) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return two batches of 1024 examples with four features and two classes.

    Args:
        has_equal_halves: whether the two halves of a batch have the same examples. Two shards then
            have the mean of the whole batch. Their variances differ only by the divisor n - 1.
    """
    inputs = np.random.default_rng(0).normal(3, 2, (2, 1024, 4)).astype("float32")
    if has_equal_halves:
        inputs[:, 512:] = inputs[:, :512]
    labels = (np.arange(1024) % 2).astype("int32")
    return [(x, labels) for x in inputs]


def make_repeated_tokens() -> list[list[tuple[NDArray[Any], NDArray[Any]]]]:
    """Return batches of four tokens and numbers for each, twice.

    In the second list each token is there three times, with other numbers of the same mean. The
    gradients of the mean squared error are the same.
    """
    draw = np.random.default_rng(0)
    once, repeated = [], []
    for tokens in ([0, 2, 3, 5], [1, 2, 4, 3], [5, 0, 4, 2]):
        ids = np.array(tokens, "int32")
        y, noise = (draw.normal(size=(4, 4)).astype("float32") for _ in range(2))
        once.append((ids.reshape(4, 1), y.reshape(4, 1, 4)))
        three = np.concatenate([y, y + noise, y - noise])
        repeated.append((np.tile(ids, 3).reshape(4, 3), three.reshape(4, 3, 4)))
    return [once, repeated]


def assert_same_statistics(
    found: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    start: Mapping[str, NDArray[Any]],
) -> None:
    """Check that two runs with a learning rate of 0 have changed a network in the same way.

    Such a run changes running statistics alone. Variances of 512 and of 1024 examples, with a
    divisor of n or n - 1, differ by 0.2 % at most.

    Args:
        found: the values after the one run, by name.
        expected: the values after the other run.
        start: the values before both.
    """
    assert list(found) == list(expected) == list(start)
    changes = {name: expected[name] - value for name, value in start.items()}
    assert any(np.any(np.abs(change) > 0.05) for change in changes.values())
    for name, change in changes.items():
        np.testing.assert_allclose(
            found[name] - start[name], change, rtol=0.002, atol=0.002, err_msg=name
        )


def difference_of_runs(run: Any, other: Any) -> float:
    """Return the largest difference of two runs, relative to ``|expected| + 0.1``."""
    (values, history), (expected, curves) = run, other
    assert (list(values), list(history)) == (list(expected), list(curves))
    pairs = [*zip(values.values(), expected.values(), strict=True)]
    pairs += zip(history.values(), curves.values(), strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)) / (np.abs(b) + 0.1))) for a, b in pairs)
