"""Devices: array-api-strict's three devices; the second and the third are virtual GPUs."""

from __future__ import annotations

from typing import Any

import array_api_strict as xp

from d2ldev import Device, gpu
from d2ldev.framework import CPU, Devices

NATIVE = {CPU: xp.Device("CPU_DEVICE"), gpu(0): xp.Device("device1"), gpu(1): xp.Device("device2")}
DEVICES = {native: device for device, native in NATIVE.items()}


class ReferenceDevices(Devices):
    """The CPU and two virtual GPUs.

    Args:
        virtual_gpus: the number of virtual GPUs; None is 2.
    """

    def __init__(self, virtual_gpus: int | None) -> None:
        self._count = 2 if virtual_gpus is None else virtual_gpus

    def count(self) -> int:
        return self._count

    def native(self, device: Device) -> Any:
        return NATIVE[device]

    def from_native(self, native: Any) -> Device | None:
        if isinstance(native, str):
            return next((each for it, each in DEVICES.items() if str(it) == native), None)
        return DEVICES.get(native) if isinstance(native, type(NATIVE[CPU])) else None

    def platform(self, device: Device) -> str:
        return "cpu" if device is CPU else "virtual"

    def default(self) -> Any:
        return xp.zeros(0).device
