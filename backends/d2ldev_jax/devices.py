"""Devices: JAX's on the CPU, CUDA, ROCm and TPUs; virtual GPUs are further CPU devices of JAX.

JAX initialises all devices at once, and then has a context on each GPU. This module initialises JAX
only when a caller needs a device. Before that, NVIDIA's driver counts the GPUs:
https://github.com/jax-ml/jax/issues/18852.

JAX computes asynchronously, also on the CPU, and has no call that tells whether a queue is empty. A
GPU computes in order, and so does the CPU for each thread. So a small computation that is queued
now ends after everything before it. The CPU's work for other threads shows in its results, as long
as a reference to them exists.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pkgutil
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Private: each public function that tells it initialises JAX.
from jax._src.xla_bridge import backends_are_initialized

from d2ldev import Device, DeviceUnavailableError, gpu
from d2ldev.framework import (
    CPU,
    Devices,
    Memory,
    check_room,
    gpus_in_words,
    memory_of_the_machine,
    nvml,
    user_has_chosen,
    warn_too_late,
)
from d2ldev_jax.precision import matmul_precision, set_matmul_precision

# The device file that ROCm needs.
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
_LOGGER = logging.getLogger("jax._src.xla_bridge")
# The text of a CPU device, in newer and in older releases.
_CPU_IN_WORDS = re.compile(r"(?:cpu:|TFRT_CPU_)([0-9]{1,9})", re.ASCII)
_CPU_COUNT = "JAX_NUM_CPU_DEVICES"
_XLA_CPU_COUNT_FLAG = "--xla_force_host_platform_device_count="
_XLA_CPU_COUNT = re.compile(rf"{_XLA_CPU_COUNT_FLAG}([0-9]+)")

# The most seconds that a small computation takes on an idle device. On a GPU, JAX also loads the
# first one, and other processes may have their turn before it.
_PATIENCE = 0.01
# An array of so many bytes is always waited for: its copy takes much longer than the wait. JAX
# reads such an array from the host's memory itself. It reads smaller ones from pinned memory:
# ShouldStageHostToDeviceTransfers in xla/pjrt/gpu and xla/pjrt/se.
LONG = 2**30


def is_initialized() -> bool:
    """Return whether JAX has its devices already."""
    return bool(backends_are_initialized())


class JaxDevices(Devices):
    """The base class of the devices with real GPUs, and of those with virtual GPUs."""

    @abstractmethod
    def gpus(self) -> list[jax.Device]:
        """Return the GPUs of this process; initialises JAX."""

    def find_visible_gpus(self, local_rank: int) -> list[int] | None:
        """Return the numbers of the GPUs that a process of a launch uses; None for all of them.

        Args:
            local_rank: the number of the process on this machine.
        """
        return None

    def count_cuda(self) -> int | None:
        """Return the number of CUDA GPUs for JAX, without initialising it; None if unknown."""
        return 0

    def cpus(self) -> list[jax.Device]:
        """Return JAX's CPU devices; the first one is the CPU. Initialises JAX.

        Raises:
            DeviceUnavailableError: if JAX's settings exclude the CPU, or JAX fails to initialise.
        """
        try:
            cpus: list[jax.Device] = jax.local_devices(backend="cpu")
        except RuntimeError as error:
            raise DeviceUnavailableError(
                "use the CPU",
                f"JAX has none here: {error}",
                "unset JAX_PLATFORMS, or add the CPU: JAX_PLATFORMS=cuda,cpu",
            ) from error
        return cpus

    def native(self, device: Device) -> jax.Device:
        return self.cpus()[0] if device is CPU else self.gpus()[device.index]

    @cached_property
    def places(self) -> dict[jax.Device, Device]:
        """JAX's devices of this process, each with its ``Device``; initialises JAX."""
        found: dict[jax.Device, Device] = {}
        with suppress(DeviceUnavailableError):  # JAX_PLATFORMS=cuda leaves no CPU
            found.update(dict.fromkeys(self.cpus(), CPU))
        found.update({each: gpu(index) for index, each in enumerate(self.gpus())})
        return found

    def from_native(self, native: Any) -> Device | None:
        # A text that names a device comes from a device, so JAX is initialised then.
        if isinstance(native, str) and is_initialized():
            native = next((each for each in self.places if str(each) == native), None)
        return self.places.get(native) if isinstance(native, jax.Device) else None

    def default(self) -> jax.Device:
        self.gpus()  # JAX then goes on without a GPU that fails
        default = jax.config.jax_default_device
        if default is None or isinstance(default, str):  # a platform's name
            default = jax.local_devices(backend=default)[0]
        return default

    def uuid(self, device: Device) -> str | None:
        """Return an identifier of a GPU that is the same in all processes; None without one."""
        return None

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        return _DefaultDevice(self.native(device))

    def synchronize(self, device: Device) -> None:
        if is_initialized():
            _wait(_queue_work(self.native(device)))

    def is_idle(self, device: Device) -> bool:
        if not is_initialized():
            return True
        queued = _queue_work(self.native(device))
        end = time.monotonic() + _PATIENCE
        for x in queued:
            with suppress(RuntimeError):
                while not x.is_ready():
                    if time.monotonic() > end:
                        return False
                    time.sleep(0)
        return True

    def matmul_precision(self) -> str:
        return matmul_precision()

    def set_matmul_precision(self, precision: str) -> Callable[[], None]:
        return set_matmul_precision(precision)

    def memory(self, device: Device) -> Memory:
        native = self.native(device)
        stats = native.memory_stats()
        if not stats:  # a CPU device, and so a virtual GPU
            return Memory(_bytes_held(native), None, None)
        used, peak = stats.get("bytes_in_use"), stats.get("peak_bytes_in_use")
        return Memory(used, peak, stats.get("bytes_limit"))

    def is_large(self, nbytes: int, native: jax.Device) -> bool:
        """Return whether an array takes a large share of a device's free memory.

        The caller then waits for the array: JAX returns before it has allocated the memory.

        Args:
            nbytes: the bytes of the array.
            native: the device.

        Raises:
            MemoryError: if the device has less memory, or less free memory.
        """
        stats = native.memory_stats() or {}
        total = stats.get("bytes_limit")
        if total is None and native.platform == "cpu":
            total = memory_of_the_machine()
        if total is None:  # with XLA_PYTHON_CLIENT_ALLOCATOR=platform
            return True
        free = total - stats.get("bytes_in_use", 0)
        # An allocator with a pool never exceeds its limit. CUDA's own allocator frees memory at its
        # limit, and may exceed it.
        if nbytes > free and "pool_bytes" in stats:
            _wait(_queue_work(native))  # queued work may hold arrays without another reference
            free = total - (native.memory_stats() or stats)["bytes_in_use"]
            total = min(total, free)
        check_room(nbytes, total)
        return nbytes >= LONG or 4 * nbytes > free

    def is_out_of_memory(self, error: Exception) -> bool:
        # All errors of XLA have one class in JAX, and no reliable code. The last words are about
        # sizes beyond the address space.
        words = ("RESOURCE_EXHAUSTED", "Out of memory", "overflow in static extent")
        if isinstance(error, RuntimeError) and any(text in str(error) for text in words):
            return True
        return super().is_out_of_memory(error)


class HardwareDevices(JaxDevices):
    """The CPU, and those GPUs of the machine that belong to this process."""

    def __init__(self) -> None:
        self._gpus: list[jax.Device] | None = None
        # Why hardware cannot be used, and the fix.
        self._failure: tuple[str, str] | None = None

    def count(self) -> int:
        # NVML counts CUDA's GPUs without a context. For ROCm and TPUs only JAX can count.
        is_asked = is_initialized() or self._may_use("rocm") or self._may_use("tpu")
        if not is_asked:
            self._let_memory_grow()  # after the count, the program may use JAX without d2ldev
        number = None if is_asked else self.count_cuda()
        if number is None:
            number = len(self.gpus())
            if number and not is_asked:
                nvml.warn_of_context("jax")
        if self._failure is not None:
            raise DeviceUnavailableError("use the GPUs", *self._failure)
        if not number and self._may_use("cuda"):
            nvml.warn_without_driver("jax")
        return number

    def native(self, device: Device) -> jax.Device:
        try:
            return super().native(device)
        except IndexError:
            number = len(self.gpus())
            problem, fix = self._failure or (
                f"the driver showed it, and JAX has {gpus_in_words(number)}",
                f"backend.try_gpu({device.index}), which now returns a device that exists",
            )
            there = [CPU, *map(gpu, range(number))]
            raise DeviceUnavailableError(f"use {device}", problem, fix, there) from None

    def platform(self, device: Device) -> str:
        if device is CPU:
            return "cpu"
        native = self.native(device)
        if native.platform == "tpu":
            return "tpu"
        return "rocm" if "rocm" in str(native.client.platform_version).lower() else "cuda"

    def uuid(self, device: Device) -> str | None:
        # The index is CUDA's: JAX may use only some of the visible GPUs.
        number = self.native(device).local_hardware_id
        return nvml.uuid_of(number) if self.platform(device) == "cuda" else None

    def cpus(self) -> list[jax.Device]:
        self.gpus()
        return super().cpus()

    def gpus(self) -> list[jax.Device]:
        if self._gpus is not None:
            return self._gpus
        is_late = is_initialized() and not user_has_chosen(MEMORY_VARIABLES)
        self._let_memory_grow()
        reason = ""
        gpus: list[jax.Device] = []
        try:
            with self._no_traceback():
                jax.local_devices()
        except RuntimeError as error:  # a GPU fails; the next call of JAX leaves it out
            reason = str(error)
        for platform in ("gpu", "tpu"):
            try:
                gpus = gpus or jax.local_devices(backend=platform)
            except RuntimeError as error:
                reason = reason or str(error)
        if not gpus and (number := self.count_cuda()):
            self._failure = (
                f"NVIDIA's driver shows {gpus_in_words(number)}, and JAX can use none: {reason}",
                "update the driver, or d2ldev[jax-cuda]; import jax before other frameworks, which "
                "may bring another cuDNN",
            )
        self._gpus = gpus
        if gpus and is_late:
            warn_too_late("JAX", f"{_PREALLOCATE}=false")
        return gpus

    @contextmanager
    def _no_traceback(self) -> Iterator[None]:
        """Suppress JAX's log of its CUDA plugin's failure without a driver: ``count`` warns of it.

        https://github.com/jax-ml/jax/blob/main/jax/_src/xla_bridge.py
        """
        before = _LOGGER.disabled
        _LOGGER.disabled = before or (self._may_use("cuda") and not nvml.has_driver())
        try:
            yield
        finally:
            _LOGGER.disabled = before

    def find_visible_gpus(self, local_rank: int) -> list[int] | None:
        # A launcher may show each process only its own GPU.
        return [local_rank] if 1 < (self.count_cuda() or 0) > local_rank else None

    def count_cuda(self) -> int | None:
        if not self._may_use("cuda"):
            return 0
        try:
            cards = nvml.visible_cards()
        except DeviceUnavailableError as error:
            self._failure = error.problem, error.fix
            return 0
        if cards is None:
            return None
        visible = jax.config.values.get("jax_cuda_visible_devices", "all")
        return len(cards) if visible == "all" else min(len(cards), len(visible.split(",")))

    def _may_use(self, platform: str) -> bool:
        """Return whether JAX is installed for a platform, and its settings allow the platform."""
        if platform == "rocm" and not ROCM_DRIVER.exists():
            return False
        allowed = jax.config.jax_platforms
        names = {platform} if platform == "tpu" else {platform, "gpu"}
        if allowed and not names & set(allowed.split(",")):
            return False
        if platform == "tpu":
            return importlib.util.find_spec("libtpu") is not None
        return any(platform in name for name in self._plugins)

    @cached_property
    def _plugins(self) -> list[str]:
        """The modules of JAX's plugins, found in the same way as by its ``discover_pjrt_plugins``.

        The wheels for CUDA and ROCm are in the package ``jax_plugins``:
        https://github.com/jax-ml/jax/tree/main/jax_plugins. To read the entry points of all
        distributions takes milliseconds. So they are read only on a machine with a driver.
        """
        package = importlib.util.find_spec("jax_plugins")
        folders = None if package is None else package.submodule_search_locations
        found = [module.name for module in pkgutil.iter_modules(folders or [])]
        if nvml.has_driver() or ROCM_DRIVER.exists():
            found += [point.value for point in entry_points(group="jax_plugins")]
        return found

    def _let_memory_grow(self) -> None:
        """Ask JAX not to preallocate memory, if it will use a GPU and the user has not chosen.

        The first count or use of the GPUs calls it. ``backend_of(x)`` sets no variable.
        """
        if is_initialized() or user_has_chosen(MEMORY_VARIABLES):
            return
        if self.count_cuda() or self._may_use("rocm"):
            os.environ[_PREALLOCATE] = "false"


def _find_own_count(needed: int) -> tuple[str, str]:
    """Return where the user's own number of CPU devices comes from, and what to write there.

    Both are empty if there is none, so that d2ldev's number counts.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if (count := jax.config.jax_num_cpu_devices) > 0:
        if _CPU_COUNT in os.environ:
            return f" by {_CPU_COUNT}={count}", f"{_CPU_COUNT}={needed}"
        option = "jax_num_cpu_devices"
        return f" by {option}={count}", f'jax.config.update("{option}", {needed})'
    if flags and not flags.startswith("-"):
        return " by the file of XLA_FLAGS", f"write {_XLA_CPU_COUNT_FLAG}{needed} into {flags}"
    return "", ""


class VirtualDevices(JaxDevices):
    """The CPU, and virtual GPUs: further CPU devices of JAX, after the first one.

    As on GPUs, arrays that are committed to two of them do not mix, and each computes by itself.

    Args:
        number: the number of virtual GPUs.

    Raises:
        DeviceUnavailableError: if JAX is initialised already, with fewer CPU devices.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        needed = number + 1
        if not is_initialized():
            forced = _XLA_CPU_COUNT.findall(os.environ.get("XLA_FLAGS", ""))
            wanted = max(needed, jax.config.jax_num_cpu_devices, *map(int, forced))
            configure: Callable[[str, object], None] = jax.config.update
            configure("jax_num_cpu_devices", wanted)
            # They replace the hardware: JAX's default device is the CPU, too.
            configure("jax_platforms", "cpu")
        elif (there := len(self.cpus())) < needed:
            setting, fix = _find_own_count(needed)
            devices = "1 CPU device" if there == 1 else f"{there} CPU devices"
            raise DeviceUnavailableError(
                f"make {number} virtual GPUs",
                f"JAX is in use already, with {devices}{setting}; it takes {needed}",
                fix
                or "`from d2ldev import jax` above JAX's first array or model, with "
                f"D2LDEV_VIRTUAL_GPUS={number} or below `d2ldev.virtual_gpus({number})`; "
                "in a notebook restart the kernel first",
            )

    def count(self) -> int:
        return self._number

    def from_native(self, native: Any) -> Device | None:
        match = _CPU_IN_WORDS.fullmatch(native) if isinstance(native, str) else None
        if match is not None and (index := int(match[1])) <= self._number:
            return gpu(index - 1) if index else CPU
        return super().from_native(native)

    def platform(self, device: Device) -> str:
        return "cpu" if device is CPU else "virtual"

    def gpus(self) -> list[jax.Device]:
        return self.cpus()[1 : self._number + 1]


_add_one = jax.jit(lambda x: x + 1)


class _DefaultDevice:
    """``jax.default_device`` as a block that ends only if no inner one is in force.

    Each such block restores the device that it found at its begin.
    """

    def __init__(self, native: jax.Device) -> None:
        self._native = native
        self._scope: Any = jax.default_device(native)

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, *error: object) -> None:
        if jax.config.jax_default_device is not self._native:
            raise RuntimeError("jax.default_device is in force")
        self._scope.__exit__(*error)


def _queue_work(native: jax.Device) -> list[Any]:
    """Return the result of a small computation that is queued now, and all live arrays."""
    with jax.ensure_compile_time_eval():  # also while JAX traces
        last = _add_one(jax.device_put(np.zeros((), np.int32), native))
    # A deleted array still has its sharding.
    held = [x for x in jax.live_arrays(native.platform) if native in x.sharding.device_set]
    return [last, *held]


def _wait(xs: list[Any]) -> None:
    """Return when the arrays are computed, have failed, or are deleted."""
    # One call for all of them: a call for each takes three times as long.
    with suppress(RuntimeError):
        jax.block_until_ready(xs)
        return
    for x in xs:
        with suppress(RuntimeError):  # the first reading of the array raises the error
            x.block_until_ready()


def parts_of(x: jax.Array) -> list[jax.Array]:
    """Return the part of an array on each device of this process."""
    # The only shard of an array on one device refers back to it, in a cycle.
    is_whole = len(x.sharding.device_set) == 1
    return [x] if is_whole else [shard.data for shard in x.addressable_shards]


def _bytes_held(native: jax.Device) -> int:
    """Return the bytes of this process's arrays on a device; shared memory counts once."""
    held: dict[int, int] = {}
    for x in jax.live_arrays(native.platform):
        # A deleted array, or one with a failed computation, has no memory.
        with suppress(RuntimeError):
            for part in parts_of(x):
                if part.size and native in part.devices():
                    address = part.unsafe_buffer_pointer()
                    held[address] = max(held.get(address, 0), part.nbytes)
    return sum(held.values())
