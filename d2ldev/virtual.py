"""How many virtual GPUs were asked for: ``D2LDEV_VIRTUAL_GPUS`` or ``virtual_gpus(n)``.

A virtual GPU is a place that is not there: real data, real computation on the CPU, real
device semantics. Each backend makes its own; this module only carries the number, which a
backend takes when it is first used. A variable that is changed later is for the backends and the
processes that begin after that: nothing reads it when a backend in use is asked for its GPUs, which
would cost every call, but the error of a GPU that is not there says so.
"""

from __future__ import annotations

import operator
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from d2ldev.errors import DeviceUnavailableError, InvalidDeviceError, shown

if TYPE_CHECKING:
    from d2ldev.interface import Backend

VARIABLE = "D2LDEV_VIRTUAL_GPUS"
MAXIMUM = 8

_chosen: int | None = None


def virtual_gpus(n: int) -> None:
    """Ask for ``n`` virtual GPUs in every backend that is used for the first time from now on.

    Args:
        n: 0 to 8; 0 is none at all, also for the reference backend, which has two by default.

    Raises:
        InvalidDeviceError: if ``n`` is no integer, or out of range.
        DeviceUnavailableError: if a backend in use already has another number of GPUs.
    """
    from d2ldev.registry.selection import loaded_backends

    global _chosen
    number = _checked(n, f"make {shown(n)} virtual GPUs")
    for backend in loaded_backends():
        if backend.max_virtual_gpus and _made_by(backend) != number:
            count = backend.num_gpus()
            raise DeviceUnavailableError(
                f"make {number} virtual GPUs",
                f"the {backend.name} backend is in use already, "
                f"with {count} GPU{'' if count == 1 else 's'}",
                f"call d2ldev.virtual_gpus({number}) before the first use of a backend, "
                f"or set {VARIABLE}={number}",
                backend.devices(),
            )
    _chosen = number


def requested_virtual_gpus() -> int | None:
    """The number that was asked for; None if nothing was said.

    Raises:
        InvalidDeviceError: if the environment's value is no number from 0 to 8.
    """
    if _chosen is not None:
        return _chosen
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    attempted = f"make {text!r} virtual GPUs (from {VARIABLE})"
    # Python does not read numbers of any length.
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return _checked(int(text) if is_number else text, attempted)


def asked_for_too_late(index: int) -> str:
    """A clause for the error of a GPU that a backend in use lacks; empty if it is not so."""
    with suppress(InvalidDeviceError):
        number = requested_virtual_gpus()
        if number is not None and index < number:
            return f", and {VARIABLE}={number} came after its first use: set it before"
    return ""


def _made_by(backend: Backend) -> int:
    """How many virtual GPUs a backend has, also if it was not told how many to make."""
    return sum(backend.platform(device) == "virtual" for device in backend.devices())


def _checked(n: object, attempted: str) -> int:
    try:
        number = -1 if isinstance(n, bool) else operator.index(n)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAXIMUM:
        raise InvalidDeviceError(
            attempted, f"the number is an integer from 0 to {MAXIMUM}", f"{VARIABLE}=2"
        )
    return number
