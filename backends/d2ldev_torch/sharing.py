"""Move tensors that share memory so that they share it on the other device, too.

``Module.to`` copies each tensor alone. Two parameters over one piece of memory part, and so do a
buffer and its view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from d2ldev.framework import Tensor, describe, warn
from d2ldev_torch.writing import extent

Transfer = Callable[..., list[Tensor]]
# The memory of a copy begins at a multiple of this, where each dtype can begin.
_ALIGNMENT = 16


def transfer_together(
    transfer: Transfer, xs: Sequence[Tensor], native: torch.device, *, copy: bool
) -> list[Tensor]:
    """Return tensors on a device; memory that several of them share is copied once.

    Args:
        transfer: copies tensors without their common memory, as ``Tensors.transfer``.
        xs, native, copy: see there.
    """
    groups = list(_find_groups(xs))
    if not groups:
        return transfer(xs, native, copy=copy)
    together = {index for group in groups for index in group}
    alone = [x for index, x in enumerate(xs) if index not in together]
    pieces = [_Piece([xs[index] for index in group]) for group in groups]
    moved = transfer([*alone, *(piece.memory for piece in pieces)], native, copy=copy)
    news = dict(zip((i for i in range(len(xs)) if i not in together), moved, strict=False))
    for group, piece, memory in zip(groups, pieces, moved[len(alone) :], strict=True):
        news.update((index, piece.view(memory, xs[index])) for index in group)
    return [news[index] for index in range(len(xs))]


def _find_groups(xs: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors that overlap."""
    storages: dict[tuple[torch.device, int], list[int]] = defaultdict(list)
    for index, x in enumerate(xs):
        with suppress(RuntimeError, ValueError):  # it is sparse, or not initialized
            if address := x.untyped_storage().data_ptr():
                storages[x.device, address].append(index)
    for indices in storages.values():
        if len(indices) == 1:
            continue
        end, group = 0, list[int]()
        for begin, length, index in sorted((*_span(xs[index]), index) for index in indices):
            if begin >= end:
                yield from _choose(xs, group)
                group = []
            group.append(index)
            end = max(end, begin + length)
        yield from _choose(xs, group)


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the number of bytes to its last one."""
    return x.storage_offset() * x.element_size(), extent(x)


def _choose(xs: Sequence[Tensor], group: list[int]) -> Iterator[list[int]]:
    """Yield the tensors of a group that are views of one memory and nothing else."""
    if len(group) < 2:
        return
    computed = [index for index in group if not _is_plain(xs[index])]
    for index in computed:
        warn(
            f"place copies {describe(xs[index])} by itself: it shares memory with another tensor "
            "of the model, and does not from now on\n  fix: make the view in forward()"
        )
    if len(plain := [index for index in group if index not in computed]) > 1:
        yield plain


def _is_plain(x: Tensor) -> bool:
    # A subclass with an own dispatch has its memory in the tensors that it wraps. The memory of a
    # negative view has the other sign.
    is_own = type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_own and x.is_leaf and not x.is_neg()


class _Piece:
    """The memory of tensors that overlap.

    Args:
        xs: the tensors.
    """

    def __init__(self, xs: Sequence[Tensor]) -> None:
        spans = [_span(x) for x in xs]
        self._begin = min(begin for begin, _ in spans) // _ALIGNMENT * _ALIGNMENT
        size = max(begin + length for begin, length in spans) - self._begin
        empty: Any = torch.empty(0, dtype=torch.uint8, device=xs[0].device)
        # Several storages over NumPy's memory may begin at one address.
        storage = max((x.untyped_storage() for x in xs), key=lambda storage: storage.nbytes())
        self.memory = empty.set_(storage, self._begin, (size,), (1,))

    def view(self, memory: Tensor, x: Tensor) -> Tensor:
        """Return a tensor like one of the tensors in a copy of the memory."""
        size = x.element_size()
        first = (x.storage_offset() * size - self._begin) // size
        whole = memory[: len(memory) // size * size].view(x.dtype)
        new = whole.as_strided(x.shape, x.stride(), first)
        new = new.conj() if x.is_conj() else new
        own = type(x.detach())
        return new if own is torch.Tensor else new.as_subclass(own)
