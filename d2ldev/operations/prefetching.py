"""Batches that are on their way to a device while the one before them is computed with.

No thread is needed for it: a framework that works asynchronously has only to be asked early enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

from d2ldev.contract import DeviceLike, Framework
from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.walk import Flattened
from d2ldev.operations import devices, moving
from d2ldev.operations.arguments import is_iterable, whole_number

_END = object()


def prefetch(
    framework: Framework, batches: Iterable[Any], device: DeviceLike, depth: int
) -> Generator[Any, None, None]:
    """Move batches to a device ahead of their use; see ``Backend.prefetch``."""
    target = devices.resolve(framework, device, "prefetch batches")
    if not is_iterable(batches):
        raise UnsupportedValueError(
            f"prefetch {describe(batches)}",
            "it is not an iterable of batches",
            "backend.prefetch([batch], device)",
        )
    fix = "backend.prefetch(batches, device, depth=2)"
    depth = whole_number("prefetch", "depth", depth, least=0, fix=fix)
    return device_batches(framework, batches, target, depth)


def device_batches(
    framework: Framework,
    data: Iterable[Any],
    device: Device | None,
    depth: int,
    *,
    prepare: Callable[[Any], Any] | None = None,
    count_to_draw: Callable[[], int] | None = None,
) -> Generator[Any, None, None]:
    """Draw batches, and start to move each one ``depth`` batches before it is asked for.

    Args:
        framework: whose tensors the batches become.
        data: the batches. A generator is closed with this one.
        device: where they go; None leaves them where they are, and needs a depth of 0.
        depth: how many batches are ahead of the one in use.
        prepare: what happens to a batch on the host before it moves; None changes nothing. It may
            return a ``Flattened``, whose tensors are all of the batch's, if ``device`` is given.
        count_to_draw: returns how many batches may be drawn from now on, at least 1; None is any
            number.

    Yields:
        The batches. If the data, ``prepare`` or a copy raises an exception, it is raised in the
        place of its batch.
    """
    start = _choose_move(framework, device, depth)
    source = _call_outside(framework, iter, data)
    ahead: deque[Any] = deque()
    failure: Exception | None = None
    is_over = False
    try:
        while True:
            most = depth if count_to_draw is None else min(depth, count_to_draw() - 1)
            while len(ahead) <= most and not is_over:
                try:
                    batch = _call_outside(framework, next, source, _END)
                    is_over = batch is _END
                    if not is_over:
                        ahead.append(start(batch if prepare is None else prepare(batch)))
                except Exception as error:
                    failure, is_over = error, True
                # A batch in use is kept nowhere: neither the host's copy nor the moved one.
                batch = None
            if not ahead:
                break
            yield ahead.popleft()()
        if failure is not None:
            raise failure
    finally:
        # The traceback of an error has this frame, which would keep batches.
        ahead.clear()
        failure = None
        if isinstance(source, Generator):
            source.close()


def _choose_move(
    framework: Framework, device: Device | None, depth: int
) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that begins to move a batch, and returns the function that ends it.

    That one returns the batch.
    """
    if device is None:
        return _keep
    # The CPU and virtual GPUs copy nothing beside the computation.
    is_hardware = framework.devices.platform(device) not in ("cpu", "virtual")
    return partial(_begin_move if depth and is_hardware else _move, framework, device)


def _keep(batch: Any) -> Callable[[], Any]:
    return lambda: batch


def _find_elsewhere(framework: Framework, device: Device, batch: Any) -> Flattened | None:
    """Return the leaves of a batch that are not on a device; None if all are there."""
    if type(batch) is not Flattened:
        return moving.find_elsewhere(framework, batch, device)
    is_on = framework.tensors.is_on
    batch.tensors = {key: x for key, x in batch.tensors.items() if not is_on(x, device)}
    return batch


def _move(framework: Framework, device: Device, batch: Any) -> Callable[[], Any]:
    flat = _find_elsewhere(framework, device, batch)
    return _keep(batch if flat is None else moving.move(framework, flat, device))


def _begin_move(framework: Framework, device: Device, batch: Any) -> Callable[[], Any]:
    flat = _find_elsewhere(framework, device, batch)
    return _keep(batch) if flat is None else moving.begin_move(framework, flat, device)


def draw_outside(framework: Framework, batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Draw batches outside of a block ``backend.on(gpu)``, because loaders work on the host.

    In the block PyTorch would draw the order of a loader on the GPU. Its sampler has a generator of
    the CPU, and fails: https://github.com/pytorch/pytorch/blob/main/torch/utils/data/sampler.py

    Args:
        framework: whose block it is.
        batches: in their order. If they are a generator, it is closed with this one.
    """
    return device_batches(framework, batches, None, 0)


def _call_outside(framework: Framework, call: Callable[..., Any], *arguments: Any) -> Any:
    if framework.state.scope.value.get() in (None, CPU):
        return call(*arguments)
    with devices.on(framework, CPU):
        return call(*arguments)
