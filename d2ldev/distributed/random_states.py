"""The states of the random numbers of a framework and of the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np

from d2ldev.contract import Framework
from d2ldev.device import Device
from d2ldev.errors import CheckpointError, describe


def random_states(framework: Framework, device: Device) -> dict[str, Any]:
    """Return the states of the framework's and the host's random numbers, for ``save``."""
    return {"random": framework.training.random_state(device), "host": random_state()}


def check_random_states(
    framework: Framework, saved: dict[str, Any], device: Device
) -> Callable[[], None]:
    """Return a function that restores the result of ``random_states``.

    Raises:
        CheckpointError: if ``saved`` is not such a state. Nothing changes then.
    """
    set_framework = framework.training.check_random_state(saved["random"], device)
    set_host = check_random_state(saved["host"])

    def set_both() -> None:
        set_framework()
        set_host()

    return set_both


def random_state() -> dict[str, Any]:
    """Return the states of ``random`` and ``np.random``, for ``save``."""
    version, numbers, next_gauss = random.getstate()
    return {
        "python": [version, np.asarray(numbers, "uint32"), next_gauss],
        "numpy": np.random.get_state(legacy=False),
    }


def check_random_state(saved: Any) -> Callable[[], None]:
    """Return a function that restores the result of ``random_state``.

    Nothing changes before its call.

    Raises:
        CheckpointError: if ``saved`` is not such a state, or ``np.random`` has another generator.
    """
    try:
        version, numbers, next_gauss = saved["python"]
        if not isinstance(next_gauss, (float, NoneType)):
            raise TypeError(f"the next number is {describe(next_gauss)}")
        if len(numbers) != len(random.getstate()[1]):
            raise ValueError(f"it has {len(numbers)} numbers")
        python_state = version, tuple(map(int, numbers)), next_gauss
        random.Random().setstate(python_state)  # noqa: S311  # refuses a wrong state
        numpy_state = saved["numpy"]
        _check_numpy(numpy_state)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            "restore the random numbers of a run",
            f"{describe(saved)} is not a state of the generators of Python and NumPy",
            "name a file of fit(..., checkpoint=...)",
        ) from error

    def set_random_state() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    return set_random_state


def _check_numpy(state: Any) -> None:
    """Check that a state can be set, with a new generator of the kind of ``np.random``."""
    name = np.random.get_state(legacy=False)["bit_generator"]
    scratch = np.random.RandomState(getattr(np.random, name)())
    scratch.set_state(state)
    # NumPy reads at these positions without a check of the buffer's length:
    # https://github.com/numpy/numpy/blob/main/numpy/random/_mt19937.pyx
    inner = state["state"]
    if not 0 <= inner.get("pos", 0) <= len(inner.get("key", ())):
        raise ValueError(f"pos is {inner['pos']}")
    if not 0 <= state.get("buffer_pos", 0) <= 4:
        raise ValueError(f"buffer_pos is {state['buffer_pos']}")
