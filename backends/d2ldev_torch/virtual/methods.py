"""What torch would do on the current device, which for virtual GPUs is always the first one.

``x.new_tensor`` and ``x.new`` make a tensor on the current device of ``x``'s kind, after they
made ``x``'s device the current one: which the hooks for backends in Python cannot do. Nor can
they pin memory of the host. So these do what they are documented to do. What would send memory
to another process is refused by name.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/utils/tensor_new.cpp
"""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual.labels import NAME


def install(aten: Any) -> None:
    """Replace the methods of ``torch.Tensor`` and ``torch.UntypedStorage``."""
    _name_device("new_tensor", torch.Tensor.new_tensor)
    _name_device("new", _new)
    _refuse_sharing()
    # Virtual GPUs read the host's memory as it is, whether or not it can be paged.
    aten.impl("_pin_memory", lambda x, *_: x.clone(), "CPU")


_make_new: Any = torch.Tensor.new


def _new(self: torch.Tensor, *args: Any, device: torch.device, **kwargs: Any) -> torch.Tensor:
    """``x.new(...)``, which takes no device beside a tensor, and forgets it beside nothing.

    https://github.com/pytorch/pytorch/pull/58108
    """
    if not args and not kwargs:
        args = (0,)
    elif isinstance(args[0] if args else kwargs.get("other"), torch.Tensor):
        return _make_new(self, *args, **kwargs)  # type: ignore[no-any-return]
    return _make_new(self, *args, device=device, **kwargs)  # type: ignore[no-any-return]


def _name_device(name: str, make: Any) -> None:
    method: Any = getattr(torch.Tensor, name)

    def make_on_own_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type != NAME or kwargs.get("device") is not None:
            return method(self, *args, **kwargs)  # type: ignore[no-any-return]
        kwargs["device"] = self.device
        return make(self, *args, **kwargs)  # type: ignore[no-any-return]

    make_on_own_device.__doc__ = method.__doc__
    make_on_own_device.__name__ = name
    setattr(torch.Tensor, name, make_on_own_device)


def _refuse_sharing() -> None:
    storage: Any = torch.UntypedStorage
    share, is_shared, new_shared = storage.share_memory_, storage.is_shared, storage._new_shared

    def make_shared(cls: Any, /, *args: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        # A worker of a DataLoader puts its batches there, and would be waited for in vain.
        if torch.device(device).type == NAME:
            raise _unshareable(device)
        return new_shared.__func__(cls, *args, device=device, **kwargs)

    def is_memory_shared(self: torch.UntypedStorage) -> Any:
        return self.device.type != NAME and is_shared(self)

    def refusing(send: Any) -> Any:
        def sent(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == NAME:
                raise _unshareable(self.device)
            return send(self, *args, **kwargs)

        return sent

    # What a queue of torch.multiprocessing calls, one way of sharing or the other.
    storage._share_fd_cpu_ = refusing(storage._share_fd_cpu_)
    storage._share_filename_cpu_ = refusing(storage._share_filename_cpu_)
    storage._new_shared = classmethod(make_shared)
    storage.share_memory_ = refusing(share)
    storage.is_shared = is_memory_shared


def _unshareable(device: Any) -> UnsupportedValueError:
    return UnsupportedValueError(
        "share memory with other processes",
        f"the memory of {device} belongs to this process",
        "leave data on the CPU until it has arrived: x = backend.to(x, device) in this process",
        [device],
    )
