"""Random numbers are drawn by a generator of the device that they are for, or not at all.

Generators of virtual GPUs are the CPU's to everything in torch that is written in C++, so that
torch, which refuses a generator of another kind of device, would take them for one another:
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/core/Generator.h
The operators that draw ask here, those of the CPU only from the first such generator on.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import DeviceMismatchError
from d2ldev_torch.strict import generator_mismatch
from d2ldev_torch.virtual.devices import index_of
from d2ldev_torch.virtual.fallback import operator, plan_of, run
from d2ldev_torch.virtual.labels import NAME
from d2ldev_torch.virtual.schemas import Plan

# By their address in C++, which is what arrives in a kernel: under another object of Python.
_placed: WeakValueDictionary[int, Any] = WeakValueDictionary()
_libraries: list[Any] = []
_Library: Any = torch.library.Library
_lock = threading.Lock()


class _Drawing(threading.local):
    """Whose numbers a virtual GPU's operator has the CPU's kernel draw, in this thread."""

    address: int | None = None


_drawing = _Drawing()


def place(generator: Any) -> None:
    """Remember a generator of a virtual GPU for as long as it lives."""
    _placed[generator._cdata] = generator
    with _lock:
        if not _libraries:
            _libraries.append(_watch_cpu())


def run_drawing(plan: Plan, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a virtual GPU that may have been given a generator.

    Raises:
        DeviceMismatchError: if the generator is on another device.
    """
    generator = plan.generator_in(args, kwargs)
    native = None if generator is None else _place_of(args, kwargs)
    if generator is None or native is None or native.type != NAME:
        return run(plan, *args, **kwargs)
    address = generator._cdata
    found = _placed.get(address)
    wanted = torch.device(NAME, index_of(native))
    if found is None or found.device != wanted:
        raise _mismatch(plan, wanted, generator.device if found is None else found.device)
    before, _drawing.address = _drawing.address, address
    try:
        return run(plan, *args, **kwargs)
    finally:
        _drawing.address = before


def _run_on_cpu(plan: Plan, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The CPU's kernel of an operator that draws."""
    generator = plan.generator_in(args, kwargs)
    if generator is not None and generator._cdata != _drawing.address:
        found = _placed.get(generator._cdata)
        if found is not None:
            raise _mismatch(plan, torch.device("cpu"), found.device)
    return kernel.call_boxed(keys, *args, **kwargs)


def _watch_cpu() -> Any:
    """Have the CPU's operators ask, too, which costs them a microsecond or two from then on."""
    library = _Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("aten::"):
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
                continue
            plan = plan_of(operator(name))
            if plan.draws:
                kernel = torch.library.get_kernel(plan.op, "CPU")
                run_checked = partial(_run_on_cpu, plan, kernel)
                library.impl(plan.op, run_checked, "CPU", with_keyset=True)
    return library


def _place_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Where an operator draws: on the device that it is given, else on its operands'."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    operands = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return next((x.device for x in operands), None)


def _mismatch(plan: Plan, wanted: torch.device, found: torch.device) -> DeviceMismatchError:
    same = wanted.type == found.type
    expected, other = (str(wanted), str(found)) if same else (wanted.type, found.type)
    return generator_mismatch(
        plan.name,
        _device(wanted),
        _device(found),
        f"Expected a '{expected}' device type for generator but found '{other}'",
    )


def _device(native: torch.device) -> Device:
    return gpu(native.index) if native.type == NAME else CPU
