"""Random numbers on a virtual GPU: ``torch.Generator(device='vgpu:1')``, and what it may draw for.

torch asks a device's hooks for a generator, and hooks in Python have none, so that the CPU's takes
its place: https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
To C++ it is on the CPU. So the operators that draw check their generator here, as torch does for
the devices that it knows: those of virtual GPUs always, those of the CPU from the first generator
of a virtual GPU on.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from d2ldev.errors import DeviceMismatchError
from d2ldev_torch.strict import generator_mismatch
from d2ldev_torch.virtual.devices import NAME, device_of, index_of
from d2ldev_torch.virtual.kernels import Schema, operator_named, run_on_cpu, schema_of

_Generator: Any = torch.Generator
_CPU = torch.device("cpu")

# The generators of virtual GPUs, by their address in C++: a kernel gets another Python object.
_generators: WeakValueDictionary[int, Any] = WeakValueDictionary()
_libraries: list[Any] = []
_Library: Any = torch.library.Library
_lock = threading.Lock()


class _Drawing(threading.local):
    """The address of the generator that a virtual GPU's operator draws by, in this thread."""

    address: int | None = None


_drawing = _Drawing()


class _Metaclass(type(_Generator)):  # type: ignore[misc]
    """Counts every generator of torch as an instance of ``Generator``."""

    def __instancecheck__(self, instance: object) -> Any:
        if self is Generator:
            return isinstance(instance, _Generator)
        return super().__instancecheck__(instance)

    def __subclasscheck__(self, subclass: type) -> Any:
        if self is Generator:
            return issubclass(subclass, _Generator)
        return super().__subclasscheck__(subclass)


class Generator(_Generator, metaclass=_Metaclass):  # type: ignore[misc]
    """Makes generators for all devices; its own instances are on virtual GPUs, or of a subclass."""

    _place: torch.device | None = None

    def __new__(cls, device: Any = None) -> Any:
        native = _CPU if device is None else torch.device(device)
        if native.type != NAME:
            return _Generator.__new__(_Generator if cls is Generator else cls, device)
        made = _Generator.__new__(cls)
        made._place = torch.device(NAME, index_of(native))
        _generators[made._cdata] = made
        _check_draws_on_cpu()
        return made

    @property
    def device(self) -> torch.device:
        """The device that it was made for."""
        return self._place or super().device

    def clone_state(self) -> torch.Generator:
        """Return a generator of the same device in the same state."""
        cloned: torch.Generator = Generator(self.device)
        cloned.set_state(self.get_state())
        return cloned

    def __reduce__(self) -> tuple[Any, ...]:
        made_by, _, *state = super().__reduce__()
        return (Generator if self._place else made_by, (self.device,), *state)


def install() -> None:
    """Replace ``torch.Generator``."""
    Generator.__doc__ = _Generator.__doc__
    torch.Generator = Generator  # type: ignore[misc]


def run_random(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a virtual GPU that may have been given a generator.

    Raises:
        DeviceMismatchError: if the generator is on another device.
    """
    generator = schema.generator_in(args, kwargs)
    native = None if generator is None else _device_drawn_on(args, kwargs)
    if native is None or native.type != NAME:
        return run_on_cpu(schema, *args, **kwargs)
    wanted = torch.device(NAME, index_of(native))
    found = _generators.get(generator._cdata, generator).device
    if found != wanted:
        raise _mismatch(schema, wanted, found)
    before, _drawing.address = _drawing.address, generator._cdata
    try:
        return run_on_cpu(schema, *args, **kwargs)
    finally:
        _drawing.address = before


def _device_drawn_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that an operator is given, else that of its operands."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    operands = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return next((x.device for x in operands), None)


def _check_draws_on_cpu() -> None:
    """Have the CPU's operators check their generator, which costs them a microsecond or two."""
    with _lock, warnings.catch_warnings():
        if _libraries:
            return
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        library = _Library("aten", "IMPL")
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CPU"
            ):
                schema = schema_of(operator_named(name))
                if schema.is_random:
                    kernel = torch.library.get_kernel(schema.op, "CPU")
                    checked = partial(_draw_on_cpu, schema, kernel)
                    library.impl(schema.op, checked, "CPU", with_keyset=True)
        _libraries.append(library)


def _draw_on_cpu(schema: Schema, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    generator = schema.generator_in(args, kwargs)
    if generator is not None and generator._cdata != _drawing.address:
        found = _generators.get(generator._cdata)
        if found is not None:
            raise _mismatch(schema, _CPU, found.device)
    return kernel.call_boxed(keys, *args, **kwargs)


def _mismatch(schema: Schema, wanted: torch.device, found: torch.device) -> DeviceMismatchError:
    same = wanted.type == found.type
    expected, other = (str(wanted), str(found)) if same else (wanted.type, found.type)
    return generator_mismatch(
        schema.name,
        device_of(wanted),
        device_of(found),
        f"Expected a '{expected}' device type for generator but found '{other}'",
    )
