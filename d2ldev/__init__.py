"""d2ldev: one device API for PyTorch, JAX, TensorFlow and MXNet.

>>> from d2ldev import backend
>>> X = backend.ones((2, 3), device=backend.try_gpu())
>>> backend.to(X, backend.device_of(X)) is X
True

Importing this package imports no framework, touches no GPU and changes nothing in the interpreter.
"""

from __future__ import annotations

import os as _os

from d2ldev.errors import (
    BackendFallbackWarning,
    BackendNotInstalledError,
    CheckpointError,
    D2LDevError,
    D2LDevWarning,
    DeviceInitializationWarning,
    DeviceMismatchError,
    DeviceUnavailableError,
    InvalidDeviceError,
    MemoryPolicyWarning,
    OutOfDeviceMemoryError,
    PackageNotInstalledError,
    PeerLostError,
    ScopeError,
    UnknownBackendError,
    UnsupportedValueError,
)
from d2ldev.locks import Lock as _Lock
from d2ldev.registry.discovery import available_backends

# Not from ``typing``: its import takes as long as all the rest of ``import d2ldev``. Not a literal:
# jedi, which editors complete with, skips a block that it knows to be off.
TYPE_CHECKING = not __name__
if TYPE_CHECKING:
    from typing import Any

    import array_api_strict as _array_api_strict
    import jax as _jax
    import mxnet as _mxnet
    import tensorflow as _tensorflow
    import torch as _torch

    from d2ldev._backend import Backend
    from d2ldev.active import backend, backend_of, get_backend, set_backend, use_backend
    from d2ldev.contract.training import WeightedLoss
    from d2ldev.device import Device, cpu, gpu
    from d2ldev.leaks.finding import find_leaks
    from d2ldev.nesting.containers import Broadcast
    from d2ldev.nesting.kinds import register_container
    from d2ldev.registry.selection import virtual_gpus
    from d2ldev.training.array_loader import ArrayLoader
    from d2ldev.training.callbacks import EarlyStopping, Schedule
    from d2ldev.training.epoch_metric import EpochMetric
    from d2ldev.training.log import DeviceLog
    from d2ldev.training.loggers import CSVLogger, TensorBoardLogger
    from d2ldev.training.timer import Timer
    from d2ldev.training.trainer import Trainer

    jax: Backend[_jax.Array, _jax.Device]
    mxnet: Backend[_mxnet.np.ndarray, _mxnet.Context]
    reference: Backend[Any, _array_api_strict.Device]
    tensorflow: Backend[_tensorflow.Tensor, str]
    torch: Backend[_torch.Tensor, _torch.device]

__version__ = "0.1.0"

# The first use of one of them imports them all. So a library that imports this package without
# using it waits less.
_CORE = {
    "Backend": "_backend",
    "Broadcast": "nesting.containers",
    "Device": "device",
    "backend": "active",
    "backend_of": "active",
    "cpu": "device",
    "get_backend": "active",
    "gpu": "device",
    "register_container": "nesting.kinds",
    "set_backend": "active",
    "use_backend": "active",
    "virtual_gpus": "registry.selection",
}
# Imported each at its first use, because most programs do not train.
_RARE = {
    "ArrayLoader": "training.array_loader",
    "CSVLogger": "training.loggers",
    "DeviceLog": "training.log",
    "EarlyStopping": "training.callbacks",
    "EpochMetric": "training.epoch_metric",
    "Schedule": "training.callbacks",
    "TensorBoardLogger": "training.loggers",
    "Timer": "training.timer",
    "Trainer": "training.trainer",
    "WeightedLoss": "contract.training",
    "find_leaks": "leaks.finding",
}
# A module that is half imported cannot be imported by a forked child.
_loading = _Lock(patience=30)
_is_loaded = False

__all__ = [  # noqa: RUF022  # in groups
    # the backend
    "Backend",
    "available_backends",
    "backend",
    "backend_of",
    "get_backend",
    "set_backend",
    "use_backend",
    "virtual_gpus",
    # devices and containers
    "Broadcast",
    "Device",
    "cpu",
    "gpu",
    "register_container",
    # training
    "ArrayLoader",
    "CSVLogger",
    "DeviceLog",
    "EarlyStopping",
    "EpochMetric",
    "Schedule",
    "TensorBoardLogger",
    "Timer",
    "Trainer",
    "WeightedLoss",
    # leaks
    "find_leaks",
    # errors
    "BackendNotInstalledError",
    "CheckpointError",
    "D2LDevError",
    "DeviceMismatchError",
    "DeviceUnavailableError",
    "InvalidDeviceError",
    "OutOfDeviceMemoryError",
    "PackageNotInstalledError",
    "PeerLostError",
    "ScopeError",
    "UnknownBackendError",
    "UnsupportedValueError",
    # warnings
    "BackendFallbackWarning",
    "D2LDevWarning",
    "DeviceInitializationWarning",
    "MemoryPolicyWarning",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use; return any known backend by its name.

    >>> from d2ldev import torch as d2l                                # doctest: +SKIP
    """
    if name in _RARE:
        _import(name, _RARE[name])
        return globals()[name]
    if not name.startswith("_"):
        _load()
        if name in globals():
            return globals()[name]
        from d2ldev.active import get_backend
        from d2ldev.registry.discovery import ALIASES, find_backends

        if name in find_backends() or name in ALIASES:
            return get_backend(name)
    raise AttributeError(f"module 'd2ldev' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, without the backends: completion reads each, which imports it."""
    return sorted(__all__)


def _load() -> None:
    """Import the core and make its names this module's.

    Its modules write ``import d2ldev.settings as settings``: ``from d2ldev import settings`` would
    ask for a name here, in the middle of this.
    """
    global _is_loaded
    if _is_loaded:
        return
    with _loading:
        for name, module in _CORE.items():
            _import(name, module)
        from d2ldev import active, device

        device.use(active.backend)
        _is_loaded = True


def _import(name: str, module: str) -> None:
    import importlib

    with _loading:
        value = getattr(importlib.import_module(f"d2ldev.{module}"), name)
        globals().setdefault(name, value)  # a test may have replaced it


# The core adds what the frameworks need to the environment, before the program uses one.
if _os.environ.get("D2LDEV_VIRTUAL_GPUS"):
    _load()
