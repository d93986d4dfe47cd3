"""What torch would do on the current device, which for virtual GPUs is always the first one.

``x.new_tensor`` and ``x.new`` make a tensor on the current device of ``x``'s kind, after they
made ``x``'s device the current one: which the hooks for backends in Python cannot do. Nor can
they pin memory of the host. So these do what they are documented to do.
"""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual.labels import NAME


def install(aten: Any) -> None:
    """Replace the methods of ``torch.Tensor`` and ``torch.UntypedStorage``."""
    _name_device_in("new_tensor")
    _name_device_in("new")
    _refuse_sharing()
    # Virtual GPUs read the host's memory as it is, whether or not it can be paged.
    aten.impl("_pin_memory", lambda x, *_: x.clone(), "CPU")


def _name_device_in(name: str) -> None:
    make = getattr(torch.Tensor, name)

    def make_on_own_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type == NAME and kwargs.get("device") is None:
            kwargs["device"] = self.device
        made: torch.Tensor = make(self, *args, **kwargs)
        return made

    make_on_own_device.__doc__ = make.__doc__
    make_on_own_device.__name__ = name
    setattr(torch.Tensor, name, make_on_own_device)


def _refuse_sharing() -> None:
    storage: Any = torch.UntypedStorage
    share, is_shared, new_shared = storage.share_memory_, storage.is_shared, storage._new_shared

    def share_memory(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == NAME:
            raise _unshareable(self.device)
        return share(self, *args, **kwargs)

    def make_shared(cls: Any, /, *args: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        # A worker of a DataLoader puts its batches there, and would be waited for in vain.
        if torch.device(device).type == NAME:
            raise _unshareable(device)
        return new_shared.__func__(cls, *args, device=device, **kwargs)

    def is_memory_shared(self: torch.UntypedStorage) -> Any:
        return self.device.type != NAME and is_shared(self)

    storage._new_shared = classmethod(make_shared)
    storage.share_memory_ = share_memory
    storage.is_shared = is_memory_shared


def _unshareable(device: Any) -> UnsupportedValueError:
    return UnsupportedValueError(
        "share memory with other processes",
        f"the memory of {device} belongs to this process",
        "leave data on the CPU until it has arrived: x = backend.to(x, device) in this process",
        [device],
    )
