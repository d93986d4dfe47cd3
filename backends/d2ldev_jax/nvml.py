"""Counting CUDA's GPUs by asking the driver, which makes no context on any of them.

JAX cannot count them without a context on each, after which no forked process can use JAX:
https://github.com/jax-ml/jax/issues/18852
"""

from __future__ import annotations

import ctypes
import os

_DRIVER_NOT_LOADED = 9
_UUID_BYTES = 96


class DriverError(Exception):
    """The driver is there and does not answer."""


def count_visible() -> int:
    """How many GPUs CUDA shows this process: the driver's, as ``CUDA_VISIBLE_DEVICES`` has it.

    Raises:
        DriverError: if there is a driver and it fails, as one does whose library was updated
            without a restart.
    """
    uuids = _uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(uuids) if visible is None else len(_chosen(visible, uuids))


def _chosen(visible: str, uuids: list[str]) -> list[str]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names: those before the first that is none.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    chosen: list[str] = []
    for text in visible.split(","):
        name = text.strip()
        if name.isascii() and name.isdigit() and len(name) < 10:
            found = uuids[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            # A process sees one part of a divided GPU, whatever the list goes on to say.
            return [*chosen, name]
        else:
            found = [uuid for uuid in uuids if name and uuid.startswith(name)]
        if len(found) != 1:
            break
        chosen += found
    # CUDA shows none at all where one is named twice.
    return chosen if len(set(chosen)) == len(chosen) else []


def _uuids() -> list[str]:
    """The UUID of each GPU that the driver has; none without a driver."""
    library = _library()
    if library is None:
        return []
    status = library.nvmlInit_v2()
    if status == _DRIVER_NOT_LOADED:
        return []
    _check(status)
    try:
        count = ctypes.c_uint()
        _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return [_uuid(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


def _uuid(library: ctypes.CDLL, index: int) -> str:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    _check(library.nvmlDeviceGetUUID(handle, text, _UUID_BYTES))
    return text.value.decode()


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def _check(status: int) -> None:
    if status:
        raise DriverError(f"NVIDIA's driver answers NVML with error {status}")
