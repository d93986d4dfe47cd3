"""``torch.vgpu``: the functions that torch expects in a device's module, as in ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.cpu import Event, stream

from d2ldev import DeviceUnavailableError
from d2ldev_torch.virtual.devices import NAME, index_of
from d2ldev_torch.virtual.devices import count as device_count

# A call returns only after its computation, as on the CPU. So the CPU's no-op events are enough.
__all__ = ["Event", "stream"]

_current: ContextVar[int] = ContextVar("d2ldev_current_vgpu", default=0)


class Stream(torch.cpu.Stream):
    """A stream that does nothing; ``torch.distributed.checkpoint`` calls ``synchronize``."""

    def synchronize(self) -> None:
        """Return at once: every call returns after its computation."""


_stream = Stream()


def current_stream(_device: Any = None) -> Stream:
    """Return the only stream."""
    return _stream


def is_available() -> bool:
    """Return whether there are virtual GPUs."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return True: virtual GPUs need no initialization."""
    return True


def current_device() -> int:
    """Return the index of ``torch.device('vgpu')``: 0, or the innermost ``device``'s."""
    return _current.get()


def set_device(device: Any) -> None:
    """Accept the first virtual GPU as the current device.

    Raises:
        DeviceUnavailableError: for any other one.
    """
    index = _index(device)
    if index > 0:
        raise DeviceUnavailableError(
            f"make {NAME}:{index} torch's current device",
            "torch's current virtual GPU is always the first one",
            f"name the device: device='{NAME}:{index}', or with torch.device('{NAME}:{index}'):",
            [f"{NAME}:{index}"],
        )


def make_current(index: int) -> None:
    """Set the result of ``current_device``, which a CUDA device without an index stands for."""
    _current.set(index)


@contextmanager
def device(device: Any) -> Iterator[None]:
    """Change the result of ``current_device``. A device without an index stays the first one.

    torch's own code enters it around code that names its devices. A checkpoint does so to keep the
    random state, and a storage does so for a copy. FSDP does so to name its device.
    https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py
    https://github.com/pytorch/pytorch/blob/main/torch/_utils.py
    """
    token = _current.set(_index(device))
    try:
        yield
    finally:
        _current.reset(token)


def synchronize(device: Any = None) -> None:
    """Return at once: every call returns after its computation."""
    _index(device)


def empty_cache() -> None:
    """Do nothing: there is no cache."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of ``torch.autocast('vgpu')``, which are the CPU's."""
    return [torch.bfloat16, torch.float16]


def manual_seed_all(seed: int) -> None:
    """Do nothing: the default generator is the CPU's, which ``torch.manual_seed`` seeds."""


def get_rng_state(_device: Any = None) -> torch.Tensor:
    """Return the state of the CPU's default generator, which draws for virtual GPUs, too."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, _device: Any = None) -> None:
    """Set the state of the CPU's default generator, which draws for virtual GPUs, too."""
    torch.set_rng_state(state)


def _is_in_bad_fork() -> bool:
    """Return False: a forked process can use virtual GPUs, as it can use the CPU."""
    return False


def _index(device: Any) -> int:
    if device is None:
        return 0
    return index_of(torch.device(NAME, device) if isinstance(device, int) else torch.device(device))
