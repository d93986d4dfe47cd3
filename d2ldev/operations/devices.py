"""From what a user writes to a device that exists: spellings, scopes, existence.

Source: D2L, section 6.7.1, "Computing Devices".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from d2ldev.device import CPU, Device, cpu, gpu
from d2ldev.errors import (
    D2LDevError,
    DeviceUnavailableError,
    InvalidDeviceError,
    OutOfDeviceMemoryError,
    describe,
)
from d2ldev.model_primitives import ModelPrimitives
from d2ldev.primitives import DeviceLike
from d2ldev.virtual import asked_for_too_late


class Resolution(ModelPrimitives):
    """The part of the contract that is about devices."""

    def cpu(self) -> Device:
        """The CPU."""
        return cpu()

    def gpu(self, i: int = 0) -> Device:
        """The GPU of index ``i``, whether or not it exists.

        Raises:
            InvalidDeviceError: if ``i`` is negative or no integer.
        """
        return gpu(i)

    def try_gpu(self, i: int = 0) -> Device:
        """``gpu(i)`` if it exists, else the CPU."""
        return gpu(i) if gpu(i).index < self.num_gpus() else CPU

    def try_all_gpus(self) -> list[Device]:
        """All GPUs, or ``[cpu()]`` if there is none: never empty."""
        return [gpu(i) for i in range(self.num_gpus())] or [CPU]

    def devices(self) -> list[Device]:
        """All devices that exist: the CPU first, then the GPUs."""
        return [CPU, *(gpu(i) for i in range(self.num_gpus()))]

    def device(self, spec: DeviceLike) -> Device:
        """The ``Device`` for a device in any spelling; whether it exists is not checked.

        Args:
            spec: a ``Device``, a string, or the framework's own device object.

        Raises:
            InvalidDeviceError: for anything else, such as another framework's device.
        """
        if isinstance(spec, Device):
            return spec
        if isinstance(spec, str):
            try:
                return Device.parse(spec)
            except InvalidDeviceError:
                # TensorFlow's own device objects are strings.
                device = self._from_native(spec)
                if device is None:
                    raise
                return device
        device = self._from_native(spec)
        if device is None:
            raise InvalidDeviceError(
                f"use {describe(spec)} as a device",
                f"it is neither a d2ldev.Device, a string, nor a device of {self.name}",
                "device = d2ldev.gpu(0), or a string: 'cpu', 'gpu:1'",
            )
        return device

    def native(self, device: DeviceLike) -> Any:
        """The framework's own object for a device, to be used in the framework's own calls.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        return self._existing(device, "use a device")[1]

    def platform(self, device: DeviceLike) -> str:
        """What a device is: ``'cpu'``, ``'cuda'``, ``'rocm'``, ``'xpu'``, ``'mps'``, ``'virtual'``.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        return self._platform(self._existing(device, "ask for the platform")[0])

    @contextmanager
    def on(self, device: DeviceLike) -> Iterator[Device]:
        """Make a device the place where tensors are created, for the length of a block.

        d2ldev's creation functions follow it per thread and per asyncio task. The
        framework's own default device is changed with it, by the framework's own means and
        with its rules: most keep it per thread, so do not ``await`` in such a block.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        place, _ = self._existing(device, "make tensors")
        with self._native_scope(place):
            entry = (object(), place)
            self._scopes.set((*self._scopes.get(), entry))
            self._scope.set(place)
            try:
                yield place
            finally:
                # Its own entry and no other: a block in a generator may end after a later one.
                left = tuple(scope for scope in self._scopes.get() if scope is not entry)
                self._scopes.set(left)
                self._scope.set(left[-1][1] if left else None)

    def _existing(self, spec: DeviceLike, attempted: str) -> tuple[Device, Any]:
        """A device that exists, and its native object; remembered by its spelling."""
        device = self.device(spec)
        if device is not CPU and device.index >= (count := self.num_gpus()):
            raise DeviceUnavailableError(
                f"{attempted} on {device}",
                f"{self.name} has {count} GPU{'' if count == 1 else 's'} here"
                + asked_for_too_late(device.index),
                f"use one that exists: backend.try_gpu({device.index}) is "
                f"{self.try_gpu(device.index)} here",
                self.devices(),
            )
        native = self._native(device)
        if spec is device or isinstance(spec, str):
            # Not the framework's own objects: torch.device('cuda') means another GPU after
            # torch.cuda.set_device.
            self._devices[spec] = device
            self._natives[spec] = native
        return device, native

    def _out_of_memory(self, error: Exception, attempted: str, native: Any) -> D2LDevError:
        """The error that says which device has too little memory."""
        device = self._from_native(native)
        return OutOfDeviceMemoryError(
            attempted,
            f"{device} has too little free memory: {error}",
            "use a smaller batch, or free tensors; backend.memory(device) shows the memory",
            [device],
        )
