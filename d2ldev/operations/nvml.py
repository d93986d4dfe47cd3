"""NVIDIA's GPUs as the driver's management library (NVML) knows them, for ``devices``.

Frameworks count GPUs by initialising CUDA, after which no forked process can use one:
https://github.com/jax-ml/jax/issues/18852, https://github.com/tensorflow/tensorflow/issues/57877.
NVML counts them without initialising it. The extras for CUDA bring NVIDIA's own package for NVML,
``nvidia-ml-py``. Without it a framework counts the GPUs itself, and warns of the cost.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

from d2ldev.dependencies import import_optional, write_install
from d2ldev.errors import (
    DeviceInitializationWarning,
    DeviceUnavailableError,
    PackageNotInstalledError,
    warn,
)
from d2ldev.settings import number_in

DRIVER = "libcuda.so.1"
"""NVIDIA's driver, which comes with no wheel."""

# Transfers a second of a lane of PCI Express, of each generation from the first, one bit in each.
_TRANSFERS = (2.5e9, 5e9, 8e9, 16e9, 32e9, 64e9)


class Card(NamedTuple):
    """One GPU, or one MIG instance of it.

    Args:
        uuid: its name, as ``CUDA_VISIBLE_DEVICES`` may give it: ``'GPU-8932...'``.
        memory: its size in bytes; None if the driver does not say.
    """

    uuid: str
    memory: int | None


class Bandwidth(NamedTuple):
    """How many bytes a second a GPU can move at most; None where the driver does not say.

    Args:
        memory: into its memory, or out of it.
        link: from the host's memory, or to it, over PCI Express. None where there may be another
            link, as there is between Grace and its GPU.
    """

    memory: float | None
    link: float | None


@lru_cache(1)
def cards() -> list[Card] | None:
    """Return the GPUs of the machine, in NVML's order; empty without NVIDIA's driver.

    Returns:
        The GPUs. None if ``nvidia-ml-py`` is missing, or if a container has the driver without its
        management library.

    Raises:
        DeviceUnavailableError: if the driver fails, for example after an update of its library
            without a restart.
    """
    if not has_driver():
        return []
    try:
        nvml: Any = import_optional("pynvml", "count NVIDIA's GPUs", extra="cuda")
    except PackageNotInstalledError:
        return None
    try:
        with _open(nvml):
            return [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError_LibraryNotFound:
        return None
    except nvml.NVMLError_DriverNotLoaded:
        return []


@cache
def has_driver() -> bool:
    """Return whether NVIDIA's driver is on this machine; nothing of it is started.

    True where its library has another name than Linux gives it.
    """
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


@cache
def warn_without_driver(framework: str) -> None:
    """Say, once, that a framework that is built for CUDA finds no driver.

    Args:
        framework: its name; it was asked for its GPUs, and has none.
    """
    if not has_driver():
        warn(
            f"{framework} is built for CUDA, and there is no NVIDIA driver here ({DRIVER}): it has "
            "no GPU. fix: install the driver, or hide all GPUs: D2LDEV_VIRTUAL_GPUS=0",
            DeviceInitializationWarning,
        )


@cache
def warn_of_context(framework: str) -> None:
    """Say, once, that a framework counts its GPUs by initialising CUDA.

    Args:
        framework: its name.
    """
    warn(
        f"{framework} initialises CUDA to count its GPUs, and a process that is forked afterwards "
        "cannot use them: NVIDIA's management library cannot be asked. fix: "
        f"{write_install('cuda')}, and in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        DeviceInitializationWarning,
    )


def visible_cards() -> list[Card] | None:
    """Return the cards that CUDA will show to this process; None if NVML cannot be asked.

    They are the ones that ``CUDA_VISIBLE_DEVICES`` names before its first invalid name.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".

    Raises:
        DeviceUnavailableError: if the driver fails.
    """
    all_cards, names = cards(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if all_cards is None or names is None:
        return all_cards
    visible: list[Card] = []
    for name in map(str.strip, names.split(",")):
        if name.startswith("MIG-"):
            # A process sees one MIG instance, whatever else is named.
            return [*visible, Card(name, None)]
        found = _find_by_name(all_cards, name)
        if found is None:
            break
        visible.append(found)
    # CUDA shows no GPU at all where one is named twice.
    return visible if len(set(visible)) == len(visible) else []


def memory_of(index: int) -> int | None:
    """Return the memory of a visible GPU in bytes; None if it is not known which card it is.

    NVML orders GPUs by their place on the bus, and CUDA the fastest first, unless
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    Raises:
        DeviceUnavailableError: if the driver fails.
    """
    card = _visible_card(index)
    return None if card is None else card.memory


def uuid_of(index: int) -> str | None:
    """Return the name of a visible GPU; None if it is not known which card it is.

    Raises:
        DeviceUnavailableError: if the driver fails.
    """
    card = _visible_card(index)
    return None if card is None else card.uuid


def utilisation_of(index: int) -> int | None:
    """Return the per cent of the last second or less in which a visible GPU ran a kernel.

    None if NVML is missing, does not know, or cannot tell which card this GPU is.

    Raises:
        DeviceUnavailableError: if the driver fails.
    """
    with _ask(index) as (nvml, handle):
        if nvml is None:
            return None
        try:
            return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:
            return None


def bandwidth_of(index: int) -> Bandwidth:
    """Return how fast a visible GPU can be fed at most: no copy is faster.

    Memory moves two bits for each clock and line. The bits that encode others are counted as data.

    Raises:
        DeviceUnavailableError: if the driver fails.
    """
    with _ask(index) as (nvml, handle):
        if nvml is None:
            return Bandwidth(None, None)
        clock = _number(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM)
        lines = _number(nvml, "nvmlDeviceGetMemoryBusWidth", handle)
        # That of the GPU alone: a virtual machine may describe its bus wrongly.
        generation = _number(nvml, "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle) or 0
        lanes = _number(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
        is_known = 0 < generation <= len(_TRANSFERS) and not _may_have_another_link(nvml, handle)
        return Bandwidth(
            2e6 * clock * lines / 8 if clock and lines else None,
            _TRANSFERS[generation - 1] * lanes / 8 if lanes and is_known else None,
        )


@contextmanager
def _open(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
        try:
            yield
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        raise
    except nvml.NVMLError as error:
        raise DeviceUnavailableError(
            "count NVIDIA's GPUs",
            f"the driver answers NVML with an error: {error}",
            "restart the machine if the driver was updated; nvidia-smi names the problem",
        ) from error


@contextmanager
def _ask(index: int) -> Iterator[tuple[Any, Any]]:
    """Open NVML, and yield its module and its handle of a visible GPU; None if unknown."""
    card = _visible_card(index)
    if card is None:
        yield None, None
        return
    nvml: Any = import_optional("pynvml", "ask NVIDIA's driver about a GPU", extra="cuda")
    with _open(nvml):
        handle = None
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByUUID(card.uuid)
        yield (None, None) if handle is None else (nvml, handle)


def _number(nvml: Any, question: str, handle: Any, *options: int) -> int | None:
    """Return a number that NVML knows of a GPU; None if it does not, or has no such question."""
    try:
        return int(getattr(nvml, question)(handle, *options))
    except nvml.NVMLError:
        return None


def _may_have_another_link(nvml: Any, handle: Any) -> bool:
    """Return whether NVLink-C2C may link it to the host; old drivers cannot be asked."""
    try:
        return bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled)
    except nvml.NVMLError_NotSupported:
        return False
    except nvml.NVMLError:
        return True


def _visible_card(index: int) -> Card | None:
    visible = visible_cards() or []
    if index >= len(visible):
        return None
    are_alike = len({card.memory for card in visible}) == 1
    is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return visible[index] if are_alike or is_ordered else None


def _find_by_name(all_cards: list[Card], name: str) -> Card | None:
    index = number_in(name)
    if index >= 0:
        found = all_cards[index : index + 1]
    else:
        found = [card for card in all_cards if name and card.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid: str = nvml.nvmlDeviceGetUUID(handle)
    try:
        return Card(uuid, int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    except nvml.NVMLError:  # a GPU that shares the host's memory has none of its own
        return Card(uuid, None)
