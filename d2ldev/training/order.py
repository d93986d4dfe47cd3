"""The order of the batches, for a run that goes on in another process as if it had not ended.

A loader draws the order of an epoch from somewhere: a generator, a counter, the seeds of a
``tf.data.Dataset``. What can be read is saved; what cannot is brought to where it was by going
through the data once more for each epoch that is done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.registry.selection import backend_of_loader
from d2ldev.training.random_state import checked_random_state, random_state

# What the order of data depends on. These words are in the files.
OWN_STATE = "its own state"
NOTHING = "nothing"
GENERATORS = "generators"
PASSES = "how often it was gone through"

# What iterates over batches that are there, always in the same order.
_CONTAINERS: set[Any] = {
    *(list.__iter__, tuple.__iter__, deque.__iter__),
    *(type({}.values()).__iter__, type({}.items()).__iter__),
}

# How often data was gone through in this process, by its identity: it need not be hashable.
_passes: dict[int, int] = {}


def count_pass(data: object) -> None:
    """A pass through data begins."""
    if id(data) not in _passes:
        try:
            weakref.finalize(data, _passes.pop, id(data), None)
        except TypeError:
            return  # it is not told when this is gone; ``Order`` refuses it where it matters
    _passes[id(data)] = _passes.get(id(data), 0) + 1


class Order:
    """Where the order of the next epoch comes from.

    Args:
        data: a loader with ``state_dict`` and ``load_state_dict``, as ``ArrayLoader``; a container
            of batches; a framework's loader that its backend can read; or anything else, which is
            gone through, and has to have an order that depends on itself alone.

    Raises:
        UnsupportedValueError: if passes through it cannot be counted.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data: Any = data
        self._backend = None
        if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
            self._kind = OWN_STATE
        elif getattr(type(data), "__iter__", None) in _CONTAINERS:
            self._kind = NOTHING
        else:
            self._backend = backend_of_loader(data)
            is_known = self._backend is not None and self._backend._loader_state(data) is not None
            self._kind = GENERATORS if is_known else PASSES
        if self._kind == PASSES and not _has_weak_references(data):
            raise UnsupportedValueError(
                f"keep the order of {describe(data)}",
                "how often it was gone through cannot be told: it takes no weak references",
                "__slots__ = (..., '__weakref__'), or give it state_dict() and "
                "load_state_dict(state)",
            )

    def state(self) -> dict[str, Any]:
        """What the order of the next epoch depends on, as a nesting that ``save`` takes."""
        return {"kind": self._kind, "state": self._state(), "random": random_state()}

    def _state(self) -> Any:
        if self._kind == OWN_STATE:
            return self._data.state_dict()
        if self._backend is not None and self._kind == GENERATORS:
            return self._backend._loader_state(self._data)
        return _passes.get(id(self._data), 0) if self._kind == PASSES else None

    def checked(self, saved: Any) -> Callable[[], None]:
        """What brings the data to where it was when ``state`` returned this.

        Nothing has changed before it is called. It goes through the data where it has to.

        Raises:
            CheckpointError: if that is no state of such data.
        """
        if not isinstance(saved, dict) or saved.keys() != {"kind", "state", "random"}:
            raise _refusal(f"{describe(saved)} says nothing of it")
        if saved["kind"] != self._kind:
            raise _refusal(
                f"the run began with another loader, whose order depends on {saved['kind']}, and "
                f"that of {describe(self._data)} on {self._kind}"
            )
        set_random_state = checked_random_state(saved["random"])
        set_order = self._setter(saved["state"])

        def go_on() -> None:
            set_order()
            set_random_state()  # last: to go through data may draw from it

        return go_on

    def _setter(self, state: Any) -> Callable[[], None]:
        if self._kind == OWN_STATE:
            return lambda: self._data.load_state_dict(state)
        if self._backend is not None and self._kind == GENERATORS:
            return self._backend._checked_loader_state(self._data, state)
        if self._kind != PASSES:
            return lambda: None
        if type(state) is not int:
            raise _refusal(f"{describe(state)} is no number of times that it was gone through")
        done = _passes.get(id(self._data), 0)
        if state < done:
            raise CheckpointError(
                "go on with the order of the data",
                f"it was gone through {done} times in this process, {state} times when the state "
                "was kept, and it cannot go back",
                "make the data anew from its source, shuffling included, or give it state_dict() "
                "and load_state_dict(state)",
            )
        return lambda: self._go_through(state - done)

    def _go_through(self, times: int) -> None:
        for _ in range(times):
            count_pass(self._data)
            for _batch in self._data:
                pass


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(
        "go on with the order of the data",
        problem,
        "resume with a loader of the kind that the run began with",
    )


def _has_weak_references(data: object) -> bool:
    try:
        weakref.ref(data)
    except TypeError:
        return False
    return True
