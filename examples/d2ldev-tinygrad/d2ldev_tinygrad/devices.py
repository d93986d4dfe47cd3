"""Devices: tinygrad's ``CPU``, and its ``CPU:1``, ``CPU:2`` and so on as virtual GPUs."""

from __future__ import annotations

from typing import Any

import tinygrad
from d2ldev import Device, gpu
from d2ldev.framework import CPU, Devices
from tinygrad.tensor import all_tensors

MAX_VIRTUAL_GPUS = 8
NATIVES = {CPU: "CPU", **{gpu(i): f"CPU:{i + 1}" for i in range(MAX_VIRTUAL_GPUS)}}
DEVICES = {native: device for device, native in NATIVES.items()}


class TinygradDevices(Devices):
    """The devices of tinygrad."""

    def __init__(self, virtual_gpus: int | None) -> None:
        self._count = virtual_gpus or 0

    def count(self) -> int:
        return self._count

    def native(self, device: Device) -> str:
        return NATIVES[device]

    def native_of_missing(self, device: Device) -> str | None:
        return NATIVES.get(device)

    def from_native(self, native: Any) -> Device | None:
        return DEVICES.get(native) if isinstance(native, str) else None

    def platform(self, device: Device) -> str:
        return "cpu" if device is CPU else "virtual"

    def default(self) -> str:
        return tinygrad.Device.DEFAULT

    def synchronize(self, device: Device) -> None:
        if queued := self._find_queued(device):
            queued[0].realize(*queued[1:])
        tinygrad.Device[NATIVES[device]].synchronize()

    def is_idle(self, device: Device) -> bool:
        return not self._find_queued(device)

    def empty_cache(self, device: Device) -> None:
        tinygrad.Device[NATIVES[device]].allocator.free_cache()

    def _find_queued(self, device: Device) -> list[Any]:
        """Return the live tensors of a device that tinygrad has not begun to compute."""
        native, found = NATIVES[device], (reference() for reference in list(all_tensors))
        return [x for x in found if x is not None and x.device == native and not is_computed(x)]


def is_computed(x: Any) -> bool:
    """Return whether a tensor has memory of its own, or is a part of one that has."""
    return x.uop.is_virtual or x.uop.has_buffer_identity()
