"""Copies to a GPU beside what it computes."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch

from d2ldev.framework import Copier, Tensor, Tensors


class Arrived(NamedTuple):
    """A mark of copies that were begun.

    Args:
        event: after these copies, and before those of the next batch.
        copies: the tensors that are copied in the side stream.
    """

    event: Any
    copies: list[torch.Tensor]


class SideStream(Copier):
    """Copies to a GPU beside what it computes: from pinned memory, in a stream of their own.

    Out of memory that the system may move, torch copies while Python waits; in the stream that
    computes a copy waits for all that was queued before it.

    Args:
        tensors: the room of tensors, which makes the other copies.
        module: ``torch.cuda`` or ``torch.xpu``.
        native: where to.
    """

    def __init__(self, tensors: Tensors, module: ModuleType, native: torch.device) -> None:
        self._tensors = tensors
        self._module = module
        self._native = native
        self._stream: Any = None
        self._copies: list[torch.Tensor] = []

    def copy_all(self, xs: list[Tensor]) -> list[Tensor]:
        return [self._copied(x) for x in xs]

    def _copied(self, x: Tensor) -> Tensor:
        if not (x.is_cpu and x.layout is torch.strided and not x.requires_grad):
            # What a GPU computes, or what gradients flow through, keeps its place in the queue.
            return self._tensors.copy(x, self._native)
        with self._module.stream(self._side()):
            new = pinned(x).to(self._native, non_blocking=True)
        self._copies.append(new)
        return new

    def started(self) -> Arrived:
        copies, self._copies = self._copies, []
        return Arrived(self._side().record_event(), copies)

    def finish(self, mark: Arrived) -> None:
        current = self._module.current_stream(self._native)
        current.wait_event(mark.event)
        for x in mark.copies:
            # Else the allocator, which knows only the side stream, would give the memory to the
            # next batch while this one is still computed with.
            x.record_stream(current)

    def _side(self) -> Any:
        if self._stream is None:
            self._stream = self._module.Stream(device=self._native)
        return self._stream


def pinned(x: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor in memory that stays where it is, which a GPU can fetch by itself."""
    return x if x.is_pinned() else x.pin_memory()
