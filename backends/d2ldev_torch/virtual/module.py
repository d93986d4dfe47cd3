"""``torch.vgpu``: what torch asks the module of a device, as it asks ``torch.cuda``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from d2ldev_torch.virtual import devices, ledger
from d2ldev_torch.virtual.current import enter, make_current
from d2ldev_torch.virtual.labels import NAME


def is_available() -> bool:
    """Whether there are virtual GPUs."""
    return devices.count() > 0


def is_initialized() -> bool:
    """There is nothing to initialise."""
    return True


def device_count() -> int:
    """How many virtual GPUs there are."""
    return devices.count()


def current_device() -> int:
    """The index of ``torch.device('vgpu')``: always 0."""
    return 0


def set_device(device: Any) -> None:
    """Only the first one can be the current device.

    Raises:
        DeviceUnavailableError: for another one.
    """
    make_current(_index(device))


class device:  # noqa: N801 - torch's name for it
    """A context that torch's own code enters; in it, too, every device is named.

    Args:
        device: that is to be the current one.

    Raises:
        DeviceUnavailableError: when other code enters it, and it is not the first one.
    """

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        enter(self._index, sys._getframe(1))

    def __exit__(self, *_error: Any) -> None:
        """Nothing was changed."""


def synchronize(device: Any = None) -> None:
    """Everything was computed when the call returned."""
    _index(device)


def memory_allocated(device: Any = None) -> int:
    """The bytes held by tensors on a virtual GPU."""
    return ledger.used_and_peak(_index(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were held by tensors on a virtual GPU."""
    return ledger.used_and_peak(_index(device))[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin to look for the most bytes again."""
    ledger.reset_peak(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast('vgpu')`` takes: what the CPU's does."""
    return [torch.bfloat16, torch.float16]


def empty_cache() -> None:
    """There is no cache."""


def manual_seed(seed: int) -> None:
    """Random numbers are drawn from the CPU's generator, which ``torch.manual_seed`` seeds."""


def manual_seed_all(seed: int) -> None:
    """Random numbers are drawn from the CPU's generator, which ``torch.manual_seed`` seeds."""


def get_rng_state(_device: Any = None) -> torch.Tensor:
    """The state of the CPU's generator, which all draw from."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, _device: Any = None) -> None:
    """Set the state of the CPU's generator, which all draw from."""
    torch.set_rng_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of the generator, once for each virtual GPU."""
    return [get_rng_state() for _ in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Set what ``get_rng_state_all`` returned."""
    for state in states:
        set_rng_state(state)


def _is_in_bad_fork() -> bool:
    """A forked process can use them, as it can use the CPU."""
    return False


def _index(device: Any) -> int:
    if device is None:
        return 0
    return devices.index_of(
        torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    )


def make_module() -> ModuleType:
    """A module of the public functions above."""
    module = ModuleType(f"torch.{NAME}", __doc__)
    for name, value in globals().items():
        if callable(value) and getattr(value, "__module__", None) == __name__:
            setattr(module, name, value)
    return module
