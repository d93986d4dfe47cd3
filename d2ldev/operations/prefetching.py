"""Batches that are on their way to a device while the one before them is computed with.

No thread is needed for it: a framework that works asynchronously has only to be asked early enough.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import Any

from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.framework import Copier, DeviceLike, Framework
from d2ldev.nesting.walk import flatten, plain_tensors
from d2ldev.operations import devices, moving
from d2ldev.operations.arguments import is_iterable, whole_number


def prefetch(
    framework: Framework, batches: Iterable[Any], device: DeviceLike, depth: int
) -> Generator[Any, None, None]:
    """Move batches to a device ahead of their use; see ``Backend.prefetch``."""
    target = devices.resolve(framework, device, "prefetch batches")
    if not is_iterable(batches):
        raise UnsupportedValueError(
            f"prefetch {describe(batches)}",
            "it is no iterable of batches",
            "backend.prefetch([batch], device)",
        )
    fix = "backend.prefetch(batches, device, depth=2)"
    depth = whole_number("prefetch", "depth", depth, least=0, fix=fix)
    moved = _moved(framework, batches, target, depth)
    return moved if framework.tensors.in_flight is None else _bounded(framework, moved)


def _moved(
    framework: Framework, batches: Iterable[Any], target: Device, depth: int
) -> Generator[Any, None, None]:
    if depth:
        ahead = framework.training.prefetch(batches, target, depth)
        if ahead is not None:
            # The framework's pipeline leaves some tensors elsewhere, which are moved here.
            return moved_in_turn(ahead, partial(moving.to, framework, target=target))
        batches = draw_outside(framework, batches)
        copier = None if target is CPU else framework.training.copier(target)
        if copier is not None:
            return _beside(framework, batches, target, depth, copier)
        return moved_ahead(batches, depth, _start(framework, target))
    return moved_in_turn(draw_outside(framework, batches), _start(framework, target))


def _bounded(
    framework: Framework, batches: Generator[Any, None, None]
) -> Generator[Any, None, None]:
    """Yield batches; now and then, wait until what reads an earlier one is done."""
    tensors, limit = framework.tensors, framework.tensors.in_flight or 1
    read: list[Any] = []
    with closing(batches):
        for batch in batches:
            read.append(batch)
            if len(read) == 2 * limit:
                late = flatten(read[limit - 1], framework.state.kinds, "prefetch batches")
                for x in late.tensors.values():
                    tensors.wait_for_readers(x)
                del read[:limit]
            yield batch


def _start(framework: Framework, device: Device) -> Callable[[Any], Any]:
    # By way of tensors of the host, because copies between tensors are asynchronous, and made
    # together. On the CPU and on virtual GPUs this would only be one more copy.
    is_real = framework.devices.platform(device) not in ("cpu", "virtual")

    def start(batch: Any) -> Any:
        if is_real:
            batch = moving.on_the_host(framework, batch, is_moved_later=True)
        return moving.to(framework, batch, device)

    return start


def _beside(
    framework: Framework, batches: Iterable[Any], device: Device, depth: int, copier: Copier
) -> Generator[Any, None, None]:
    """Move large batches ahead, beside the device, and each other one when it is asked for."""
    kinds = framework.state.kinds

    def start(batch: Any) -> Callable[[], Any]:
        plain = xs = plain_tensors(batch, kinds)
        if xs is None:
            batch = moving.on_the_host(framework, batch, is_moved_later=True)
            xs = list(flatten(batch, kinds, "prefetch batches").tensors.values())
        if not copier.is_large(xs):
            return partial(moving.move, framework, batch, device, copier.copy_in_turn, plain)
        moved = moving.move(framework, batch, device, copier.copy_all, plain)
        return partial(finish, moved, copier.mark_start())

    def finish(batch: Any, mark: Any) -> Any:
        copier.finish(mark)
        return batch

    return moved_ahead(batches, depth, start, lambda started: started())


def draw_outside(framework: Framework, batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Draw batches outside of a block ``backend.on(gpu)``: what makes them is on the host.

    In the block PyTorch would draw the order of a loader on the GPU, by a generator of the CPU,
    which it refuses: https://github.com/pytorch/pytorch/blob/main/torch/utils/data/sampler.py

    Args:
        framework: whose block it is.
        batches: in their order. If they are a generator, it is closed with this one.

    Yields:
        The batches.
    """
    source = _outside(framework, iter, batches)
    try:
        while True:
            found = [_outside(framework, next, source, _END)]
            if found[0] is _END:
                return
            yield found.pop()
    finally:
        if isinstance(source, Generator):
            source.close()


_END = object()


def _outside(framework: Framework, call: Callable[..., Any], *arguments: Any) -> Any:
    if framework.state.scope.value.get() in (None, CPU):
        return call(*arguments)
    with devices.on(framework, CPU):
        return call(*arguments)


def moved_in_turn(batches: Iterable[Any], move: Callable[[Any], Any]) -> Generator[Any, None, None]:
    """Move each batch when it is asked for.

    Args:
        batches: in their order. If they are a generator, it is closed with this one.
        move: moves a batch.

    Yields:
        The batches.
    """
    with closed_after(batches) as source:
        for batch in source:
            # Nothing is kept while it is in use: neither the host's copy nor this one.
            moved = [move(batch)]
            del batch
            yield moved.pop()


def moved_ahead(
    batches: Iterable[Any],
    depth: int,
    start: Callable[[Any], Any],
    finish: Callable[[Any], Any] = lambda started: started,
) -> Generator[Any, None, None]:
    """Start moving each batch ``depth`` batches before it is asked for.

    Args:
        batches: in their order. If they are a generator, it is closed with this one.
        depth: how many are ahead of the one in use, at least 1.
        start: begins to move a batch, without waiting for it.
        finish: makes what ``start`` returned into the batch, when it is asked for.

    Yields:
        The batches. An exception of ``batches`` or ``start`` is raised in the place of the batch
        that it belongs to, after those before it.
    """
    ahead: deque[Callable[[], Any]] = deque()
    with closed_after(batches) as source:
        begun = _begun(source, start, finish)
        try:
            ahead.extend(islice(begun, min(depth, sys.maxsize - 1) + 1))
            while ahead:
                yield ahead.popleft()()
                ahead.extend(islice(begun, 1))
        finally:
            ahead.clear()  # the traceback of an error has this frame, which would keep batches


def _begun(
    source: Iterator[Any], start: Callable[[Any], Any], finish: Callable[[Any], Any]
) -> Iterator[Callable[[], Any]]:
    """Begin to move each batch, and yield functions that return it; the last one may raise."""
    try:
        for batch in source:
            # Nothing is kept here: neither the host's copy nor the moved one.
            moved = [start(batch)]
            del batch
            yield partial(finish, moved.pop())
    except Exception as error:
        yield partial(_raise, error)


def _raise(error: Exception) -> None:
    try:
        raise error
    finally:
        del error  # its traceback has this frame, which would keep it


@contextmanager
def closed_after(batches: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Go through batches; if they are a generator, close it at the end of the block."""
    source = iter(batches)
    try:
        yield source
    finally:
        if isinstance(source, Generator):
            source.close()
