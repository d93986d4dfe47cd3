"""Storages on virtual GPUs, which ``copy.deepcopy``, ``torch.load`` and pickling make.

torch makes a storage with the allocator of its device, and a backend that was set up from Python
has none: the process would end. While there are virtual GPUs, making a storage on one of them
goes by way of a tensor instead; storages on other devices are made as ever.
"""

from __future__ import annotations

from typing import Any

import torch

from d2ldev_torch.virtual.devices import index_of
from d2ldev_torch.virtual.labels import NAME, as_virtual


def install() -> None:
    """Teach ``torch.UntypedStorage`` to make storages on virtual GPUs."""
    make: Any = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        native = torch.get_default_device() if device is None else torch.device(device)
        if native.type != NAME:
            return make(cls, *args, device=device, **kwargs)
        index = index_of(native)
        storage = make(cls, *args, device="cpu", **kwargs)
        return as_virtual(torch.empty(0, dtype=torch.uint8).set_(storage), index).untyped_storage()

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]
