"""The machine that figures come from: its processor and its GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """Return ``system``, ``processor``, ``cores``, ``cards``, ``load`` and ``warning``."""
    now = read_load()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": find_processor(),
        "cores": count_cores(),
        "cards": list_cards(),
        "load": now,
        "warning": warn_of_load(now, count_cores()),
    }


def read_load() -> float | None:
    """Return how many processes were ready to compute in the last minute; None if not known."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # Windows, and some containers
        return None


def warn_of_load(load: float | None, cores: int) -> str:
    """Return a warning about figures of a loaded machine; empty if the machine is idle.

    >>> warn_of_load(3.0, 4)
    'Others compute on this machine: its load is 3 for 4 cores. Measure again when it is idle.'
    >>> warn_of_load(0.5, 4)
    ''
    """
    if load is None or load <= cores / 4:
        return ""
    return (
        f"Others compute on this machine: its load is {load:g} for {cores} cores. Measure again "
        "when it is idle."
    )


def count_cores() -> int:
    """Return on how many cores this process may compute."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_processor() -> str:
    """Return the name of the processor; what Python knows of it where Linux does not tell."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def list_cards() -> list[str]:
    """Return the machine's NVIDIA GPUs with their driver; empty without ``nvidia-smi``."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"{line.replace(', ', ' (driver ')})" for line in output.stdout.splitlines() if line]
