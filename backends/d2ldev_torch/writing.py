"""Write new values into the memory of tensors, as ``load_state_dict`` of a module does.

Memory is written if PyTorch has allocated it, shares it with other processes, or has it on a GPU.
Other memory may belong to ``bytes``, to a file or to an array of JAX. Nobody can ask whether it may
be written. So a tensor over it gets new memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from d2ldev.framework import Tensor

Value = tuple[Tensor, Tensor, bool]


def plan_writes(values: Sequence[Value]) -> list[Callable[[], object] | None]:
    """Return a function for each value that writes it; see ``Models.plan_writes``.

    Tensors of one memory are written together or not at all. So a buffer with all weights still has
    them afterwards.
    """
    plans: list[Callable[[], object] | None] = [None] * len(values)
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, (x, _, _) in enumerate(values):
        if _is_writable(x):
            groups[x.device, x.untyped_storage().data_ptr()].append(index)
    for group in groups.values():
        chosen = [values[index] for index in group]
        if any(is_kept for _, _, is_kept in chosen) and (len(chosen) == 1 or _agree(chosen)):
            for index, (x, new, _) in zip(group, chosen, strict=True):
                plans[index] = partial(_write, x, new)
    return plans


def _write(x: torch.Tensor, new: torch.Tensor) -> None:
    x.detach().copy_(new)


def _is_writable(x: torch.Tensor) -> bool:
    # A subclass with an own dispatch has its memory in the tensors that it wraps.
    is_plain = type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_plain or x.layout is not torch.strided or x.is_inference():
        return False
    storage = x.untyped_storage()
    # torch 2.13 calls the memory of every GPU shared, and torch 2.11 only that of CUDA.
    is_own = not x.is_cpu or storage.resizable() or storage.is_shared()
    return is_own and not _repeats(x)


def _repeats(x: torch.Tensor) -> bool:
    """Return whether two elements may be in one place, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _agree(values: Sequence[Value]) -> bool:
    """Return whether tensors of one memory can have their new values all at once."""
    spans = sorted((x.data_ptr(), extent(x)) for x, _, _ in values if x.numel())
    if all(begin + size <= after for (begin, size), (after, _) in pairwise(spans)):
        return True
    # Their elements may still be apart. So the values are written into a copy, and read from it.
    memory = values[0][0].untyped_storage().clone()
    pairs = []
    for x, new, _ in values:
        copy = torch.empty(0, dtype=x.dtype, device=x.device)
        copy.set_(memory, x.storage_offset(), x.shape, x.stride())
        _write(copy, new)
        pairs.append((copy, new))
    return all(torch.equal(_bytes(copy), _bytes(new)) for copy, new in pairs)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def extent(x: torch.Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of its last one."""
    if not x.numel():
        return 0
    steps = zip(x.shape, x.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * x.element_size()
