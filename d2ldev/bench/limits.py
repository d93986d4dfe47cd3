"""What no copy can exceed, so that no figure is shown that the hardware cannot reach."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from d2ldev.bench.machine import count_cores
from d2ldev.bench.results import VIRTUAL, Row
from d2ldev.device import Device
from d2ldev.display import format_number
from d2ldev.operations import nvml

_TRIES = 5
# Another copy may be faster than NumPy's, so NumPy's is not a limit of the hardware.
_MARGIN = 2


class Limit(NamedTuple):
    """How many bytes a second can be copied.

    Args:
        rate: bytes a second.
        reason: what sets it, in words.
    """

    rate: float
    reason: str


def verify_rate(row: Row, device: Device, nbytes: int) -> Row:
    """Return a row of copies from the host to a device, without figures that cannot be true.

    Args:
        row: with figures.
        device: where the bytes arrive.
        nbytes: how many bytes are copied in the time of the row.

    Returns:
        The row. Figures that are above a limit are left out, and the reason is its note. The limits
        are the GPU's memory and its link to the host; of a virtual GPU, the host's memory.
    """
    limit = _find_limit(row.platform, device, nbytes)
    if row.figures is None or limit is None:
        return row
    rate = nbytes / max(row.figures.seconds, 1e-12)
    if rate <= limit.rate:
        return row
    found, most = format_number(rate / 1e9), format_number(limit.rate / 1e9)
    note = f"refused: {found} GB/s is more than the {most} GB/s of {limit.reason}"
    return replace(row, figures=None, note=note)


def _find_limit(platform: str, device: Device, nbytes: int) -> Limit | None:
    """Return the lowest limit that is known; None if none is."""
    if platform in ("cpu", VIRTUAL):
        rate = _MARGIN * count_cores() * _measure_host_rate(nbytes)
        return Limit(rate, f"{count_cores()} cores, measured")
    if platform != "cuda":
        return None
    found = nvml.bandwidth_of(device.index)
    limits = [
        Limit(rate, reason)
        for rate, reason in (
            (found.memory, "its memory"),
            (found.link, "its link to the host"),
        )
        if rate is not None
    ]
    return min(limits, default=None)


def _measure_host_rate(nbytes: int) -> float:
    """Return how many bytes a second one thread copies in the host's memory, at its fastest."""
    source, target = np.zeros(nbytes, "uint8"), np.zeros(nbytes, "uint8")
    source[:] = 1  # its memory is there only then
    taken = []
    for _ in range(_TRIES):
        begin = time.perf_counter_ns()
        np.copyto(target, source)
        taken.append(time.perf_counter_ns() - begin)
    return nbytes * 1e9 / max(1, min(taken))
