"""The GPUs that JAX has: CUDA's or ROCm's.

JAX initialises all its devices at once, and that makes a context on each GPU. So nothing here
initialises JAX before somebody wants a device of it: until then CUDA's GPUs are counted through the
driver.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import util
from importlib.metadata import entry_points
from pathlib import Path

import jax
from jax._src.xla_bridge import backends_are_initialized

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import DeviceInitializationWarning, DeviceUnavailableError
from d2ldev_jax import nvml

_PLATFORMS = ("cuda", "rocm")
# Who may have loaded CUDA's libraries before JAX.
_OTHERS = ("torch", "tensorflow", "mxnet")
# The device file without which ROCm has no GPU.
_ROCM_DRIVER = Path("/dev/kfd")


def is_initialized() -> bool:
    """Whether JAX has its devices already; there is no public way to ask without making it so."""
    return bool(backends_are_initialized())


class Accelerator:
    """The hardware's GPUs, as far as they are this process's."""

    def __init__(self) -> None:
        self._cpus: list[jax.Device] = []
        self._gpus: list[jax.Device] = []
        self._started = False
        # Why hardware that is there cannot be used; empty if nothing is wrong.
        self._failure = ""

    def count(self) -> int:
        """How many there are, with a warning if there could be more."""
        # ROCm's driver has nothing that counts as NVML does: JAX has to be asked.
        if not self._started and not is_initialized() and not self._may_use("rocm"):
            number = self._counted()
        else:
            number = len(self.gpus())
        if self._failure:
            warnings.warn(self._failure, DeviceInitializationWarning, stacklevel=4)
        return number

    def may_be_used(self) -> bool:
        """Whether JAX will make a context on a GPU when it is initialised."""
        return bool(self._counted()) or self._may_use("rocm")

    def gpu(self, index: int) -> jax.Device:
        """One of the GPUs that were counted; initialises JAX.

        Raises:
            DeviceUnavailableError: if it turns out that it cannot be used.
        """
        gpus = self.gpus()
        if index < len(gpus):
            return gpus[index]
        raise DeviceUnavailableError(
            f"use gpu:{index}",
            self._failure or f"the driver showed it, and JAX has {len(gpus)} GPUs",
            f"device = backend.try_gpu({index}), which knows it now",
            [CPU, *map(gpu, range(len(gpus)))],
        )

    def cpus(self) -> list[jax.Device]:
        """JAX's CPU devices, of which the first is the CPU; initialises JAX.

        Raises:
            DeviceUnavailableError: if JAX was told to have none, or cannot be initialised.
        """
        self.start()
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

    def gpus(self) -> list[jax.Device]:
        """The GPUs of this process; initialises JAX."""
        self.start()
        return self._gpus

    def places(self) -> dict[jax.Device, Device]:
        """Which device each of JAX's stands for."""
        found: dict[jax.Device, Device] = {}
        with suppress(DeviceUnavailableError):  # JAX_PLATFORMS=cuda leaves no CPU
            found.update(dict.fromkeys(self.cpus(), CPU))
        return found | {native: gpu(index) for index, native in enumerate(self.gpus())}

    def platform(self, index: int) -> str:
        """``'cuda'`` or ``'rocm'``."""
        version = str(self.gpus()[index].client.platform_version)
        return "rocm" if "rocm" in version.lower() else "cuda"

    def start(self) -> None:
        """Initialise JAX, and find out what it has."""
        if self._started:
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
            problem = f"NVIDIA's driver shows {number} GPUs, and JAX can use none"
            self._failure = f"{problem}: {reasons[0]}. fix: {fix}"
        self._started = True

    def _counted(self) -> int:
        """How many GPUs of CUDA's JAX will find, as far as the driver can say."""
        try:
            number = nvml.count_visible()
        except nvml.DriverError as error:
            self._failure = str(error) if self._may_use("cuda") else ""
            return 0
        if not number or not self._may_use("cuda"):
            return 0
        visible = jax.config.values.get("jax_cuda_visible_devices", "all")
        return number if visible == "all" else min(number, len(visible.split(",")))

    def _may_use(self, platform: str) -> bool:
        """Whether JAX is installed for a platform, and not told to leave it alone."""
        if platform == "rocm" and not _ROCM_DRIVER.exists():
            return False
        allowed = jax.config.jax_platforms
        if allowed and not {platform, "gpu"} & set(allowed.split(",")):
            return False
        return any(platform in name for name in _plugins())


def _local_devices(platform: str | None, reasons: list[str]) -> list[jax.Device]:
    """The devices of a platform, or none and the reason."""
    try:
        devices: list[jax.Device] = jax.local_devices(backend=platform)
    except RuntimeError as error:
        reasons.append(str(error))
        return []
    return devices


def _plugins() -> Iterator[str]:
    """The modules of JAX's plugins that are installed, which JAX looks up in these two ways."""
    with suppress(ImportError, ValueError):
        spec = util.find_spec("jax_plugins")
        if spec is not None:
            for module in pkgutil.iter_modules(spec.submodule_search_locations):
                yield module.name
    yield from (point.value for point in entry_points(group="jax_plugins"))
