"""Copies to a GPU ahead of their use: a large batch in a stream of its own.

A copy waits for all earlier operations in its stream. From memory that is not pinned, torch copies
at a sixth of the speed. Python then waits until the bytes are on their way. To copy beside the
computation costs calls for streams and events. A small batch cannot win them back: it is copied in
its turn, as a loop by hand does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from d2ldev.framework import Tensors

# The number of bytes from which on a batch is copied in its own stream. At 50 GB/s the copy takes
# 0.35 ms, as long as a step's calls for a second stream.
LARGE = 2**24
# The number of bytes from which on a tensor is pinned for its copy. A smaller one gains nothing
# measurable, and torch asks the driver whether it is pinned already.
PINNED = 2**20


class SideStream:
    """The stream of large batches to a GPU.

    Args:
        tensors: makes the other copies.
        module: ``torch.cuda`` or ``torch.xpu``.
        native: the GPU.
    """

    def __init__(self, tensors: Tensors, module: ModuleType, native: torch.device) -> None:
        self._tensors, self._module, self._native = tensors, module, native
        self._stream = module.Stream(device=native)

    def begin(self, xs: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin to copy tensors; return a function that returns the copies when they are due."""
        with self._module.stream(self._stream):
            beside = [
                x.pin_memory().to(self._native, non_blocking=True) if _is_dense(x) else None
                for x in xs
            ]
        event = self._stream.record_event()
        # Others keep their place in the queue.
        copies = [
            self._tensors.transfer([x], self._native, copy=False)[0] if new is None else new
            for x, new in zip(xs, beside, strict=True)
        ]

        def finish() -> list[torch.Tensor]:
            current = self._module.current_stream(self._native)
            current.wait_event(event)
            for new in beside:
                # Without this call the allocator knows only the side stream. It would give the
                # memory to the next batch during the computation with this one.
                if new is not None:
                    new.record_stream(current)
            return copies

        return finish


def is_large(xs: list[torch.Tensor]) -> bool:
    """Return whether a batch is worth a stream of its own. It asks no driver."""
    return sum(x.nbytes for x in xs if x.is_cpu and x.layout is torch.strided) >= LARGE


def copy_in_turn(xs: list[torch.Tensor], native: torch.device) -> list[torch.Tensor]:
    """Copy tensors to a GPU after the work in its queue, if possible without waiting."""
    return [
        x.pin_memory().to(native, non_blocking=True)
        if x.layout is torch.strided and x.nbytes >= PINNED and _is_dense(x)
        else x.to(native, non_blocking=True)
        for x in xs
    ]


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory of the host, without gradients."""
    return bool(x.is_cpu and x.layout is torch.strided and not x.requires_grad)
