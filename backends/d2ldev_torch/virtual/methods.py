"""What torch would do on the current device, which for virtual GPUs is always the first one.

``x.new_tensor`` and ``x.new`` make a tensor on the current device of ``x``'s kind, after they
made ``x``'s device the current one: which the hooks for backends in Python cannot do. Nor can
they pin memory of the host. So these do what they are documented to do. What would send memory
to another process is refused by name.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/utils/tensor_new.cpp
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual.labels import NAME


def install(aten: Any) -> None:
    """Replace the methods of ``torch.Tensor`` and ``torch.UntypedStorage``."""
    _install_new()
    _refuse_sharing()
    # Virtual GPUs read the host's memory as it is, whether or not it can be paged.
    aten.impl("_pin_memory", lambda x, *_: x.clone(), "CPU")


def _install_new() -> None:
    tensor: Any = torch.Tensor
    make_new, make_new_tensor = tensor.new, tensor.new_tensor

    @wraps(make_new)
    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = make_new(self, *args, **kwargs)
        return made if self.device.type != NAME or "device" in kwargs else made.to(self.device)

    @wraps(make_new_tensor)
    def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == NAME and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return make_new_tensor(self, *args, **kwargs)

    tensor.new, tensor.new_tensor = new, new_tensor


def _refuse_sharing() -> None:
    storage: Any = torch.UntypedStorage
    share, is_shared, make_shared = storage.share_memory_, storage.is_shared, storage._new_shared

    def share_memory_(self: torch.UntypedStorage) -> Any:
        _require_host(self.device)
        return share(self)

    def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        # A worker of a DataLoader puts its batches there, and would be waited for in vain.
        _require_host(torch.device(device))
        return make_shared.__func__(cls, size, device=device)

    storage.share_memory_ = share_memory_
    storage._new_shared = classmethod(new_shared)
    storage.is_shared = lambda self: self.device.type != NAME and is_shared(self)


def _require_host(device: torch.device) -> None:
    if device.type == NAME:
        raise UnsupportedValueError(
            "share memory with other processes",
            f"the memory of {device} belongs to this process",
            "leave data on the CPU until it has arrived: x = backend.to(x, device) in this process",
            [device],
        )
