"""Devices: tinygrad's ``CPU``, and its ``CPU:1``, ``CPU:2`` and so on as virtual GPUs."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

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
        # By their ids, because a comparison of tensors is a tensor.
        self._failed: WeakValueDictionary[int, Any] = WeakValueDictionary()

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
        recorded = self._find_recorded(device)
        try:
            compute(*recorded)
        except Exception as error:
            self._compute_each(recorded, error)
        finally:
            tinygrad.Device[NATIVES[device]].synchronize()

    def _compute_each(self, recorded: list[Any], error: Exception) -> None:
        """Compute tensors that fail together, and raise the error; it is raised only once."""
        for x in recorded:
            try:
                compute(x)
            except Exception:
                self._failed[id(x)] = x
        raise error

    def is_idle(self, device: Device) -> bool:
        return not self._find_recorded(device)

    def empty_cache(self, device: Device) -> None:
        tinygrad.Device[NATIVES[device]].allocator.free_cache()

    def _find_recorded(self, device: Device) -> list[Any]:
        """Return the live tensors of a device that tinygrad has still to compute."""
        native = NATIVES[device]
        return [
            x
            for x in list_live()
            if x.device == native and not is_computed(x) and id(x) not in self._failed
        ]


def list_live() -> list[Any]:
    """Return the tensors that exist in this process."""
    found = (reference() for reference in list(all_tensors))
    return [x for x in found if x is not None]


def is_computed(x: Any) -> bool:
    """Return whether a tensor has memory of its own, or is a view of memory."""
    return bool(x.uop.is_virtual or x.uop.is_realized)


def compute(*xs: Any) -> None:
    """Compute tensors, or leave them recorded: after an error tinygrad has given them memory."""
    recorded = [x for x in xs if not is_computed(x)]
    if not recorded:
        return
    before = [(x, x.uop) for x in list_live()]
    try:
        recorded[0].realize(*recorded[1:])
    except Exception:
        for x, uop in before:
            x.uop = uop
        raise
