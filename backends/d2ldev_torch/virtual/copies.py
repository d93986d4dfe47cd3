"""Kernels that copy between devices, or change a tensor's memory: the fallback refuses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from d2ldev_torch.devices import NATIVE_CPU
from d2ldev_torch.virtual.devices import NAME, index_of
from d2ldev_torch.virtual.kernels import run_on_cpu, schema_of
from d2ldev_torch.virtual.memory import (
    CPU_KEYS,
    SPARSE_KEYS,
    as_cpu,
    as_virtual,
    replace_parts,
    resize,
    set_memory,
)

_aten = torch.ops.aten
_COPY = schema_of(_aten.copy_.default)


def _on_cpu(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the CPU, without a copy from a virtual GPU."""
    if x.device.type == NAME:
        return as_cpu(x)
    return x if x.is_cpu else x.to(NATIVE_CPU)


def _copy_(
    destination: torch.Tensor, source: torch.Tensor, _non_blocking: bool = False
) -> torch.Tensor:
    if destination.device == source.device:
        return run_on_cpu(_COPY, destination, source)  # type: ignore[no-any-return]
    values = _on_cpu(source)
    if destination.layout in SPARSE_KEYS or source.layout in SPARSE_KEYS:
        return _copy_sparse_(destination, values)
    if destination.device.type == NAME:
        _aten.copy_.default.redispatch(CPU_KEYS, as_cpu(destination), values)
    else:
        destination.copy_(values)
    return destination


def _copy_sparse_(destination: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    alias = _on_cpu(destination)
    alias.copy_(values)
    if destination.device.type == NAME and destination.layout in SPARSE_KEYS:
        replace_parts(destination, alias)
    return destination


def _foreach_copy_(
    destinations: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False
) -> None:
    """Copy each tensor of a list into one of another list, across devices as ``copy_``."""
    xs, ys = (
        [as_cpu(x) if x.device.type == NAME else x for x in each]
        for each in (destinations, sources)
    )
    _aten._foreach_copy_.default.redispatch(CPU_KEYS, xs, ys, non_blocking)


def _to_copy(
    x: torch.Tensor, *, device: torch.device | None = None, **options: Any
) -> torch.Tensor:
    """Copy for ``to`` and the functions that use it."""
    target = x.device if device is None else device
    if target.type not in (NAME, "cpu"):
        elsewhere: torch.Tensor = _aten._to_copy.default(_on_cpu(x), device=target, **options)
        return elsewhere
    index = index_of(target) if target.type == NAME else -1
    keys = SPARSE_KEYS.get(x.layout, CPU_KEYS)
    new: torch.Tensor = _aten._to_copy.default.redispatch(
        keys, _on_cpu(x), device=NATIVE_CPU, **options
    )
    return new if index < 0 else as_virtual(new, index)


def _resize_(
    x: torch.Tensor, size: list[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if list(x.shape) != list(size):
        resize(x, torch.empty(0, dtype=x.dtype).resize_(size))
    if memory_format is not None:
        resize(x, torch.empty(size, dtype=x.dtype, memory_format=memory_format))
    return x


def _set_(x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    """Give a tensor the memory of another one on its device, or no memory."""
    source = torch.empty(0, dtype=x.dtype, device=x.device) if source is None else source
    if x.device != source.device:
        raise schema_of(_aten.set_.source_Tensor).mismatch((x, source), {})
    set_memory(x, source.untyped_storage(), int(source.storage_offset()), source)
    return x


def _has_compatible_shallow_copy_type(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether ``x.data = other`` works, as between the CPU and CUDA. Parameters move so.

    torch answers for the devices that it knows, and ``PrivateUse1`` is not one.
    """
    if torch.sparse_coo in (x.layout, other.layout):  # whose types of devices torch compares
        return x.layout == other.layout and x.device.type == other.device.type
    return all(
        one.layout is torch.strided and one.device.type in (NAME, "cpu") and not one.is_nested
        for one in (x, other)
    )


COPY_KERNELS: Mapping[str, Callable[..., Any]] = {
    "copy_": _copy_,
    "_foreach_copy_": _foreach_copy_,
    "_to_copy": _to_copy,
    "resize_": _resize_,
    "set_": _set_,
    "set_.source_Tensor": _set_,
    "_has_compatible_shallow_copy_type": _has_compatible_shallow_copy_type,
}
