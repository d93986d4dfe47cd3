"""Devices: TensorFlow's logical devices, their names, their number, and how they start.

TensorFlow initialises all of its devices together, with the first operation. This module sets
virtual GPUs and the memory policy before that, and counts GPUs without starting TensorFlow.
Virtual GPUs are additional logical CPUs, which TensorFlow keeps apart as it does GPUs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf

# Private: no public function switches off the wrapping of operations, for virtual GPUs.
from tensorflow.python import pywrap_tfe

# Private, but nothing else tells whether TensorFlow has started, and which scope is in force.
from tensorflow.python.eager.context import async_wait, context

from d2ldev import Device, DeviceInitializationWarning, DeviceUnavailableError, gpu
from d2ldev.framework import (
    CPU,
    Devices,
    Memory,
    check_room,
    memory_of_the_machine,
    nvml,
    user_has_chosen,
    warn,
    warn_too_late,
)

OF_THE_HOST = frozenset({tf.string, tf.resource, tf.variant})
"""The dtypes that only the CPU can hold: strings, and handles of tables and the like."""

_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_NAME = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/(?:device:)?(cpu|gpu):([0-9]{1,9})",
    re.IGNORECASE | re.ASCII,
)


class DeviceName(str):
    """The name of a device, ``'/GPU:0'``: an argument of ``tf.device``, and a context manager.

    The object that ``tf.device(name)`` returns can be neither compared nor printed. For a missing
    device it computes on the CPU. A ``DeviceName`` raises ``DeviceUnavailableError`` instead.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        there = [each.name for each in own_devices()]
        if not any(name.endswith(self.removeprefix("/")) for name in there):
            raise DeviceUnavailableError(
                f"compute on {self}",
                f"TensorFlow has {', '.join(there)} here",
                "use one that exists: with try_gpu():",
                there,
            )
        scope = tf.device(str(self))
        scope.__enter__()
        vars(_entered).setdefault("scopes", []).append(scope)

    def __exit__(self, *error: object) -> None:
        _entered.scopes.pop().__exit__(*error)


_entered = threading.local()
"""For each thread, the scopes that it has entered through a ``DeviceName``, innermost last."""


class TensorFlowDevices(Devices):
    """The devices of this process; a native device is an argument of ``tf.device``: ``'/GPU:0'``.

    Attributes:
        virtual_gpus: the number of virtual GPUs; 0 hides all GPUs; None uses the hardware's.
        places: the device for each name that TensorFlow gave to a tensor, a variable or a device.
        patience: how many seconds a device may take to answer that it is idle.

    Raises:
        DeviceUnavailableError: if TensorFlow has started with other devices.
    """

    patience = 0.05

    def __init__(self, virtual_gpus: int | None) -> None:
        self.virtual_gpus = virtual_gpus
        self.places: dict[Any, Device] = {}
        self._names: dict[Device, DeviceName] = {}
        if virtual_gpus is not None:
            _configure(virtual_gpus)

    def count(self) -> int:
        if self.virtual_gpus is not None:
            return self.virtual_gpus
        number = self._count()
        if not number and tf.test.is_built_with_cuda():
            nvml.warn_without_driver("tensorflow")
        return number

    def _count(self) -> int:
        if has_started():
            return len(own_devices("GPU"))
        is_first = tf.test.is_built_with_cuda() and context()._physical_devices is None
        cards = nvml.visible_cards() if is_first else None
        if cards is not None:
            return len(cards)
        number = sum(
            len(tf.config.get_logical_device_configuration(card) or [card])
            for card in tf.config.get_visible_devices("GPU")
        )
        if is_first and number:
            nvml.warn_of_context("tensorflow")
        return number

    def native(self, device: Device) -> DeviceName:
        if device in self._names:
            return self._names[device]
        if not self._names:
            self._start()
        if self.virtual_gpus is not None:
            name = f"/CPU:{0 if device is CPU else device.index + 1}"
        elif device is CPU:
            name = "/CPU:0"
        elif device.index < self.count():
            name = f"/GPU:{device.index}"
        else:
            raise DeviceUnavailableError(
                f"use {device}",
                "the driver shows it, but TensorFlow has not made a device of it",
                "pip install 'tensorflow[and-cuda]'; TensorFlow's log names what is missing",
                [device],
            )
        self.places[name] = device
        self._names[device] = DeviceName(name)
        return self._names[device]

    def native_of_missing(self, device: Device) -> DeviceName | None:
        self.native(CPU)  # to enter the name starts TensorFlow
        return None if self.virtual_gpus else DeviceName(f"/GPU:{device.index}")

    def from_native(self, native: Any) -> Device | None:
        if isinstance(native, tf.config.LogicalDevice):
            native = native.name
        is_name = isinstance(native, str)
        match = _NAME.fullmatch(native.removeprefix(own_task())) if is_name else None
        if match is None:
            return None
        kind, index = match[1].lower(), int(match[2])
        if kind == "gpu":
            return gpu(index)
        return gpu(index - 1) if self.virtual_gpus and index else CPU

    def platform(self, device: Device) -> str:
        if device is CPU:
            return "cpu"
        if self.virtual_gpus:
            return "virtual"
        if tf.test.is_built_with_cuda():
            return "cuda"
        return "rocm" if tf.test.is_built_with_rocm() else "metal"

    def default(self) -> str:
        with tf.init_scope():  # also in a function that is being traced
            name: str = tf.zeros(()).backing_device
            return name

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        return DefaultDevice(self.native(device))

    def synchronize(self, device: Device) -> None:
        if has_started():
            with tf.init_scope(), tf.device(self.native(device)):
                tf.raw_ops.SyncDevice()
            # After ``SyncDevice``, which ``set_synchronous_execution(False)`` queues.
            async_wait()

    def is_idle(self, device: Device) -> bool:
        if not has_started():
            return True
        # TensorFlow can only be asked by waiting, so a thread waits for a short time. This holds on
        # the CPU, too: asking TensorFlow whether it queues operations there waits for the queue.
        waiting = threading.Thread(target=self.synchronize, args=(device,), daemon=True)
        waiting.start()
        waiting.join(self.patience)
        return not waiting.is_alive()

    # TensorFlow can only switch TF32 on and off. Its kernels read the switch at each run, also in a
    # ``tf.function`` that was traced before. Only XLA (``jit_compile=True``) reads it to compile.

    def matmul_precision(self) -> str:
        return "high" if tf.config.experimental.tensor_float_32_execution_enabled() else "highest"

    def set_matmul_precision(self, precision: str) -> Callable[[], None]:
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(precision != "highest")
        return partial(tf.config.experimental.enable_tensor_float_32_execution, before)

    def memory(self, device: Device) -> Memory:
        if self.virtual_gpus:
            return Memory(None, None, None)
        total = nvml.memory_of(device.index) if tf.test.is_built_with_cuda() else None
        if not has_started():  # the next call would start it
            return Memory(0, 0, total)
        held = tf.config.experimental.get_memory_info(f"GPU:{device.index}")
        return Memory(int(held["current"]), int(held["peak"]), total)

    def check_room(self, nbytes: int, device: Device) -> None:
        """Refuse a size above all memory of a device: TensorFlow would wait for 10 seconds.

        Raises:
            MemoryError: if ``nbytes`` is larger.
        """
        is_card = device is not CPU and self.virtual_gpus is None
        has_cuda = tf.test.is_built_with_cuda()
        card = nvml.memory_of(device.index) if is_card and has_cuda else None
        check_room(nbytes, card if is_card else memory_of_the_machine())

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))

    def _start(self) -> None:
        """Let TensorFlow initialise its devices, as it would with the first operation."""
        expected = self.count()
        if self.virtual_gpus is None:
            let_memory_grow()
        tf.config.list_logical_devices()
        if self.virtual_gpus:
            _run_operations_by_themselves()
        if self.count() < expected:
            warn(
                f"tensorflow found {expected} GPUs and can use {self.count()}: its log says why "
                "(a missing library, most often). fix: pip install 'tensorflow[and-cuda]'",
                DeviceInitializationWarning,
            )


def _run_operations_by_themselves() -> None:
    """Let TensorFlow run each eager operation directly, and not wrap it in a function.

    A wrapping function would receive operands from another device under a name that all threads
    share. The shape for a virtual GPU is an example. Threads would take each other's operands. As a
    consequence TensorFlow's own int32 constants are on a virtual GPU. On a real GPU they stay
    in the host's memory. https://github.com/tensorflow/tensorflow/issues/62523
    """
    pywrap_tfe.TFE_ContextSetRunEagerOpAsFunction(context()._handle, False)


def has_started() -> bool:
    """Return whether TensorFlow has initialised its devices."""
    return bool(context()._initialized)


def _find_server() -> Any:
    """Return the description of the processes that the engine connects; None before it starts."""
    return context()._collective_ops_server_def


def own_task() -> str:
    """Return the prefix of the names of this process's devices, among several processes."""
    server = _find_server()
    return f"/job:{server.job_name}/replica:0/task:{server.task_index}" if server else ""


def tasks_of_engine() -> int:
    """Return the number of processes that TensorFlow's engine connects; 0 before it starts."""
    server = _find_server()
    return sum(len(job.tasks) for job in server.cluster.job) if server else 0


def own_devices(kind: str | None = None) -> list[Any]:
    """Return TensorFlow's devices of this process, without those of other processes."""
    devices = tf.config.list_logical_devices(kind)
    return [each for each in devices if each.name.startswith(own_task())]


def wait_for_peers(size: int, timeout: float) -> None:
    """Set the number of silent seconds after which TensorFlow takes a process for lost.

    Call it before making a ``MultiWorkerMirroredStrategy``, which has no argument for it.
    """
    first = "/job:worker/replica:0/task:0"
    milliseconds = int(1000 * timeout)
    context().configure_coordination_service(
        "standalone", first, heartbeat_timeout_in_ms=milliseconds
    )
    context().coordination_service.coordinated_job_list.add(name="worker", num_tasks=size)


def place_of(x: Any) -> str:
    """Return the device of a tensor's bytes as ``tf.device`` takes it; empty without bytes.

    In one of several processes the CPU has two names, and ``tf.device`` knows one of them.
    """
    name: str = getattr(x, "backing_device", "")
    return name and f"/{name.rpartition('/')[2]}"


def _configure(virtual: int) -> None:
    """Configure a process with one CPU and virtual GPUs alone."""
    cpus = tf.config.list_physical_devices("CPU")
    try:
        # Otherwise operations would run on a real GPU, which d2ldev hides.
        tf.config.set_visible_devices([], "GPU")
        if virtual:
            made = [tf.config.LogicalDeviceConfiguration() for _ in range(virtual + 1)]
            tf.config.set_logical_device_configuration(cpus[0], made)
        late = has_started() and 0 < virtual != len(own_devices("CPU")) - 1
    except RuntimeError:  # TensorFlow has started
        late = True
    if late:
        raise DeviceUnavailableError(
            f"make {virtual} virtual GPUs",
            "TensorFlow has made its devices already, once in a process, with a tensor or a model",
            "`from d2ldev import tensorflow` above TensorFlow's first tensor, with "
            f"D2LDEV_VIRTUAL_GPUS={virtual} or below `d2ldev.virtual_gpus({virtual})`; "
            "in a notebook restart the kernel first",
            [device.name for device in own_devices()],
        )


def let_memory_grow() -> None:
    """Follow the memory policy: let TensorFlow take memory as it needs it, not all at once."""
    if user_has_chosen([_GROWTH]):
        return
    for card in tf.config.get_visible_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(card, True)
        except ValueError:  # the user has split the GPU, with a limit for each part
            continue
        except RuntimeError:  # TensorFlow has started
            warn_too_late("TensorFlow", f"{_GROWTH}=true")
            return


# TensorFlow's parsed device of a name, always the same object. ``tf.device`` makes a new one.
default_specification = lru_cache(1024)(tf.DeviceSpec.from_string)


class DefaultDevice:
    """A scope that says where tensors are made.

    It differs from ``tf.device`` only under ``strict()``. An operation with operands on another
    device runs there. A ``tf.device`` is the user's decision on where operations run.

    Args:
        native: an argument of ``tf.device``.
    """

    def __init__(self, native: str) -> None:
        self._scope = tf.device(native)
        self._theirs: Any = None  # the parsed device that ``tf.device`` has set

    def __enter__(self) -> None:
        self._scope.__enter__()
        if tf.executing_eagerly():
            current = context()
            self._theirs = current.device_spec
            current._set_device(current.device_name, default_specification(current.device_name))

    def __exit__(self, *error: object) -> None:
        current, theirs = context(), self._theirs
        if theirs and current.device_spec is default_specification(theirs.to_string()):
            current._set_device(current.device_name, theirs)
        self._scope.__exit__(*error)


def is_default_only(specification: Any) -> bool:
    """Return whether the innermost scope is a ``DefaultDevice``, by TensorFlow's parsed device."""
    return specification is default_specification(specification.to_string())
