"""Devices: JAX's on the CPU, on CUDA and on ROCm; virtual GPUs are further CPU devices of JAX.

JAX initialises all its devices at once, which makes a context on each GPU. So nothing here
initialises JAX before somebody wants a device; until then CUDA's GPUs are counted by the driver:
https://github.com/jax-ml/jax/issues/18852.

JAX computes after it has returned, on the CPU as well, and has no queue that can be asked. A GPU
does its work in order, and so does the CPU with what one thread gives it: a small computation that
is queued now is done when everything before it is. What other threads gave to the CPU is known by
its results, as long as somebody holds them.
"""

from __future__ import annotations

import os
import pkgutil
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from importlib import util
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.xla_bridge import backends_are_initialized

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import DeviceUnavailableError
from d2ldev.framework import Devices, Memory
from d2ldev.operations import nvml
from d2ldev.operations.devices import user_has_chosen, warn_too_late

_PLATFORMS = ("cuda", "rocm")
# The frameworks that may have loaded CUDA's libraries before JAX.
_OTHERS = ("torch", "tensorflow", "mxnet")
# The device file without which ROCm has no GPU.
ROCM_DRIVER = Path("/dev/kfd")

# Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
MEMORY_VARIABLES = (
    _PREALLOCATE,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "TF_GPU_ALLOCATOR",
    "JAX_PJRT_CLIENT_CREATE_OPTIONS",
)
_XLA_CPU_COUNT = re.compile(r"--xla_force_host_platform_device_count=([0-9]+)")

# The seconds that a small computation may take on a device that has nothing else to do.
_PATIENCE = 0.002


def is_initialized() -> bool:
    """Return whether JAX has its devices already; the public functions would initialise it."""
    return bool(backends_are_initialized())


class JaxDevices(Devices):
    """What real and virtual GPUs have in common.

    Attributes:
        places: what each of JAX's devices stands for, and the kind of memory that is its own;
            empty until ``from_native`` is called.
    """

    def __init__(self) -> None:
        self.places: dict[jax.Device, tuple[Device, str]] = {}
        self._cpus: list[jax.Device] = []

    @abstractmethod
    def gpus(self) -> list[jax.Device]:
        """Return the GPUs of this process; initialises JAX."""

    def cpus(self) -> list[jax.Device]:
        """Return JAX's CPU devices, of which the first is the CPU; initialises JAX.

        Raises:
            DeviceUnavailableError: if JAX was told to have none, or cannot be initialised.
        """
        if not self._cpus:
            try:
                self._cpus = jax.local_devices(backend="cpu")
            except RuntimeError as error:
                raise DeviceUnavailableError(
                    "use the CPU",
                    f"JAX has none here: {error}",
                    "unset JAX_PLATFORMS, or add the CPU: JAX_PLATFORMS=cuda,cpu",
                ) from error
        return self._cpus

    def native(self, device: Device) -> jax.Device:
        return self.cpus()[0] if device is CPU else self.gpus()[device.index]

    def from_native(self, native: Any) -> Device | None:
        if not isinstance(native, jax.Device):
            return None
        if not self.places:
            found: dict[jax.Device, Device] = {}
            with suppress(DeviceUnavailableError):  # JAX_PLATFORMS=cuda leaves no CPU
                found.update(dict.fromkeys(self.cpus(), CPU))
            found.update({each: gpu(index) for index, each in enumerate(self.gpus())})
            for each, device in found.items():
                self.places[each] = device, each.default_memory().kind
        # Another process's device and a TPU stand for nothing.
        return self.places.get(native, (None, ""))[0]

    def default(self) -> jax.Device:
        default = jax.config.jax_default_device
        if default is None or isinstance(default, str):  # a platform's name
            default = jax.local_devices(backend=default)[0]
        return default

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = jax.default_device(self.native(device))
        return scope

    def synchronize(self, device: Device) -> None:
        if not is_initialized():
            return
        native = self.native(device)
        marker = _marker(native)
        for x in _results(native):
            # What failed or was deleted meanwhile is done, too; whoever reads it gets the error.
            with suppress(RuntimeError):
                x.block_until_ready()
        marker.block_until_ready()

    def is_idle(self, device: Device) -> bool:
        if not is_initialized():
            return True
        native = self.native(device)
        marker = _marker(native)
        for x in _results(native):
            with suppress(RuntimeError):
                if x is not marker and not x.is_ready():
                    return False
        end = time.monotonic() + _PATIENCE
        while not (ready := marker.is_ready()) and time.monotonic() < end:
            time.sleep(0)
        return bool(ready)

    def memory(self, device: Device) -> Memory:
        native = self.native(device)
        stats = native.memory_stats()
        if not stats:  # a CPU device, and so a virtual GPU
            return Memory(_bytes_held(native), None, None)
        used, peak = stats.get("bytes_in_use"), stats.get("peak_bytes_in_use")
        return Memory(used, peak, stats.get("bytes_limit"))

    def is_out_of_memory(self, error: Exception) -> bool:
        # JAX has one exception for all errors of XLA, which have no code that can be relied on. The
        # last words are about sizes that no address reaches.
        words = ("RESOURCE_EXHAUSTED", "Out of memory", "overflow in static extent")
        if isinstance(error, RuntimeError) and any(text in str(error) for text in words):
            return True
        return super().is_out_of_memory(error)


class HardwareDevices(JaxDevices):
    """The CPU, and the GPUs of the machine as far as they are this process's.

    Raises:
        UnsupportedValueError: if ``D2LDEV_GPU_MEMORY`` has another value than it can have.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gpus: list[jax.Device] = []
        self._is_started = False
        # Why hardware that is there cannot be used, and what helps.
        self._failure: tuple[str, str] | None = None
        self._let_memory_grow()

    def count(self) -> int:
        # ROCm's driver has nothing that counts as NVML does: JAX has to be asked.
        if self._is_started or is_initialized() or self._may_use("rocm"):
            number = len(self.gpus())
        else:
            number = self._counted()
        if self._failure is not None:
            raise DeviceUnavailableError("use the GPUs", *self._failure)
        return number

    def native(self, device: Device) -> jax.Device:
        if device is CPU:
            return self.cpus()[0]
        gpus = self.gpus()
        if device.index < len(gpus):
            return gpus[device.index]
        problem, fix = self._failure or (
            f"the driver showed it, and JAX has {len(gpus)} GPUs",
            f"backend.try_gpu({device.index}), which knows it now",
        )
        raise DeviceUnavailableError(
            f"use {device}", problem, fix, [CPU, *map(gpu, range(len(gpus)))]
        )

    def platform(self, device: Device) -> str:
        if device is CPU:
            return "cpu"
        version = str(self.native(device).client.platform_version)
        return "rocm" if "rocm" in version.lower() else "cuda"

    def default(self) -> jax.Device:
        self._start()  # after which JAX goes on without a GPU that fails
        return super().default()

    def cpus(self) -> list[jax.Device]:
        self._start()
        return super().cpus()

    def gpus(self) -> list[jax.Device]:
        self._start()
        return self._gpus

    def _start(self) -> None:
        """Initialise JAX, and find out what it has."""
        if self._is_started:
            return
        reasons: list[str] = []
        # Where a GPU fails, the first attempt does; after it JAX goes on without.
        _local_devices(None, reasons)
        for platform in _PLATFORMS:
            self._gpus = self._gpus or _local_devices(platform, reasons)
        if not self._gpus and (number := self._counted()):
            others = [name for name in _OTHERS if name in sys.modules]
            fix = "update the driver, or d2ldev[jax-cuda]"
            if others:
                fix = f"use jax before {' and '.join(others)}, which may bring another cuDNN"
            self._failure = (
                f"NVIDIA's driver shows {number} GPUs, and JAX can use none: {reasons[0]}",
                fix,
            )
        self._is_started = True

    def _counted(self) -> int:
        """Return how many GPUs of CUDA's JAX will find, as far as the driver can say."""
        try:
            cards = nvml.visible_cards()
        except DeviceUnavailableError as error:
            self._failure = (error.problem, error.fix) if self._may_use("cuda") else None
            return 0
        if not cards or not self._may_use("cuda"):
            return 0
        visible = jax.config.values.get("jax_cuda_visible_devices", "all")
        return len(cards) if visible == "all" else min(len(cards), len(visible.split(",")))

    def _may_use(self, platform: str) -> bool:
        """Return whether JAX is installed for a platform, and not told to leave it alone."""
        if platform == "rocm" and not ROCM_DRIVER.exists():
            return False
        allowed = jax.config.jax_platforms
        if allowed and not {platform, "gpu"} & set(allowed.split(",")):
            return False
        return any(platform in name for name in _plugins())

    def _let_memory_grow(self) -> None:
        """Ask JAX not to preallocate, if it will use a GPU and the user has said nothing else."""
        if user_has_chosen(MEMORY_VARIABLES):
            return
        if not is_initialized():
            if self._counted() or self._may_use("rocm"):
                os.environ[_PREALLOCATE] = "false"
        elif self.gpus():
            warn_too_late("JAX", f"{_PREALLOCATE}=false")


class VirtualDevices(JaxDevices):
    """The CPU, and virtual GPUs: CPU devices of JAX, past the first one.

    Arrays that are committed to two of them do not mix, as on GPUs, and each computes by itself.

    Args:
        number: how many virtual GPUs there are.

    Raises:
        DeviceUnavailableError: if JAX is initialised already, with fewer CPU devices.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        needed = number + 1
        if not is_initialized():
            forced = _XLA_CPU_COUNT.findall(os.environ.get("XLA_FLAGS", ""))
            wanted = max(needed, jax.config.jax_num_cpu_devices, *map(int, forced))
            configure: Callable[[str, object], None] = jax.config.update
            configure("jax_num_cpu_devices", wanted)
            # They take the hardware's place: JAX's default device is the CPU as well.
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

    def platform(self, device: Device) -> str:
        return "cpu" if device is CPU else "virtual"

    def gpus(self) -> list[jax.Device]:
        return self.cpus()[1 : self._number + 1]


def _local_devices(platform: str | None, reasons: list[str]) -> list[jax.Device]:
    """Return the devices of a platform; none, and one reason more, if it fails."""
    try:
        devices: list[jax.Device] = jax.local_devices(backend=platform)
    except RuntimeError as error:
        reasons.append(str(error))
        return []
    return devices


def _plugins() -> Iterator[str]:
    """Yield JAX's plugins that are installed, which JAX looks up in these two ways."""
    with suppress(ImportError, ValueError):
        spec = util.find_spec("jax_plugins")
        if spec is not None:
            for module in pkgutil.iter_modules(spec.submodule_search_locations):
                yield module.name
    yield from (point.value for point in entry_points(group="jax_plugins"))


def _results(native: jax.Device) -> Iterator[Any]:
    """Yield the arrays of a device that somebody holds."""
    for x in jax.live_arrays(native.platform):  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            if native in x.devices():
                yield x


_add_one = jax.jit(lambda x: x + 1)


def _marker(native: jax.Device) -> Any:
    """Return the result of a small computation that is queued now, also while JAX traces."""
    with jax.ensure_compile_time_eval():
        return _add_one(_number(native))


@lru_cache
def _number(native: jax.Device) -> Any:
    return jax.device_put(np.zeros((), np.int32), native)


def _bytes_held(native: jax.Device) -> int:
    """Return the bytes that this process's arrays hold on a device; what they share counts once."""
    held: dict[int, int] = {}
    for x in jax.live_arrays(native.platform):  # type: ignore[no-untyped-call]
        # An array that was deleted, or whose computation failed, holds nothing.
        with suppress(RuntimeError):
            # Not its shards: asked for once, they are kept, in a cycle.
            for part in x._arrays:
                if part.size and native in part.devices():
                    address = part.unsafe_buffer_pointer()
                    held[address] = max(held.get(address, 0), part.nbytes)
    return sum(held.values())
