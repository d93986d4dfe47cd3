"""The area ``strict``: raise an error for an operation on tensors of different devices.

Where a framework refuses them by itself, its error is raised in d2ldev's words. Where it does not,
functions are replaced, for as long as any block of any thread is in force.

Held by ``tests/core/operations/test_strictness.py`` and the requirements ``strict.*``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from d2ldev.errors import NotBegunError
from d2ldev.locks import Lock
from d2ldev.scopes import Entry, Scopes, leave_in_turn, make_change

if TYPE_CHECKING:
    from d2ldev.contract.leaks import Watch


class Strict:
    """Methods a framework implements for ``strict()``; all but ``follow`` have a default.

    The helpers ``mismatch``, ``operands_of`` and ``replace`` are in ``d2ldev.operations.mixing``.
    """

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        """Make the framework refuse operands of different devices; return a function that ends it.

        The functions of the framework are replaced. Where ``in_force()`` they raise
        ``mismatch(...)``, and elsewhere they work as before. A framework that refuses mixing by
        itself needs this too, because its own error is not d2ldev's. Called when the first block
        begins; the returned function is called when the last one has ended.
        """
        return lambda: None

    def scope(self, *, everywhere: bool) -> AbstractContextManager[Any]:
        """Return the framework's own context that belongs to one block.

        With ``everywhere`` it is entered for every thread of the process, and never left.
        """
        return nullcontext()

    def follow(self, watch: Watch) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        """Return a context that reports to a watch what functions create, move and read.

        For ``d2ldev.find_leaks``. In the context, tensors that tests create are on the device of
        the watch. The first operation on a tensor of that device sets
        ``watch.has_inputs``. The end of the context leaves the framework as it was.

        The context gives a function for inputs that were made before. The function moves the
        tensors among the values of a dict to the device.

        Raises:
            NotBegunError: by default. A framework that cannot do it has ``'find leaks'`` in
                ``Framework.cannot``.
        """
        raise NotBegunError("Strict.follow", f"find leaks of {watch.device}")


class Strictness:
    """Where ``strict()`` is in force, and what is replaced meanwhile.

    Args:
        name: of the framework.
        get_strict: returns the area ``strict`` of the framework.
    """

    def __init__(self, name: str, get_strict: Callable[[], Strict]) -> None:
        self._get_strict = get_strict
        self._restore: Callable[[], None] | None = None
        self._lock = Lock()
        self._open: set[object] = set()
        self._everywhere = False
        self._blocks: Scopes[bool] = Scopes(f"{name}_strict")

    def in_force(self) -> bool:
        """Return whether this thread or task is in a block, or the whole process is under it."""
        return self._everywhere or self._blocks.is_in_force()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Be strict for the length of a block, in this thread or task only."""
        entry = self._blocks.enter(True)
        try:
            context = make_change(self._begin, entry)
            try:
                yield
            finally:
                leave_in_turn(context.__exit__, None, None, None)
        finally:
            self._blocks.leave(entry)
            leave_in_turn(self._leave, entry)

    def everywhere(self) -> None:
        """Be strict in the whole process, in every thread, from now on."""
        self._begin(self, everywhere=True)
        self._everywhere = True

    def _begin(self, block: object, everywhere: bool = False) -> AbstractContextManager[Any]:
        """Begin a block; return the framework's own context, which was entered."""
        with self._lock:
            if not self._open:
                self._restore = self._get_strict().refuse_mixing(self.in_force)
            self._open.add(block)
        context = self._get_strict().scope(everywhere=everywhere)
        context.__enter__()
        return context

    def _leave(self, block: Entry[bool]) -> None:
        with self._lock:
            self._open.discard(block)
            if not self._open and self._restore is not None:
                self._restore()
                self._restore = None
