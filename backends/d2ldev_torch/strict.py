"""Strict: torch refuses operands of different devices by itself; here its error is recognised.

On virtual GPUs the operator itself raises d2ldev's error (``virtual``). Elsewhere an error of torch
is about mixed devices if its text says that devices should agree. The text stays in the message,
because it often names the operands. The line of the program that failed is named too, because the
text often names no operation.

Sources: ``c10/core`` and ``aten/src/ATen`` of https://github.com/pytorch/pytorch, in which there
is one sentence for all generated kernels
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/core/adaption.cpp) and one for all
element-wise ones
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/TensorIterator.cpp).
"""

from __future__ import annotations

import linecache
import re
from traceback import walk_tb
from types import TracebackType

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import DeviceMismatchError
from d2ldev.framework import Strict

_SHOULD_AGREE = re.compile(
    r"same (?:type of )?device|different device|expected device \S+ but got|"
    r"expected (?:it|them) to be on GPU|gradient located on device",
    re.IGNORECASE,
)
_GPU = r"cuda|hip|xpu|mps|vgpu"
_DEVICE = re.compile(rf"\b(cpu|gpu|{_GPU})(?::(\d+))?\b", re.IGNORECASE)
_GENERATOR = re.compile(rf"'(cpu|{_GPU})' device type for generator but found '(cpu|{_GPU})'")
# ``Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same``
_TYPES = re.compile(r"type \(([\w.]+)\) and \w+ type \(([\w.]+)\) should be the same")

_LIBRARIES = ("torch", "d2ldev", "d2ldev_torch")


class TorchStrict(Strict):
    """Errors of torch about mixed devices."""

    def mismatch_in(self, error: BaseException) -> DeviceMismatchError | None:
        if not isinstance(error, RuntimeError):
            return None
        text = str(error)
        operation = _line_that_failed(error.__traceback__)
        generator = _GENERATOR.search(text)
        if generator is not None:
            return generator_mismatch(operation, *map(_device, generator.groups()))
        devices = _devices_of_types(text)
        if not devices and _SHOULD_AGREE.search(text):
            devices = [_device(kind, index) for kind, index in _DEVICE.findall(text)]
        elif not devices:
            return None
        # The operand on the CPU is to be moved, rather than one on a GPU.
        target = next((device for device in devices if device is not CPU), CPU)
        named = list(dict.fromkeys(devices))
        where = "".join(f", {device}" for device in named)
        return DeviceMismatchError(
            f"run {operation}",
            f"its operands are on different devices{where}: {text}",
            f"x = backend.to(x, '{target}') for each operand that is elsewhere",
            named,
        )


def _devices_of_types(text: str) -> list[Device]:
    """Return the devices of two types of tensors that differ in the kind of device."""
    found = _TYPES.search(text)
    kinds = [re.search(_GPU, name, re.IGNORECASE) for name in found.groups()] if found else []
    devices = [CPU if kind is None else gpu() for kind in kinds]
    return devices if len({*devices}) > 1 else []


def _device(kind: str, index: str = "") -> Device:
    """Return the device of one of torch's names; without an index it is the first one."""
    return CPU if kind.lower() == "cpu" else gpu(int(index or 0))


def _line_that_failed(traceback: TracebackType | None) -> str:
    """Return the innermost line of a traceback that is neither torch's nor d2ldev's."""
    lines = [
        linecache.getline(frame.f_code.co_filename, number).strip()
        for frame, number in walk_tb(traceback)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES
    ]
    return lines[-1] if lines and lines[-1] else "an operation"


def generator_mismatch(operation: str, place: Device, other: Device) -> DeviceMismatchError:
    """Return the error of an operation that draws on a device by a generator on another one."""
    return DeviceMismatchError(
        f"run {operation}",
        f"its numbers are drawn on {place}, by a generator on {other}",
        f"generator = torch.Generator(backend.native('{place}'))",
        [place, other],
    )
