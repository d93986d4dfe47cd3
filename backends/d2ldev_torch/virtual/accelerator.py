"""Virtual GPUs as one more accelerator, for ``TorchBackend``."""

from __future__ import annotations

import torch

from d2ldev.interface import Memory
from d2ldev_torch.accelerator import Accelerator
from d2ldev_torch.virtual import devices, ledger
from d2ldev_torch.virtual.copies import copies
from d2ldev_torch.virtual.labels import NAME
from d2ldev_torch.virtual.setup import set_up


class VirtualAccelerator(Accelerator):
    """Virtual GPUs, which stand in the hardware's stead.

    Args:
        number: how many.

    Raises:
        DeviceUnavailableError: if torch cannot have that many here.
    """

    def __init__(self, number: int) -> None:
        set_up(number)
        super().__init__(NAME, "virtual", torch.get_device_module(NAME))

    def count(self) -> int:
        return devices.count()

    def copies(self, xs: list[torch.Tensor], native: torch.device) -> list[torch.Tensor]:
        return copies(xs, native)

    def synchronize(self, index: int) -> None:
        """Everything was computed when the call returned."""

    def is_idle(self, index: int) -> bool:
        return True

    def streams(self) -> None:
        """Nothing is queued."""

    def memory(self, index: int) -> Memory:
        """What tensors hold, counted storage by storage; of the host's memory there is no share."""
        return Memory(*ledger.used_and_peak(index), None)
