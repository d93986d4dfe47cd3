"""NVIDIA's GPUs as the driver's management library knows them, without CUDA.

TensorFlow lists its GPUs by initialising CUDA, after which no forked child can use one:
https://github.com/tensorflow/tensorflow/issues/57877. NVML counts them without. It numbers them
by their place on the bus, CUDA with the fastest first, so that what is said of *one* GPU is said
only where all are alike or the user has chosen ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

_LIBRARY = "libnvidia-ml.so.1"


class _MemoryInfo(ctypes.Structure):
    """``nvmlMemory_t`` of ``nvml.h``."""

    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class Card:
    """One GPU of the machine.

    Args:
        uuid: its name for ever, as ``CUDA_VISIBLE_DEVICES`` may name it: ``'GPU-8932...'``.
        memory: its size in bytes.
    """

    def __init__(self, uuid: str, memory: int) -> None:
        self.uuid = uuid
        self.memory = memory


def visible_cards() -> list[Card] | None:
    """The GPUs that CUDA will show this process, in NVML's order; None if NVML cannot say."""
    cards = _cards()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards is None or wanted is None:
        return cards
    visible: list[Card] = []
    for name in wanted.split(","):
        found = _named(cards, name.strip())
        # CUDA's rule: what follows the first invalid entry is invisible, and a card named twice
        # makes all of them so.
        if found is None:
            break
        if found in visible:
            return []
        visible.append(found)
    return visible


def memory_of(index: int) -> int | None:
    """The memory of one visible GPU in bytes; None if it is not known which one that is."""
    cards = visible_cards()
    if not cards or index >= len(cards):
        return None
    same_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    alike = len({card.memory for card in cards}) == 1
    return cards[index].memory if alike or same_order else None


def _named(cards: list[Card], name: str) -> Card | None:
    if name.isdigit():
        return cards[int(name)] if int(name) < len(cards) else None
    matching = [card for card in cards if name and card.uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None


@lru_cache(1)
def _cards() -> list[Card] | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:  # no driver, or one without it
        return None
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    cards = []
    for index in range(count.value):
        handle, uuid, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _MemoryInfo()
        if (
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            or library.nvmlDeviceGetUUID(handle, uuid, len(uuid))
            or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        ):
            return None
        cards.append(Card(uuid.value.decode(), int(memory.total)))
    return cards
