"""Devices: JAX's on the CPU, CUDA, ROCm and TPUs; virtual GPUs are further CPU devices of JAX.

JAX initialises all its devices at once, which makes a context on each GPU. So nothing here
initialises JAX before somebody wants a device; until then CUDA's GPUs are counted by the driver:
https://github.com/jax-ml/jax/issues/18852.

JAX computes asynchronously, on the CPU as well, and its queues cannot be asked. A GPU works in
order, and so does the CPU for one thread: when a small computation that is queued now is done,
everything before it is done. Work of other threads on the CPU is known by its results, as long as
somebody holds them.
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
from jax._src.xla_bridge import backends_are_initialized

from d2ldev.device import CPU, Device, gpu, gpus_in_words
from d2ldev.errors import DeviceUnavailableError
from d2ldev.framework import Devices, Memory
from d2ldev.operations import nvml
from d2ldev.operations.devices import (
    check_room,
    memory_of_the_machine,
    user_has_chosen,
    warn_too_late,
)
from d2ldev_jax.precision import matmul_precision, set_matmul_precision

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
_LOGGER = logging.getLogger("jax._src.xla_bridge")
# The text of a CPU device, in newer and in older releases.
_CPU_IN_WORDS = re.compile(r"(?:cpu:|TFRT_CPU_)([0-9]{1,9})", re.ASCII)
_XLA_CPU_COUNT = re.compile(r"--xla_force_host_platform_device_count=([0-9]+)")

# The seconds that a small computation may take on a device that has nothing else to do.
_PATIENCE = 0.002
# The bytes from which on an array is waited for, however much memory is free: the rest of a wait is
# little against its time. From so many on JAX reads the host's memory itself, instead of a copy in
# pinned memory: ShouldStageHostToDeviceTransfers in xla/pjrt/gpu and xla/pjrt/se.
LONG = 2**30


def is_initialized() -> bool:
    """Return whether JAX has its devices already; the public functions would initialise it."""
    return bool(backends_are_initialized())


class JaxDevices(Devices):
    """The base of the rooms for real and for virtual GPUs."""

    @abstractmethod
    def gpus(self) -> list[jax.Device]:
        """Return the GPUs of this process; initialises JAX."""

    def find_visible_gpus(self, local_rank: int) -> list[int] | None:
        """Return the numbers of the GPUs that one of several processes may use; None is all.

        Args:
            local_rank: the number of the process on this machine.
        """
        return None

    def count_cuda(self) -> int | None:
        """Return how many CUDA GPUs JAX will find, without initialising it; None if unknown."""
        return 0

    def cpus(self) -> list[jax.Device]:
        """Return JAX's CPU devices, of which the first is the CPU; initialises JAX.

        Raises:
            DeviceUnavailableError: if JAX was told to have none, or cannot be initialised.
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
        """JAX's devices and what they stand for, without other processes'; initialises JAX."""
        found: dict[jax.Device, Device] = {}
        with suppress(DeviceUnavailableError):  # JAX_PLATFORMS=cuda leaves no CPU
            found.update(dict.fromkeys(self.cpus(), CPU))
        found.update({each: gpu(index) for index, each in enumerate(self.gpus())})
        return found

    def from_native(self, native: Any) -> Device | None:
        # Before JAX is initialised, nobody has a device whose text it could be.
        if isinstance(native, str) and is_initialized():
            native = next((each for each in self.places if str(each) == native), None)
        return self.places.get(native) if isinstance(native, jax.Device) else None

    def default(self) -> jax.Device:
        self.gpus()  # JAX then goes on without a GPU that fails
        default = jax.config.jax_default_device
        if default is None or isinstance(default, str):  # a platform's name
            default = jax.local_devices(backend=default)[0]
        return default

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

    def find_pinning_client(self) -> Any:
        """Return JAX's client of the GPUs, if it can map memory of the host for them; else None.

        JAX can since 0.10.2: https://github.com/jax-ml/jax/blob/main/jaxlib/py_client.cc.
        """
        clients = [native.client for native in self.gpus() if native.platform != "cpu"]
        return next((client for client in clients if hasattr(client, "dma_map")), None)

    def is_large(self, nbytes: int, native: jax.Device) -> bool:
        """Return whether so many bytes are much of the free memory of a device.

        An array of them has to be waited for: JAX returns before it knows whether there is room.

        Args:
            nbytes: the bytes that are wanted.
            native: where.

        Raises:
            MemoryError: if the device has less memory than that, or less that is free.
        """
        stats = native.memory_stats() or {}
        total = stats.get("bytes_limit")
        if total is None and native.platform == "cpu":
            total = memory_of_the_machine()
        if total is None:  # with XLA_PYTHON_CLIENT_ALLOCATOR=platform
            return True
        free = total - stats.get("bytes_in_use", 0)
        # An allocator with a pool of its own never takes more than its limit. CUDA's gives memory
        # back at its limit, and may take more.
        if nbytes > free and "pool_bytes" in stats:
            _wait(_queue_work(native))  # which may hold what nobody else does
            free = total - (native.memory_stats() or stats)["bytes_in_use"]
            total = min(total, free)
        check_room(nbytes, total)
        return nbytes >= LONG or 4 * nbytes > free

    def is_out_of_memory(self, error: Exception) -> bool:
        # JAX has one exception for all errors of XLA, which have no code that can be relied on. The
        # last words are about sizes that no address reaches.
        words = ("RESOURCE_EXHAUSTED", "Out of memory", "overflow in static extent")
        if isinstance(error, RuntimeError) and any(text in str(error) for text in words):
            return True
        return super().is_out_of_memory(error)


class HardwareDevices(JaxDevices):
    """The CPU, and the GPUs of the machine as far as they are this process's."""

    def __init__(self) -> None:
        self._gpus: list[jax.Device] | None = None
        # Why hardware cannot be used, and the fix.
        self._failure: tuple[str, str] | None = None

    def count(self) -> int:
        # Without a context neither ROCm nor TPUs can be counted, as NVML does: JAX has to be asked.
        is_asked = is_initialized() or self._may_use("rocm") or self._may_use("tpu")
        if not is_asked:
            self._let_memory_grow()  # who has counted the GPUs may go on without d2ldev
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
                f"backend.try_gpu({device.index}), which knows it now",
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
        # By the number that CUDA gives it here: JAX may use some of the visible GPUs only.
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
        except RuntimeError as error:  # a GPU fails; at the next call JAX goes on without
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
        """Keep JAX from logging how its plugin for CUDA fails without a driver: ``count`` says it.

        https://github.com/jax-ml/jax/blob/main/jax/_src/xla_bridge.py
        """
        before = _LOGGER.disabled
        _LOGGER.disabled = before or (self._may_use("cuda") and not nvml.has_driver())
        try:
            yield
        finally:
            _LOGGER.disabled = before

    def find_visible_gpus(self, local_rank: int) -> list[int] | None:
        # A launcher may show each process its own GPU only.
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
        """Return whether JAX is installed for a platform, and not told to leave it alone."""
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
        """The modules of JAX's plugins, found as ``discover_pjrt_plugins`` of JAX finds them.

        The wheels for CUDA and ROCm are in the package of plugins:
        https://github.com/jax-ml/jax/tree/main/jax_plugins. The entry points of all distributions,
        which take milliseconds to read, are asked only where such a plugin could find a driver.
        """
        package = importlib.util.find_spec("jax_plugins")
        folders = None if package is None else package.submodule_search_locations
        found = [module.name for module in pkgutil.iter_modules(folders or [])]
        if nvml.has_driver() or ROCM_DRIVER.exists():
            found += [point.value for point in entry_points(group="jax_plugins")]
        return found

    def _let_memory_grow(self) -> None:
        """Ask JAX not to preallocate, if it will use a GPU and the user has not chosen.

        Not before the GPUs are counted or used: to ask whose tensor something is sets nothing.
        """
        if is_initialized() or user_has_chosen(MEMORY_VARIABLES):
            return
        if self.count_cuda() or self._may_use("rocm"):
            os.environ[_PREALLOCATE] = "false"


class VirtualDevices(JaxDevices):
    """The CPU, and virtual GPUs: CPU devices of JAX, past the first one.

    Arrays that are committed to two of them do not mix, as on GPUs, and each computes by itself.

    Args:
        number: how many virtual GPUs there are.

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
    """``jax.default_device``, which is left only where no other one is in force.

    Each of them puts back what it has found.
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
    """Return the result of a small computation queued now, and all arrays that somebody holds."""
    with jax.ensure_compile_time_eval():  # also while JAX traces
        last = _add_one(jax.device_put(np.zeros((), np.int32), native))
    # The sharding of an array that was deleted meanwhile is still there.
    held = [x for x in jax.live_arrays(native.platform) if native in x.sharding.device_set]
    return [last, *held]


def _wait(xs: list[Any]) -> None:
    """Return when arrays are computed; one that failed or was deleted is done, too."""
    # All of them in one call: one for each takes three times as long.
    with suppress(RuntimeError):
        jax.block_until_ready(xs)
        return
    for x in xs:
        with suppress(RuntimeError):  # reading it raises the error
            x.block_until_ready()


def _bytes_held(native: jax.Device) -> int:
    """Return the bytes that this process's arrays hold on a device; shared memory counts once."""
    held: dict[int, int] = {}
    for x in jax.live_arrays(native.platform):
        # An array that was deleted, or whose computation failed, holds nothing.
        with suppress(RuntimeError):
            # Not its shards: asked for once, they are kept, in a cycle.
            for part in x._arrays:
                if part.size and native in part.devices():
                    address = part.unsafe_buffer_pointer()
                    held[address] = max(held.get(address, 0), part.nbytes)
    return sum(held.values())
