"""Find the existing device that a user names: spellings, scopes, existence.

Source: D2L, section 6.7.1, "Computing Devices".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import d2ldev.settings as settings
from d2ldev.contract import DeviceLike, Framework, Memory
from d2ldev.contract.framework import count_gpus
from d2ldev.dependencies import import_optional
from d2ldev.device import CPU, Device, gpu, gpus_in_words
from d2ldev.errors import (
    D2LDevError,
    DeviceUnavailableError,
    InvalidDeviceError,
    MemoryPolicyWarning,
    OutOfDeviceMemoryError,
    PackageNotInstalledError,
    describe,
    text_of,
    warn,
)
from d2ldev.scopes import trace_as


def all_devices(framework: Framework) -> list[Device]:
    """Return all devices that exist: the CPU first, then the GPUs."""
    return [CPU, *(gpu(i) for i in range(count_gpus(framework)))]


def parse(framework: Framework, spec: DeviceLike) -> Device:
    """Return the ``Device`` for a device in any spelling; see ``Backend.device``."""
    if isinstance(spec, Device):
        return spec
    if isinstance(spec, str):
        # The framework first: to JAX ``cpu:1`` is another device than ``cpu``, a virtual GPU.
        return framework.devices.from_native(spec) or Device.parse(spec)
    device = framework.devices.from_native(spec)
    if device is None:
        raise InvalidDeviceError(
            f"use {describe(spec)} as a device",
            f"it is not a d2ldev.Device, a string, or a CPU or GPU of {framework.name}",
            "device=backend.try_gpu(), or a string: 'cpu', 'gpu:1'",
        )
    return device


def resolve_all(framework: Framework, specs: Sequence[DeviceLike], attempted: str) -> list[Device]:
    """Return existing devices for any spellings, each of them once.

    Args:
        framework: whose devices they are.
        specs: one or more devices.
        attempted: the current operation, for messages.

    Raises:
        InvalidDeviceError: if one is invalid, or appears twice, or if there are none.
        DeviceUnavailableError: if this machine does not have one.
    """
    is_list = isinstance(specs, (list, tuple))
    found = [resolve(framework, spec, attempted) for spec in specs] if is_list else []
    if not found or len(set(found)) < len(found):
        raise InvalidDeviceError(
            f"{attempted} on {describe(specs)}",
            "it must be a list of one or more different devices",
            "devices=[d2ldev.gpu(0), d2ldev.gpu(1)]",
        )
    return found


def resolve(framework: Framework, spec: DeviceLike, attempted: str) -> Device:
    """Return an existing device for any spelling, and remember it.

    Args:
        framework: whose device it is.
        spec: a device in any spelling.
        attempted: the current operation, for messages.

    Raises:
        InvalidDeviceError: if ``spec`` is invalid.
        DeviceUnavailableError: if this machine does not have the device.
    """
    try:
        return framework.state.known_devices[spec]
    except Exception:  # noqa: S110
        pass  # unknown so far, or not hashable
    device = parse(framework, spec)
    count = 0 if device is CPU else count_gpus(framework)
    if device is not CPU and device.index >= count:
        raise DeviceUnavailableError(
            f"{attempted} on {device}",
            f"{framework.name} has {gpus_in_words(count)} here{explain_late_request(device.index)}",
            f"use one that exists: backend.try_gpu({device.index}) is cpu here"
            + offer_virtual_gpus(framework, device.index + 1),
            all_devices(framework),
        )
    native = framework.devices.native(device)
    if spec is device or isinstance(spec, str):
        # Not the framework's own objects: torch.device('cuda') means another GPU after
        # torch.cuda.set_device.
        framework.state.known_devices[spec] = device
        framework.state.known_natives[spec] = native
    return device


def native(framework: Framework, device: Device, attempted: str) -> Any:
    """Return the framework's own object for a device; see ``resolve``."""
    found = framework.state.known_natives.get(device)
    if found is None:
        resolve(framework, device, attempted)
        found = framework.state.known_natives[device]
    return found


def explain_late_request(index: int) -> str:
    """Return a clause for an error if the virtual GPU was asked for too late; empty otherwise."""
    with suppress(InvalidDeviceError):
        number = settings.virtual_gpus()
        if number is not None and index < number:
            return f", and {settings.VIRTUAL_GPUS}={number} came after its first use: set it before"
    return ""


def offer_virtual_gpus(framework: Framework, number: int) -> str:
    """Return a clause for a fix if virtual GPUs could stand for missing ones; empty otherwise."""
    with suppress(InvalidDeviceError):
        can_make_them = number <= framework.max_virtual_gpus and not count_gpus(framework)
        if can_make_them and settings.virtual_gpus() is None:
            return f"; or {settings.VIRTUAL_GPUS}={number} makes virtual GPUs"
    return ""


def _current_traced(framework: Framework) -> Device:
    device = framework.state.scope.in_c
    return CPU if device is None else device


@trace_as(_current_traced)
def current(framework: Framework) -> Device:
    """Return the device of the innermost ``on``, else the CPU."""
    device = framework.state.scope.value.get()
    return CPU if device is None else device


@contextmanager
def on(framework: Framework, device: DeviceLike) -> Iterator[Device]:
    """Make a device the place where tensors are created, for a block; see ``Backend.on``."""
    place = resolve(framework, device, "make tensors")
    attempted = f"end the block of backend.on({str(place)!r})"
    entered = framework.state.contexts.enter(partial(framework.devices.scope, place))
    try:
        entry = framework.state.scope.enter(place)
        try:
            yield place
        finally:
            framework.state.scope.leave(entry)
    finally:
        framework.state.contexts.leave(entered, attempted)


def out_of_memory(
    framework: Framework, error: Exception, attempted: str, native: Any
) -> D2LDevError:
    """Return the error that says which device has too little memory."""
    device = framework.devices.from_native(native)
    return OutOfDeviceMemoryError(
        attempted,
        f"{device} has too little free memory: {text_of(error)}",
        "use a smaller batch, or free tensors; backend.memory(device) shows the memory",
        [device],
    )


def synchronize(framework: Framework, device: DeviceLike | None) -> None:
    """Wait for a device, or for all; see ``Backend.synchronize``."""
    failures = []
    for each in resolve_or_all(framework, device, "synchronize"):
        try:
            framework.devices.synchronize(each)
        except Exception as error:  # the others are waited for, too
            failures.append((each, error))
    for each, failure in failures:
        if isinstance(failure, D2LDevError) or not framework.devices.is_out_of_memory(failure):
            raise failure
        native = framework.devices.native(each)
        raise out_of_memory(framework, failure, f"synchronize {each}", native) from failure


def check_room(nbytes: int, there: int | None) -> None:
    """Compare the bytes that are wanted with those that there are; None is not known.

    For a framework that would wait for memory, or fail after its call.

    Raises:
        MemoryError: if there are fewer.
    """
    if there is not None and nbytes > there:
        raise MemoryError(f"{nbytes} bytes are wanted, and {there} are there")


def host_memory() -> Memory:
    """Return the resident memory of this process, the most it was, and the machine's memory.

    Raises:
        PackageNotInstalledError: elsewhere than on Linux without ``psutil``.
    """
    if sys.platform != "linux":
        psutil = import_optional("psutil", "ask for the memory of the process", extra="memory")
        used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        return Memory(int(used), None, int(total))
    with open("/proc/self/status", encoding="utf-8") as file:
        told = dict(line.split(":", 1) for line in file)
    used, peak = (int(told[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return Memory(used, peak, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def memory_of_the_machine() -> int | None:
    """Return the machine's memory in bytes; None if it is unknown."""
    try:
        return host_memory().total
    except PackageNotInstalledError:
        return None


def resolve_or_all(framework: Framework, device: DeviceLike, attempted: str) -> Iterable[Device]:
    """Return the one device that was asked for; all of them for None."""
    if device is None:
        return all_devices(framework)
    return [resolve(framework, device, attempted)]


# -- the memory that a framework takes at the start -------------------------------------------

# By default JAX takes three quarters of a GPU at its first use, and TensorFlow all of it. No other
# framework fits beside them. d2ldev asks both to allocate memory on demand. It does so only before
# the framework has initialised its GPU. The framework's own variables, and
# ``D2LDEV_GPU_MEMORY=framework``, take precedence.


def user_has_chosen(variables: Iterable[str]) -> bool:
    """Return whether the framework's memory is to be left as it is.

    Args:
        variables: the framework's own environment variables for it.

    Raises:
        UnsupportedValueError: if ``D2LDEV_GPU_MEMORY`` has another value than it can have.
    """
    return not settings.memory_grows() or any(variable in os.environ for variable in variables)


def warn_too_late(framework: str, before: str) -> None:
    """Warn that a framework already holds its GPU's memory, and say how to prevent it.

    Args:
        framework: its name.
        before: the setting for the time before its first use, as ``VARIABLE=value``.
    """
    warn(
        f"{framework} had initialised its GPU before d2ldev was first used, and may hold most of "
        f"its memory. fix: use d2ldev first, set {before}, or "
        f"{settings.GPU_MEMORY}=framework to agree",
        MemoryPolicyWarning,
    )
