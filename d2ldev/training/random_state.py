"""The random numbers of Python and of NumPy, from which loaders draw the order of their batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np

from d2ldev.errors import CheckpointError, describe


def random_state() -> dict[str, Any]:
    """The state of ``random`` and of ``np.random``, as a nesting that ``save`` takes."""
    version, numbers, next_gauss = random.getstate()
    return {
        "python": {
            "version": version,
            "numbers": np.asarray(numbers, "uint32").tobytes().hex(),
            "next_gauss": next_gauss,
        },
        "numpy": _plain(np.random.get_state(legacy=False)),
    }


def checked_random_state(saved: Any) -> Callable[[], None]:
    """What lets the two go on from what ``random_state`` returned; nothing has changed before.

    Raises:
        CheckpointError: if that is not it, or ``np.random`` has another kind of generator now.
    """
    try:
        python = saved["python"]
        numbers = np.frombuffer(bytes.fromhex(python["numbers"]), "uint32")
        python_state = (python["version"], tuple(map(int, numbers)), python["next_gauss"])
        if not isinstance(python_state[2], (float, NoneType)):
            raise TypeError(f"{describe(python_state[2])} was drawn")
        random.Random().setstate(python_state)  # noqa: S311  # which refuses what is no state
        numpy_state = _native(saved["numpy"])
        _check_numpy(numpy_state)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            "go on with the random numbers of a run",
            f"{describe(saved)} is no state of Python's and NumPy's, or one of other generators",
            "name the file that fit(..., checkpoint=...) wrote",
        ) from error

    def set_random_state() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    return set_random_state


def _check_numpy(state: Any) -> None:
    """See that it can be set: on a generator of its own, of the kind that ``np.random`` has."""
    name = np.random.get_state(legacy=False)["bit_generator"]
    scratch = np.random.RandomState(getattr(np.random, name)())
    scratch.set_state(state)
    # NumPy reads where such a number points to, and does not look whether that is in the buffer:
    # https://github.com/numpy/numpy/blob/main/numpy/random/_mt19937.pyx
    positions = (
        ("pos", state["state"], len(state["state"].get("key", ()))),
        ("buffer_pos", state, 4),
    )
    for key, holder, largest in positions:
        if not 0 <= holder.get(key, 0) <= largest:
            raise ValueError(f"{key} is {holder[key]}")


def _plain(state: Any) -> Any:
    """A state of NumPy's without arrays, whose dtypes not every framework has, or large numbers."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.name, "bytes": state.tobytes().hex()}
    return {"integer": str(state)} if isinstance(state, int) else state


def _native(state: Any) -> Any:
    """The state of NumPy's that ``_plain`` made this of."""
    if not isinstance(state, dict):
        return state
    if state.keys() == {"dtype", "bytes"}:
        return np.frombuffer(bytes.fromhex(state["bytes"]), state["dtype"])
    if state.keys() == {"integer"}:
        return int(state["integer"])
    return {key: _native(value) for key, value in state.items()}
