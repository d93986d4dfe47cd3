"""Random numbers on a virtual GPU: ``torch.Generator(device='vgpu:1')``, and its devices.

torch asks a device's hooks for a generator. Hooks in Python have none, so the CPU's generator
replaces it. For C++ the generator is on the CPU, and the CPU's operators accept it. This module
checks the generator's device for operators on virtual GPUs.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakValueDictionary

import torch

from d2ldev_torch.strict import generator_mismatch
from d2ldev_torch.virtual.as_cuda import show, translate
from d2ldev_torch.virtual.devices import NAME, device_of, index_of
from d2ldev_torch.virtual.kernels import Schema, run_on_cpu

_Generator: Any = torch.Generator

# The generators of virtual GPUs, by their address in C++: a kernel gets another Python object.
_generators: WeakValueDictionary[int, Any] = WeakValueDictionary()


class _Metaclass(type(_Generator)):  # type: ignore[misc]
    """Makes every generator of torch an instance of ``Generator``."""

    def __instancecheck__(cls, instance: object) -> Any:
        if cls is Generator:
            return isinstance(instance, _Generator)
        return super().__instancecheck__(instance)


class Generator(_Generator, metaclass=_Metaclass):  # type: ignore[misc]
    """A generator on any device, also on a virtual GPU."""

    _place: torch.device | None = None

    def __new__(cls, device: Any = None) -> Any:
        native = torch.device("cpu" if device is None else translate(device))
        if native.type != NAME:
            return super().__new__(cls, device)
        made = super().__new__(cls)
        made._place = torch.device(NAME, index_of(native))
        _generators[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        """The device of the generator."""
        return show(self._place or super().device, sys._getframe(1))

    def __reduce__(self) -> tuple[Any, ...]:
        made_by, _, *state = super().__reduce__()
        return (Generator if self._place else made_by, (self.device,), *state)


def install() -> None:
    """Replace ``torch.Generator``."""
    Generator.__doc__ = _Generator.__doc__
    torch.Generator = Generator  # type: ignore[misc]


def run_random(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a virtual GPU, and check the device of its generator.

    Raises:
        DeviceMismatchError: if the generator is on another device.
    """
    generator = schema.name_arguments(args, kwargs).get("generator")
    native = _device_drawn_on(args, kwargs)
    if generator is not None and native is not None and native.type == NAME:
        wanted = torch.device(NAME, index_of(native))
        found = _generators.get(generator._cdata, generator).device
        if found != wanted:
            raise generator_mismatch(schema.name, device_of(wanted), device_of(found))
    return run_on_cpu(schema, *args, **kwargs)


def _device_drawn_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device among an operator's arguments, or else its operands' device."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    operands = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return next((x.device for x in operands), None)
