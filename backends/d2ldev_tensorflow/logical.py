"""TensorFlow's logical devices: what they are called, how many there are, how they start.

TensorFlow initialises all of its devices together, with the first operation. What has to be said
before (virtual GPUs, the memory policy) is said here, and so is how many GPUs there are before
anything has started.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import tensorflow as tf

# Private, and the only place that says whether TensorFlow has started.
from tensorflow.python.eager.context import context

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import DeviceInitializationWarning, DeviceUnavailableError
from d2ldev.memory_policy import user_has_chosen, warn_too_late
from d2ldev_tensorflow import nvml

_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_NAME = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/(?:device:)?(cpu|gpu):([0-9]{1,9})",
    re.IGNORECASE | re.ASCII,
)


class LogicalDevices:
    """The devices of this process.

    Args:
        virtual: how many virtual GPUs there are, 0 for no GPU at all, None for the hardware's.
            They are further logical CPUs, which TensorFlow keeps apart as it does GPUs.

    Raises:
        DeviceUnavailableError: if TensorFlow has started with other devices.
    """

    def __init__(self, virtual: int | None) -> None:
        self.virtual = virtual
        # The device of every name that TensorFlow gave to a tensor, a variable or a device.
        self.places: dict[Any, Device] = {}
        self._started = False
        if virtual is not None:
            _configure(virtual)

    def count(self) -> int:
        """How many GPUs there are, without initialising CUDA where TensorFlow has not."""
        if self.virtual is not None:
            return self.virtual
        if has_started():
            return len(tf.config.list_logical_devices("GPU"))
        if tf.test.is_built_with_cuda() and context()._physical_devices is None:
            cards = nvml.visible_cards()
            if cards is not None:
                return len(cards)
        return sum(
            len(tf.config.get_logical_device_configuration(card) or [card])
            for card in tf.config.get_visible_devices("GPU")
        )

    def name(self, device: Device) -> str:
        """The string that ``tf.device`` takes, for a device that TensorFlow really has.

        Raises:
            DeviceUnavailableError: if the machine has a GPU that TensorFlow cannot use.
        """
        if not self._started:
            self._start()
        if self.virtual is not None:
            name = f"/CPU:{0 if device is CPU else device.index + 1}"
        elif device is CPU:
            name = "/CPU:0"
        elif device.index < self.count():
            name = f"/GPU:{device.index}"
        else:
            raise DeviceUnavailableError(
                f"use {device}",
                "the driver shows it, but TensorFlow has not made a device of it",
                "pip install 'd2ldev[tensorflow-cuda]'; TensorFlow's log says what it misses",
                [device],
            )
        self.places[name] = device
        return name

    def place(self, name: Any) -> Device | None:
        """The device that a string or one of TensorFlow's device objects means, else None."""
        if isinstance(name, tf.config.LogicalDevice):
            name = name.name
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            return None
        kind, index = match[1].lower(), int(match[2])
        if kind == "gpu":
            return gpu(index)
        return gpu(index - 1) if self.virtual and index else CPU

    def _start(self) -> None:
        """Let TensorFlow initialise its devices, as it would with the first operation."""
        expected = self.count()
        if self.virtual is None:
            _let_memory_grow()
        tf.config.list_logical_devices()
        self._started = True
        if self.count() < expected:
            warnings.warn(
                f"tensorflow found {expected} GPUs and can use {self.count()}: its log says why "
                "(a missing library, most often). fix: pip install 'd2ldev[tensorflow-cuda]'",
                DeviceInitializationWarning,
                stacklevel=5,
            )


def has_started() -> bool:
    """Whether TensorFlow has initialised its devices."""
    return bool(context()._initialized)


def _configure(virtual: int) -> None:
    """Make a process of one CPU, virtual GPUs, and nothing else."""
    cpus = tf.config.list_physical_devices("CPU")
    try:
        # Otherwise operations would run on a real one that is not there for d2ldev.
        tf.config.set_visible_devices([], "GPU")
        if virtual:
            made = [tf.config.LogicalDeviceConfiguration() for _ in range(virtual + 1)]
            tf.config.set_logical_device_configuration(cpus[0], made)
        late = has_started() and 0 < virtual != len(tf.config.list_logical_devices("CPU")) - 1
    except RuntimeError:  # so says TensorFlow once it has started
        late = True
    if late:
        raise DeviceUnavailableError(
            f"make {virtual} virtual GPUs",
            "TensorFlow has initialised its devices already, which it does once in a process",
            f"set D2LDEV_VIRTUAL_GPUS={virtual} and use d2ldev's backend before the first "
            "operation of TensorFlow",
            [device.name for device in tf.config.list_logical_devices()],
        )


def _let_memory_grow() -> None:
    """The memory policy: take what is needed, not all of it."""
    if user_has_chosen([_GROWTH]):
        return
    growth = tf.config.experimental
    for card in tf.config.get_visible_devices("GPU"):
        try:
            growth.set_memory_growth(card, True)
        except ValueError:  # the user has divided it, with a limit for each part
            continue
        except RuntimeError:  # TensorFlow has started
            warn_too_late("TensorFlow", f"{_GROWTH}=true")
            return
