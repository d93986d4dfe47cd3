"""d2ldev: one device API for PyTorch, JAX, TensorFlow and MXNet.

>>> from d2ldev import backend
>>> X = backend.ones((2, 3), device=backend.try_gpu())
>>> backend.to(X, backend.device_of(X)) is X
True

Importing this package imports no framework and touches no GPU.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from d2ldev import device as _device
from d2ldev.device import Device, cpu, gpu
from d2ldev.errors import (
    BackendFallbackWarning,
    BackendNotInstalledError,
    CheckpointError,
    D2LDevError,
    DeviceInitializationWarning,
    DeviceMismatchError,
    DeviceUnavailableError,
    InvalidDeviceError,
    MemoryPolicyWarning,
    OutOfDeviceMemoryError,
    PeerLostError,
    ScopeError,
    UnknownBackendError,
    UnsupportedValueError,
)
from d2ldev.registry import importing as _importing
from d2ldev.registry.discovery import available_backends

if TYPE_CHECKING:
    from d2ldev.active import backend, backend_of, get_backend, set_backend, use_backend
    from d2ldev.backend_class import Backend
    from d2ldev.framework import Memory
    from d2ldev.nesting.kinds import register_container
    from d2ldev.registry.selection import virtual_gpus
    from d2ldev.training.callbacks import Schedule
    from d2ldev.training.data import ArrayLoader
    from d2ldev.training.log import DeviceLog
    from d2ldev.training.timer import Timer
    from d2ldev.training.trainer import Trainer

    jax: Backend
    mxnet: Backend
    reference: Backend
    tensorflow: Backend
    torch: Backend

__version__ = "0.1.0"

# A program that runs in a checkout finds this package there, before an installed wheel's. The
# packages that belong to it have to be the checkout's, too.
_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isdir(os.path.join(_root, "backends", "d2ldev_reference")):
    _folders = (os.path.join(_root, name) for name in ("backends", "conformance"))
    sys.path[:0] = [folder for folder in _folders if folder not in sys.path]

_importing.install()

# Imported from these modules when first asked for: a library that imports this package and does not
# use it waits for less, and most programs do not train.
_LAZY = {
    "ArrayLoader": "training.data",
    "Backend": "backend_class",
    "DeviceLog": "training.log",
    "Memory": "framework",
    "Schedule": "training.callbacks",
    "Timer": "training.timer",
    "Trainer": "training.trainer",
    "backend": "active",
    "backend_of": "active",
    "get_backend": "active",
    "register_container": "nesting.kinds",
    "set_backend": "active",
    "use_backend": "active",
    "virtual_gpus": "registry.selection",
}

__all__ = [
    "ArrayLoader",
    "Backend",
    "BackendFallbackWarning",
    "BackendNotInstalledError",
    "CheckpointError",
    "D2LDevError",
    "Device",
    "DeviceInitializationWarning",
    "DeviceLog",
    "DeviceMismatchError",
    "DeviceUnavailableError",
    "InvalidDeviceError",
    "Memory",
    "MemoryPolicyWarning",
    "OutOfDeviceMemoryError",
    "PeerLostError",
    "Schedule",
    "ScopeError",
    "Timer",
    "Trainer",
    "UnknownBackendError",
    "UnsupportedValueError",
    "available_backends",
    "backend",
    "backend_of",
    "cpu",
    "get_backend",
    "gpu",
    "register_container",
    "set_backend",
    "use_backend",
    "virtual_gpus",
]


def __getattr__(name: str) -> Any:
    """Return a name or module that is imported when it is first asked for, such as ``backend``.

    Or return any known backend by its name: ``from d2ldev import torch as d2l``.
    """
    import importlib.util

    if name in _LAZY:
        value = globals()[name] = getattr(importlib.import_module(f"d2ldev.{_LAZY[name]}"), name)
        return value
    if name.isidentifier() and not name.startswith("_"):
        if importlib.util.find_spec(f"d2ldev.{name}") is not None:
            return importlib.import_module(f"d2ldev.{name}")
        from d2ldev.registry.discovery import ALIASES, known_backends

        if name in known_backends() or name in ALIASES:
            return __getattr__("get_backend")(name)
    raise AttributeError(f"module 'd2ldev' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that are there, and those that are imported when they are asked for."""
    return sorted({*globals(), *__all__})


class _ActiveBackend:
    """The active backend, for ``with device:`` in a program that has asked for no backend yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(__getattr__("backend"), name)


_device.use(_ActiveBackend())
