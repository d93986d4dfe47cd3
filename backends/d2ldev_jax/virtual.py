"""GPUs that are not there: CPU devices of JAX, past the first one, which is the CPU.

What is committed to two of them does not mix, as on GPUs, and each computes on its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import jax

from d2ldev.errors import DeviceUnavailableError
from d2ldev_jax.accelerator import Accelerator, is_initialized

_XLA_COUNT = re.compile(r"--xla_force_host_platform_device_count=([0-9]+)")


class VirtualAccelerator(Accelerator):
    """Virtual GPUs, which JAX makes when it is initialised.

    Args:
        number: how many.

    Raises:
        DeviceUnavailableError: if JAX is initialised already, with fewer CPU devices.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        needed = number + 1
        if not is_initialized():
            forced = _XLA_COUNT.findall(os.environ.get("XLA_FLAGS", ""))
            wanted = max(needed, jax.config.jax_num_cpu_devices, *map(int, forced))
            configure: Callable[[str, object], None] = jax.config.update
            configure("jax_num_cpu_devices", wanted)
            # They stand in the hardware's stead: JAX's default device is the CPU as well.
            configure("jax_platforms", "cpu")
        elif (there := len(self.cpus())) < needed:
            raise DeviceUnavailableError(
                f"make {number} virtual GPUs",
                f"JAX is in use already, with {there} CPU device{'' if there == 1 else 's'}; "
                f"it takes {needed}",
                "use d2ldev's jax backend before anything asks JAX for a device or an array, or "
                f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed}",
            )

    def count(self) -> int:
        return self._number

    def may_be_used(self) -> bool:
        return False

    def gpus(self) -> list[jax.Device]:
        return self.cpus()[1 : self._number + 1]

    def platform(self, index: int) -> str:
        return "virtual"

    def start(self) -> None:
        self._started = True
