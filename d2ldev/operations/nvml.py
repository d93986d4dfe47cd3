"""NVIDIA's GPUs as the driver's management library (NVML) knows them, for the rooms ``devices``.

Frameworks count GPUs by initialising CUDA, after which no forked process can use one:
https://github.com/jax-ml/jax/issues/18852, https://github.com/tensorflow/tensorflow/issues/57877.
NVML counts them without initialising it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache, lru_cache
from typing import NamedTuple

from d2ldev.errors import DeviceInitializationWarning, DeviceUnavailableError, warn
from d2ldev.settings import number_in

DRIVER = "libcuda.so.1"
"""NVIDIA's driver, which comes with no wheel."""

_LIBRARY = "libnvidia-ml.so.1"
_DRIVER_NOT_LOADED = 9
_UUID_BYTES = 96


# Of ``nvml.h``: ``nvmlMemory_t`` is total, free and used bytes, and ``nvmlUtilization_t`` the per
# cent of the GPU and of its memory.
_Memory = ctypes.c_ulonglong * 3
_Utilisation = ctypes.c_uint * 2


class Card(NamedTuple):
    """One GPU, or one MIG instance of it.

    Args:
        uuid: its name, as ``CUDA_VISIBLE_DEVICES`` may give it: ``'GPU-8932...'``.
        memory: its size in bytes; None if the driver does not say.
    """

    uuid: str
    memory: int | None


@lru_cache(1)
def cards() -> list[Card] | None:
    """Return the GPUs of the machine, in NVML's order; None without NVIDIA's driver.

    Raises:
        DeviceUnavailableError: if the driver fails, as one does whose library was updated without
            a restart.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    status = library.nvmlInit_v2()
    if status == _DRIVER_NOT_LOADED:
        return None
    _check(status)
    try:
        count = ctypes.c_uint()
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return [_card(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


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
            "no GPU. fix: install the driver, or say that none is wanted: D2LDEV_VIRTUAL_GPUS=0",
            DeviceInitializationWarning,
        )


def visible_cards() -> list[Card] | None:
    """Return those of ``cards`` that CUDA will show this process; None without NVIDIA's driver.

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
        found = _named(all_cards, name)
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


def utilisation_of(index: int) -> int | None:
    """Return the per cent of the last second or less in which a visible GPU ran a kernel.

    None without NVIDIA's driver, if it does not say, and if it is not known which card it is.

    Raises:
        DeviceUnavailableError: if the driver fails.
    """
    card = _visible_card(index)
    if card is None:
        return None
    library = ctypes.CDLL(_LIBRARY)
    _check(library.nvmlInit_v2())
    try:
        handle, used = ctypes.c_void_p(), _Utilisation()
        name = card.uuid.encode()
        is_known = (
            library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0
            and library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0
        )
        return int(used[0]) if is_known else None
    finally:
        library.nvmlShutdown()


def _visible_card(index: int) -> Card | None:
    visible = visible_cards() or []
    if index >= len(visible):
        return None
    are_alike = len({card.memory for card in visible}) == 1
    is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return visible[index] if are_alike or is_ordered else None


def _named(all_cards: list[Card], name: str) -> Card | None:
    index = number_in(name)
    if index >= 0:
        found = all_cards[index : index + 1]
    else:
        found = [card for card in all_cards if name and card.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None


def _card(library: ctypes.CDLL, index: int) -> Card:
    handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    _check(library.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES))
    memory = _Memory()
    # A GPU that shares the host's memory has none of its own.
    is_known = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return Card(uuid.value.decode(), int(memory[0]) if is_known else None)


def _check(status: int) -> None:
    if status:
        raise DeviceUnavailableError(
            "count NVIDIA's GPUs",
            f"the driver answers NVML with error {status}",
            "restart the machine if the driver was updated; nvidia-smi says what is wrong",
        )
