"""CUDA, as far as MXNet does not say it: counting cards without touching them, and the first use.

``mx.context.num_gpus`` initialises CUDA, after which a forked child cannot use it. The driver is
therefore asked in a process of its own, once, where the wheel has CUDA at all.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from d2ldev.device import Device
from d2ldev.errors import DeviceUnavailableError
from d2ldev_mxnet.framework import mx

# Prints the compute capability of every card: "8.0 8.6". Without a driver there is no card, and
# the driver's code 100 says the same.
_QUERY = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
except OSError:
    sys.exit()
def ask(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code == 100:
        sys.exit()
    if code:
        sys.exit(f"{name} fails with CUDA's error {code}")
number, card, major, minor = (ctypes.c_int() for _ in range(4))
ask("cuInit", 0)
ask("cuDeviceGetCount", ctypes.byref(number))
for index in range(number.value):
    ask("cuDeviceGet", ctypes.byref(card), index)
    ask("cuDeviceGetAttribute", ctypes.byref(major), 75, card)
    ask("cuDeviceGetAttribute", ctypes.byref(minor), 76, card)
    print(f"{major.value}.{minor.value}")
"""


def has_cuda() -> bool:
    """Whether this MXNet was built for CUDA."""
    return bool(mx.runtime.Features().is_enabled("CUDA"))


@cache
def capabilities() -> tuple[str, ...]:
    """The compute capability of each card that this process may use.

    Raises:
        RuntimeError: if the driver found cards and cannot initialise them.
    """
    command = [sys.executable, "-c", _QUERY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return tuple(done.stdout.split())


@cache
def check_card(device: Device) -> None:
    """Run a first kernel on a card; once is enough if it works.

    Raises:
        DeviceUnavailableError: if it fails, above all because the wheel has none for the card.
    """
    try:
        mx.nd.ones((1,), ctx=mx.gpu(device.index)).wait_to_read()
    except mx.base.MXNetError as error:
        lines = str(error).strip().splitlines()
        raise DeviceUnavailableError(
            f"use {device}",
            f"MXNet's first kernel fails on this card, of compute capability "
            f"{capabilities()[device.index]}: {lines[-1] if lines else 'it says no more'}; "
            "the published wheels are for CUDA 10 to 11.7, with kernels for cards up to 8.6 and "
            "no PTX, so that Hopper (9.0) and what comes after it cannot run them",
            "use the CPU: D2LDEV_BACKEND=mxnet with D2LDEV_VIRTUAL_GPUS=1, another framework "
            "such as D2LDEV_BACKEND=torch, or an MXNet built for this card",
            [device],
        ) from error
