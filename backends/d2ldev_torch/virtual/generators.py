"""``torch.Generator(device='vgpu:1')``: the CPU's generator, which draws for virtual GPUs.

torch makes a generator by asking the hooks of its device for one, and hooks in Python have none:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
What it draws for is looked after in ``drawing.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from d2ldev_torch.virtual import drawing
from d2ldev_torch.virtual.devices import index_of
from d2ldev_torch.virtual.labels import NAME

_Generator: Any = torch.Generator
_Metaclass: Any = type(_Generator)


class _Kind(_Metaclass):  # type: ignore[misc]
    """Every generator of torch's is one of ``Generator``, which only makes them."""

    def __instancecheck__(self, instance: object) -> bool:
        if self is Generator:
            return isinstance(instance, _Generator)
        return bool(super().__instancecheck__(instance))

    def __subclasscheck__(self, subclass: type) -> bool:
        if self is Generator:
            return issubclass(subclass, _Generator)
        return bool(super().__subclasscheck__(subclass))


class Generator(_Generator, metaclass=_Kind):  # type: ignore[misc]
    """Makes generators for all devices; its own instances are on virtual GPUs, or of a subclass."""

    def __new__(cls, device: Any = None) -> Any:
        native = torch.device("cpu" if device is None else device)
        if native.type != NAME:
            return _Generator.__new__(_Generator if cls is Generator else cls, device)
        made = _Generator.__new__(cls)
        made._place = torch.device(NAME, index_of(native))
        drawing.place(made)
        return made

    @property
    def device(self) -> torch.device:
        """The device that it was made for."""
        place: torch.device | None = vars(self).get("_place")
        return super().device if place is None else place

    def clone_state(self) -> torch.Generator:
        """A generator of the same device in the same state."""
        if self.device.type != NAME:
            return super().clone_state()  # type: ignore[no-any-return]
        cloned: torch.Generator = Generator(self.device)
        cloned.set_state(self.get_state())
        return cloned

    def __reduce__(self) -> tuple[Any, ...]:
        made_by, _, *state = super().__reduce__()
        return (Generator if self.device.type == NAME else made_by, (self.device,), *state)


def install() -> None:
    """Have it instead of torch's own class, which has no other name but in ``torch._C``."""
    Generator.__doc__ = _Generator.__doc__
    torch.Generator = Generator  # type: ignore[misc]
