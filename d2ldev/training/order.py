"""``Order``: the state of the order of batches, for a run that resumes in another process.

It holds the ``state_dict`` of a loader, or the generators of a framework's own loader. It also
holds the random numbers of the host. Other data, such as a shuffled ``tf.data.Dataset``, has no
state that can be read. In the new process it starts again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

import numpy as np

from d2ldev.contract import Framework, Training
from d2ldev.device import Device
from d2ldev.errors import CheckpointError, describe, quote
from d2ldev.registry.selection import framework_of_loader
from d2ldev.training.data import ArrayLoader


def begin_epoch(data: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the data and its samplers, if they have it.

    ``torch.utils.data.DistributedSampler`` shuffles by this number.
    """
    framework = framework_of_loader(data)
    training = Training() if framework is None else framework.training
    training.begin_epoch(data, epoch)


class Order:
    """The state of the order of the next epoch.

    Args:
        data: a loader with ``state_dict`` and ``load_state_dict``, such as ``ArrayLoader``. A
            framework's own loader, or any other iterable.

    Attributes:
        is_common: whether processes that train together use the state of rank 0. A message may be
            unable to hold the state of a user's own loader.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.is_common = isinstance(data, ArrayLoader)
        # The kind of the state, as the files name it.
        self._kind = "nothing"
        self._state: Callable[[], Any] = lambda: None
        self._check: Callable[[Any], Callable[[], None]] = lambda _: lambda: None
        if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
            self._kind = "its own state"
            self._state = data.state_dict
            self._check = lambda state: lambda: data.load_state_dict(state)
        elif (
            framework := framework_of_loader(data)
        ) is not None and framework.training.loader_state(data) is not None:
            self._kind, self.is_common = "generators", True
            self._state = partial(framework.training.loader_state, data)
            self._check = partial(framework.training.check_loader_state, data)

    def state(self) -> dict[str, Any]:
        """Return the state of the next epoch's order, and of the random numbers, for ``save``."""
        return {**self.own_state(), "random": random_state()}

    def own_state(self) -> dict[str, Any]:
        """Return the state of the data alone."""
        return {"kind": self._kind, "state": self._state()}

    def check(self, saved: Any) -> Callable[[], None]:
        """Return a function that restores a state; nothing changes before its call.

        Args:
            saved: the result of ``state``.

        Raises:
            CheckpointError: if it is not a state of such data.
        """
        if not isinstance(saved, dict) or saved.keys() != {"kind", "state", "random"}:
            raise _refusal(f"{describe(saved)} is not a state of data")
        set_order = self.check_own(saved)
        set_random_state = check_random_state(saved["random"])

        def restore() -> None:
            set_order()
            set_random_state()

        return restore

    def check_own(self, saved: dict[str, Any]) -> Callable[[], None]:
        """Return a function that restores the result of ``own_state``; see ``check``.

        Raises:
            CheckpointError: if it is not a state of such data.
        """
        if saved["kind"] != self._kind:
            raise _refusal(
                "the run began with another loader: its order depends on "
                f"{quote(saved['kind'])}, and the order of {describe(self._data)} on {self._kind}"
            )
        return self._check(saved["state"])


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(
        "restore the order of the data",
        problem,
        "resume with the same kind of loader",
    )


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
