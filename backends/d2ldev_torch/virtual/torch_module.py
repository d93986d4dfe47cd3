"""``torch.vgpu``: what torch asks the module of a device, as it asks ``torch.cuda``."""

from __future__ import annotations

import sys
from typing import Any

import torch

from d2ldev_torch.virtual import devices, memory
from d2ldev_torch.virtual.devices import NAME, require_first


def is_available() -> bool:
    """Return whether there are virtual GPUs."""
    return devices.count() > 0


def is_initialized() -> bool:
    """Return True: there is nothing to initialise."""
    return True


def device_count() -> int:
    """Return the number of virtual GPUs."""
    return devices.count()


def current_device() -> int:
    """Return the index of ``torch.device('vgpu')``: always 0."""
    return 0


def set_device(device: Any) -> None:
    """Accept the first virtual GPU as the current device.

    Raises:
        DeviceUnavailableError: for another one.
    """
    require_first(_index(device))


class device:  # noqa: N801 - torch's name for it
    """A context that torch's own code enters around code that names its devices.

    A checkpoint enters it to keep the random state, and a storage that is moved around its copy.
    https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py
    https://github.com/pytorch/pytorch/blob/main/torch/_utils.py

    Args:
        device: that is to be the current one.

    Raises:
        DeviceUnavailableError: when other code enters it, and it is not the first one.
    """

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if caller.partition(".")[0] != "torch":
            require_first(self._index)

    def __exit__(self, *_error: Any) -> None:
        """Nothing was changed."""


def synchronize(device: Any = None) -> None:
    """Return at once: everything was computed when its call returned."""
    _index(device)


def empty_cache() -> None:
    """Do nothing: there is no cache."""


def memory_allocated(device: Any = None) -> int:
    """Return the bytes that tensors hold on a virtual GPU."""
    return memory.used_and_peak(_index(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes that tensors held on a virtual GPU."""
    return memory.used_and_peak(_index(device))[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin the count of the most bytes again."""
    memory.reset_peak(_index(device))


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
    return devices.index_of(
        torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    )
