"""Copies to a GPU beside what it computes: from pinned memory, in a stream of their own.

Out of memory that the system may move, torch copies while Python waits; in the stream that computes
a copy waits for all that was queued before it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from d2ldev.device import Device
from d2ldev.operations.batches import bring
from d2ldev.operations.moving import moved

if TYPE_CHECKING:
    from d2ldev_torch.backend import TorchBackend


class Started(NamedTuple):
    """A batch on its way.

    Args:
        batch: what it will be, to be used after ``arrived``.
        copies: its tensors that are copied in the side stream.
        arrived: the event after these copies, and before those of the next batch.
    """

    batch: Any
    copies: list[torch.Tensor]
    arrived: Any


class SideStream:
    """Batches that are copied to a GPU while it computes.

    Args:
        backend: whose tensors they are.
        module: ``torch.cuda`` or ``torch.xpu``.
        device: where to.
    """

    def __init__(self, backend: TorchBackend, module: ModuleType, device: Device) -> None:
        self._backend = backend
        self._module = module
        self._device = device
        self._native = backend.native(device)
        self._stream: Any = None

    def start(self, batch: Any) -> Started:
        """Begin to copy a batch; on the host nobody waits for it."""
        if self._stream is None:
            self._stream = self._module.Stream(device=self._native)
        aside: list[torch.Tensor] = []

        def copies(xs: list[torch.Tensor], _device: Device, attempted: str) -> list[torch.Tensor]:
            try:
                return [self._copied(x, aside) for x in xs]
            except Exception as error:
                backend._raise_translated(error, attempted, self._native)

        backend = self._backend
        attempted = f"move a batch to {self._device}"
        batch = moved(backend, bring(backend, batch, None), self._device, attempted, copies)
        return Started(batch, aside, self._stream.record_event())

    def finish(self, started: Started) -> Any:
        """The batch, for what is queued from now on in the caller's stream."""
        current = self._module.current_stream(self._native)
        current.wait_event(started.arrived)
        for x in started.copies:
            # Else the allocator, which knows only the side stream, would give the memory to the
            # next batch while this one is still computed with.
            x.record_stream(current)
        return started.batch

    def _copied(self, x: torch.Tensor, aside: list[torch.Tensor]) -> torch.Tensor:
        if not _is_copied_aside(x):
            copy: torch.Tensor = self._backend._copy(x, self._native)
            return copy
        host = pinned(x)
        with self._module.stream(self._stream):
            new = host.to(self._native, non_blocking=True)
        aside.append(new)
        return new


def _is_copied_aside(x: torch.Tensor) -> bool:
    # What a GPU computes, or what gradients flow through, keeps its place in the queue.
    return x.is_cpu and x.layout is torch.strided and not x.requires_grad


def pinned(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor in memory that stays where it is, so that a GPU can fetch it by itself."""
    return x if x.is_pinned() else x.pin_memory()
