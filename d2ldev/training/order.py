"""``Order``: the state of the order of batches, for a run that resumes in another process.

It holds the ``state_dict`` of a loader. Of a framework's own loader it holds the states of the
samplers and the generators. It also holds the random numbers of the host. Other data, such as a
shuffled ``tf.data.Dataset``, has no state that can be read. In the new process it starts again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2ldev.contract import Framework, Training
from d2ldev.contract.training import state_refusal
from d2ldev.distributed.random_states import check_random_state, random_state
from d2ldev.errors import CheckpointError, UnsupportedValueError, describe, quote, text_of
from d2ldev.files.save import Structure
from d2ldev.registry.selection import framework_of_loader
from d2ldev.training.array_loader import ArrayLoader


def begin_epoch(data: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the data, its dataset and its samplers, if they have it.

    ``torch.utils.data.DistributedSampler`` shuffles by this number.
    """
    framework = framework_of_loader(data)
    training = Training() if framework is None else framework.training
    setters = [getattr(each, "set_epoch", None) for each in _find_sources(training, data)]
    for set_epoch in filter(callable, setters):
        set_epoch(epoch)


def _find_sources(training: Training, loader: Any) -> list[Any]:
    """Return what decides the order of a loader's batches, each object once."""
    found = {id(each): each for each in training.order_of(loader) if each is not None}
    return list(found.values())


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
        elif (framework := framework_of_loader(data)) is not None:
            sources = list(filter(_has_state, _find_sources(framework.training, data)))
            if sources:
                self._kind, self.is_common = "generators", True
                self._state = lambda: [_read_state(framework, each) for each in sources]
                self._check = lambda states: _check_states(sources, states)

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


def _has_state(source: Any) -> bool:
    """Tell whether the state can be read and set: ``get_state()`` and ``set_state(state)``."""
    # A fifth of the time that ``import d2ldev`` takes, and only training asks.
    import inspect

    try:
        inspect.signature(source.get_state).bind()
        inspect.signature(source.set_state).bind("state")
    except ValueError:  # a function in C may have no signature
        return True
    except (AttributeError, TypeError):
        return False
    return True


def _read_state(framework: Framework, source: Any) -> Any:
    """Return the state of a sampler or a generator.

    Raises:
        UnsupportedValueError: if a file cannot hold it.
    """
    state = source.get_state()
    attempted = f"save the state of {describe(source)}"
    try:
        Structure(framework, state, attempted)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(
            attempted,
            f"its get_state() returns {describe(state)}, which a file cannot hold",
            "return numbers, text, arrays, and lists and dicts of them from get_state()",
        ) from error
    return state


def _check_states(sources: list[Any], states: Any) -> Callable[[], None]:
    """Return a function that gives samplers and generators their states, or changes none."""
    if not isinstance(states, list):
        raise state_refusal("loader", f"{describe(states)} is not a list of states")
    if len(states) != len(sources):
        raise state_refusal(
            "loader",
            f"{len(sources)} of its samplers and generators have a state, and {len(states)} had "
            "one when the run began",
        )

    def put() -> None:
        before = [each.get_state() for each in sources]
        for source, state in zip(sources, states, strict=True):
            try:
                source.set_state(state)
            except Exception as error:
                for each, old in zip(sources, before, strict=True):
                    each.set_state(old)
                if isinstance(error, CheckpointError):
                    raise
                problem = f"{describe(source)} refuses its state: {text_of(error)}"
                raise state_refusal("loader", problem) from error

    return put


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(
        "restore the order of the data",
        problem,
        "resume with the same kind of loader",
    )
