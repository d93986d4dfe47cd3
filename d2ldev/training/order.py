"""The order of the batches, for a run that goes on in another process as if it had not ended.

It keeps the state that can be read: the ``state_dict`` of a loader that has one, the generators of
a framework's own loader, and the random numbers. Data without such a state, such as a shuffled
``tf.data.Dataset``, begins in the new process as it begins in any.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from d2ldev.areas import Framework, Training
from d2ldev.device import Device
from d2ldev.errors import CheckpointError, describe, quote
from d2ldev.registry.selection import framework_of_loader
from d2ldev.training.data import ArrayLoader


def begin_epoch(data: Any, epoch: int) -> None:
    """Tell data and its samplers the number of the epoch, where they have ``set_epoch``.

    ``torch.utils.data.DistributedSampler`` shuffles by this number.
    """
    framework = framework_of_loader(data, "sharded_types")
    training = Training() if framework is None else framework.training
    training.begin_epoch(data, epoch)


class Order:
    """Where the order of the next epoch comes from.

    Args:
        data: a loader with ``state_dict`` and ``load_state_dict``, as ``ArrayLoader``; a
            framework's own loader; or any other iterable.

    Attributes:
        is_common: whether processes that train together take that of the first one. A state of the
            user's own may be what no message can hold.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.is_common = isinstance(data, ArrayLoader)
        # What the order depends on, in the words of the files.
        self._kind = "nothing"
        self._state: Callable[[], Any] = lambda: None
        self._checked: Callable[[Any], Callable[[], None]] = lambda _: lambda: None
        if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
            self._kind = "its own state"
            self._state = data.state_dict
            self._checked = lambda state: lambda: data.load_state_dict(state)
        elif (framework := framework_of_loader(data)) is not None:
            self._kind, self.is_common = "generators", True
            self._state = partial(framework.training.loader_state, data)
            self._checked = partial(framework.training.check_loader_state, data)

    def state(self) -> dict[str, Any]:
        """Return what the order of the next epoch depends on, as a nesting that ``save`` takes."""
        return {**self.own_state(), "random": random_state()}

    def own_state(self) -> dict[str, Any]:
        """Return that without the host's random numbers."""
        return {"kind": self._kind, "state": self._state()}

    def check(self, saved: Any) -> Callable[[], None]:
        """Return a function that brings the data back to a state that ``state`` returned.

        Nothing has changed before it is called.

        Raises:
            CheckpointError: if it is no state of such data.
        """
        if not isinstance(saved, dict) or saved.keys() != {"kind", "state", "random"}:
            raise _refusal(f"{describe(saved)} says nothing of it")
        set_order = self.check_own(saved)
        set_random_state = check_random_state(saved["random"])

        def go_on() -> None:
            set_order()
            set_random_state()

        return go_on

    def check_own(self, saved: dict[str, Any]) -> Callable[[], None]:
        """Return a function that does so with what ``own_state`` returned.

        Raises:
            CheckpointError: if it is no state of such data.
        """
        if saved["kind"] != self._kind:
            raise _refusal(
                "the run began with another loader, whose order depends on "
                f"{quote(saved['kind'])}, and that of {describe(self._data)} on {self._kind}"
            )
        return self._checked(saved["state"])


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(
        "go on with the order of the data",
        problem,
        "resume with a loader of the kind that the run began with",
    )


def random_states(framework: Framework, device: Device) -> dict[str, Any]:
    """Return the states of the framework's and the host's random numbers, as a nesting to save."""
    return {"random": framework.training.random_state(device), "host": random_state()}


def check_random_states(
    framework: Framework, saved: dict[str, Any], device: Device
) -> Callable[[], None]:
    """Return a function that restores what ``random_states`` returned.

    Raises:
        CheckpointError: if it is no such state. Nothing has changed then.
    """
    set_framework = framework.training.check_random_state(saved["random"], device)
    set_host = check_random_state(saved["host"])

    def set_both() -> None:
        set_framework()
        set_host()

    return set_both


def random_state() -> dict[str, Any]:
    """Return the state of ``random`` and of ``np.random``, as a nesting that ``save`` takes."""
    version, numbers, next_gauss = random.getstate()
    return {
        "python": [version, np.asarray(numbers, "uint32"), next_gauss],
        "numpy": np.random.get_state(legacy=False),
    }


def check_random_state(saved: Any) -> Callable[[], None]:
    """Return a function that restores such a state; nothing changes before its call.

    Raises:
        CheckpointError: if it is no such state, or ``np.random`` has another kind of generator now.
    """
    try:
        version, numbers, next_gauss = saved["python"]
        if not isinstance(next_gauss, (float, NoneType)):
            raise TypeError(f"{describe(next_gauss)} was drawn")
        if len(numbers) != len(random.getstate()[1]):
            raise ValueError(f"it has {len(numbers)} numbers")
        python_state = version, tuple(map(int, numbers)), next_gauss
        random.Random().setstate(python_state)  # noqa: S311  # refuses a wrong state
        numpy_state = saved["numpy"]
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
    """Check that a state can be set, on a new generator of the kind that ``np.random`` has."""
    name = np.random.get_state(legacy=False)["bit_generator"]
    scratch = np.random.RandomState(getattr(np.random, name)())
    scratch.set_state(state)
    # NumPy reads at these positions, and does not check that they are in the buffer:
    # https://github.com/numpy/numpy/blob/main/numpy/random/_mt19937.pyx
    inner = state["state"]
    if not 0 <= inner.get("pos", 0) <= len(inner.get("key", ())):
        raise ValueError(f"pos is {inner['pos']}")
    if not 0 <= state.get("buffer_pos", 0) <= 4:
        raise ValueError(f"buffer_pos is {state['buffer_pos']}")
