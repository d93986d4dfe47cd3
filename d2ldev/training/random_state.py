"""The random numbers of Python and of NumPy, from which loaders draw the order of their batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from d2ldev.errors import CheckpointError, describe


def random_state() -> dict[str, Any]:
    """The state of ``random`` and of ``np.random``, as a nesting that ``save`` takes."""
    version, numbers, next_gauss = random.getstate()
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": {
            "version": version,
            "numbers": np.asarray(numbers, "uint32").tobytes().hex(),
            "next_gauss": next_gauss,
        },
        "numpy": {
            "kind": kind,
            "key": np.asarray(key).tobytes().hex(),
            "numbers": [int(position), int(has_gauss), float(gauss)],
        },
    }


def checked_random_state(saved: Any) -> Callable[[], None]:
    """What lets the two go on from what ``random_state`` returned; nothing has changed before.

    Raises:
        CheckpointError: if that is not it.
    """
    try:
        python, numpy = saved["python"], saved["numpy"]
        numbers = np.frombuffer(bytes.fromhex(python["numbers"]), "uint32")
        python_state = (python["version"], tuple(map(int, numbers)), python["next_gauss"])
        random.Random().setstate(python_state)  # noqa: S311  # which refuses what is no state
        key = np.frombuffer(bytes.fromhex(numpy["key"]), "uint32")
        numpy_state = (numpy["kind"], key, *numpy["numbers"])
        np.random.RandomState().set_state(numpy_state)  # so does this
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "go on with the random numbers of a run",
            f"{describe(saved)} is no state of Python's and NumPy's",
            "name the file that fit(..., checkpoint=...) wrote",
        ) from error

    def set_random_state() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    return set_random_state
