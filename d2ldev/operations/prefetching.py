"""Batches that are on their way to a device while the one before them is computed with.

No thread is needed for it: a framework that works asynchronously has only to be asked early enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.operations.arguments import whole_number

_END = object()


def check_depth(depth: Any) -> int:
    """The number of batches to move ahead of their use; UnsupportedValueError if it is none."""
    fix = "backend.prefetch(batches, device, depth=2)"
    return whole_number("prefetch", "depth", depth, least=0, fix=fix)


def check_source(batches: Any) -> None:
    """UnsupportedValueError if there is nothing to go through."""
    # ``iter`` is not asked: it starts the processes of some loaders.
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise UnsupportedValueError(
            f"prefetch {describe(batches)}",
            "it is no iterable of batches",
            "backend.prefetch([batch], device)",
        )


def moved_ahead(
    batches: Iterable[Any],
    depth: int,
    start: Callable[[Any], Any],
    finish: Callable[[Any], Any] = lambda started: started,
) -> Generator[Any, None, None]:
    """Start moving each batch ``depth`` batches before it is asked for.

    Args:
        batches: in their order. If they are a generator, it is closed with this one.
        depth: how many are ahead of the one in use.
        start: begins to move a batch, without waiting for it.
        finish: makes what ``start`` returned into the batch, when it is asked for.

    Yields:
        The batches. An exception of ``batches`` or ``start`` is raised in the place of the batch
        that it belongs to, after those before it.
    """
    source = iter(batches)
    ahead: deque[Any] = deque()
    failure: Exception | None = None
    is_over = False
    try:
        while True:
            while not is_over and len(ahead) <= depth:
                try:
                    batch = next(source, _END)
                    is_over = batch is _END
                    if not is_over:
                        ahead.append(start(batch))
                except Exception as error:
                    failure, is_over = error, True
                # What is kept is what was moved: on the host a batch lives no longer than needed.
                batch = None
            if not ahead:
                break
            yield finish(ahead.popleft())
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback has this frame, which would keep itself
        ahead.clear()
        if isinstance(source, Generator):
            source.close()
