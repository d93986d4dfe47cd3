"""What ``d2ldev doctor`` finds out about a device: by using it, not by asking for it."""

from __future__ import annotations

from dataclasses import dataclass

from d2ldev.backend import Backend
from d2ldev.cli.screen import in_words
from d2ldev.device import Device
from d2ldev.framework import Memory

_SIZE = 64
_UNITS = ("KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class DeviceReport:
    """One device.

    Args:
        device: ``'cpu'``, ``'gpu:0'`` ...
        platform: ``Backend.platform``; None if even that raised.
        memory: ``Backend.memory``, in bytes.
        error: what went wrong on it; None if it works.
    """

    device: str
    platform: str | None
    memory: Memory
    error: str | None

    def as_json(self) -> dict[str, object]:
        """Return the device in the document that ``d2ldev doctor --json`` prints."""
        return {
            "device": self.device,
            "platform": self.platform,
            "memory": self.memory._asdict(),
            "probe": "failed" if self.error else "ok",
            "error": self.error,
        }


def examine(backend: Backend, device: Device) -> DeviceReport:
    """Ask about a device and compute on it; an error is part of the report."""
    platform = None
    memory = Memory(None, None, None)
    error = None
    try:
        platform = backend.platform(device)
        use(backend, device)
        memory = backend.memory(device)
    except Exception as problem:  # whatever a driver or a third party's backend raises
        error = in_words(problem)
    return DeviceReport(str(device), platform, memory, error)


def use(backend: Backend, device: Device) -> None:
    """Allocate on a device, compute there, copy to the CPU and back, and check every value.

    Raises:
        RuntimeError: if a result is somewhere else, or is wrong.
        Exception: whatever the framework raises.
    """
    ones = backend.ones((_SIZE, _SIZE), dtype="float32", device=device)
    _check_place(backend, ones, device, "the tensor of ones")
    with backend.strict():  # outside of a scope TensorFlow computes on its default device
        product = ones @ ones
    _check_place(backend, product, device, "the product")
    # ``copy``, because on the CPU itself ``to`` would have nothing to do.
    on_cpu = backend.copy(product, backend.cpu())
    _check_place(backend, on_cpu, backend.cpu(), "the copy to the CPU")
    again = backend.copy(on_cpu, device)
    _check_place(backend, again, device, "the copy back to the device")
    backend.synchronize(device)
    values = backend.to_numpy(again)
    wrong = int((values != _SIZE).sum())
    if values.shape != (_SIZE, _SIZE) or wrong:
        raise RuntimeError(
            f"ones @ ones of shape {values.shape} has {wrong} values that are not {_SIZE}"
        )


def _check_place(backend: Backend, x: object, device: Device, what: str) -> None:
    there = backend.device_of(x)
    if there is not device:
        raise RuntimeError(f"{what} is on {there}, not on {device}")


def human(size: int | None) -> str:
    """Return a number of bytes for people; ``'-'`` for None.

    >>> human(None), human(512), human(80 * 2**30)
    ('-', '512 B', '80.0 GiB')
    """
    if size is None:
        return "-"
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, len(_UNITS))
    return f"{size / 1024**power:.1f} {_UNITS[power - 1]}"
