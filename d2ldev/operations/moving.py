"""Copies between devices: where the user wrote one, and nowhere else.

Source: D2L, section 6.7.2.2, "Copying".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from d2ldev.device import CPU, Device
from d2ldev.errors import D2LDevError, UnsupportedValueError, describe
from d2ldev.framework import DeviceLike, Framework, Tensor
from d2ldev.nesting.kinds import PLAIN, TENSOR, Kind
from d2ldev.nesting.walk import every, rebuild
from d2ldev.operations import devices
from d2ldev.registry.selection import framework_of

if TYPE_CHECKING:
    import numpy as np

CopyAll = Callable[[list[Tensor], Any], list[Tensor]]
"""What copies tensors to a native device, as ``Tensors.copy_all`` does."""


def to(framework: Framework, x: Any, device: DeviceLike) -> Any:
    """Move a tensor, or every tensor in a nesting, to a device; see ``Backend.to``."""
    try:
        target = framework.known_devices[device]
    except Exception:  # unknown so far, or not hashable
        target = devices.existing(framework, device, "move a tensor")
    device_of = framework.tensors.device_of
    kinds = framework.kinds
    if kinds[type(x)] is TENSOR:
        if device_of(x) is target:
            return x
        return copies(framework, [x], target, f"move a tensor to {target}")[0]
    try:
        if every(x, kinds, lambda tensor: device_of(tensor) is target, [10_000]):
            return x
    except Exception:  # noqa: S110
        pass  # a cycle, or a container that cannot be walked: the walk below names it
    return copied(framework, x, target, f"move a batch to {target}", always=False)


def copy(framework: Framework, x: Any, device: DeviceLike) -> Any:
    """Copy a tensor, or every tensor in a nesting, into new memory; see ``Backend.copy``."""
    target = None if device is None else devices.existing(framework, device, "copy a tensor")
    return copied(framework, x, target, "copy a tensor", always=True)


def to_numpy(framework: Framework, x: Tensor) -> np.ndarray[Any, Any]:
    """Return the values of a tensor in a NumPy array; see ``Backend.to_numpy``."""
    if what := _foreign(framework, x):
        raise _refusal(framework, "make a NumPy array", x, "", what)
    try:
        return framework.tensors.to_numpy(x)
    except Exception as error:
        # Described only now: the text of a tensor takes longer than its values.
        attempted = f"make a NumPy array of {describe(x)}"
        native = framework.devices.native(CPU)
        if (translated := _translated(framework, error, attempted, native)) is None:
            raise
        raise translated from error


def from_dlpack(framework: Framework, x: Any) -> Tensor:
    """Return a tensor on the memory of another framework's; see ``Backend.from_dlpack``."""
    framework.require("dlpack", f"take over the memory of {describe(x)}")
    try:
        own = framework.kinds[type(x)] is TENSOR
        return framework.tensors.from_dlpack(x if own else _exported(x))
    except D2LDevError:
        raise
    except Exception as error:
        raise UnsupportedValueError(
            f"take over the memory of {describe(x)}",
            f"{type(error).__name__}: {error}",
            "copy instead: backend.asarray(d2ldev.backend_of(x).to_numpy(x))",
        ) from error


def copied(
    framework: Framework,
    x: Any,
    target: Device | None,
    attempted: str,
    *,
    always: bool,
    copy_all: CopyAll | None = None,
) -> Any:
    """Copy the tensors of a nesting; all of them are copied before a container is made again.

    Args:
        framework: whose tensors they are.
        x: any nesting of tensors.
        target: where to; None leaves each tensor on its device.
        attempted: what the caller is doing, for messages.
        always: whether what is there already is copied, too.
        copy_all: what copies; None is the framework's own way.
    """
    device_of = framework.tensors.device_of
    wanted: dict[Device, list[Tensor]] = {}

    def collect(leaf: Any, kind: Kind, name: str) -> Any:
        if kind is not TENSOR:
            raise _refusal(framework, attempted, leaf, name, _foreign(framework, leaf))
        there = device_of(leaf)
        if always or there is not target:
            wanted.setdefault(target or there, []).append(leaf)
        return leaf

    rebuild(x, framework.kinds, collect, attempted)
    found = {
        id(old): new
        for device, tensors in wanted.items()
        for old, new in zip(
            tensors, copies(framework, tensors, device, attempted, copy_all), strict=True
        )
    }

    def change(leaf: Any, _kind: Kind, _name: str) -> Any:
        if id(leaf) in found:
            return found[id(leaf)]
        # A container may make its children anew each time they are asked for.
        there = device_of(leaf)
        if not always and there is target:
            return leaf
        return copies(framework, [leaf], target or there, attempted, copy_all)[0]

    return rebuild(x, framework.kinds, change, attempted)


def copies(
    framework: Framework,
    tensors: list[Tensor],
    device: Device,
    attempted: str,
    copy_all: CopyAll | None = None,
) -> list[Tensor]:
    """Return copies of several tensors on a device; all of them, or an exception."""
    native = framework.known_natives.get(device)
    if native is None:
        native = devices.native(framework, device, attempted)
    try:
        return (copy_all or framework.tensors.copy_all)(tensors, native)
    except Exception as error:
        if (translated := _translated(framework, error, attempted, native)) is None:
            raise
        raise translated from error


def _translated(
    framework: Framework, error: Exception, attempted: str, native: Any
) -> D2LDevError | None:
    """Return what an exception of the framework's means where a tensor was to be copied.

    None if it means something else: the driver tells of work that was queued long before.
    """
    if isinstance(error, D2LDevError):
        return None
    if framework.devices.is_out_of_memory(error):
        return devices.out_of_memory(framework, error, attempted, native)
    if isinstance(error, (NotImplementedError, TypeError, ValueError)):
        return UnsupportedValueError(
            attempted,
            f"{framework.name} says: {type(error).__name__}: {error}",
            "give it as a dense tensor of a dtype in backend.dtype_names",
            [framework.devices.from_native(native)],
        )
    return None


def _foreign(framework: Framework, x: Any) -> str:
    """Return what a value is instead of a tensor of this framework; empty if it is one."""
    kind = framework.kinds[type(x)]
    if kind is TENSOR:
        return ""
    return "a plain value" if kind is PLAIN else f"no tensor of the {framework.name} backend"


def _refusal(
    framework: Framework, attempted: str, x: Any, name: str, what: str
) -> UnsupportedValueError:
    where = f" at {name}" if name else ""
    fix = "backend.asarray(x, device=device) makes a tensor of numbers and NumPy arrays"
    if isinstance(x, framework.models.types):
        fix = "model = backend.place(model, device) moves models and optimizers"
    elif hasattr(_exported(x), "__dlpack__") and type(x).__module__ != "numpy":
        fix = "x = backend.from_dlpack(x) takes over another framework's tensor"
    elif not hasattr(x, "__array__"):
        register = f"d2ldev.register_container({type(x).__name__}, children, rebuild)"
        fix = f"take it out of the batch, or {register}"
    problem = f"{describe(x)}{where} is {what}"
    return UnsupportedValueError(attempted, problem, fix)


def _exported(x: Any) -> Any:
    """Return what has ``__dlpack__`` for a value: itself, or what its backend puts in its stead."""
    if hasattr(x, "__dlpack__"):
        return x
    try:
        return framework_of(x).tensors.dlpack_of(x)
    except UnsupportedValueError:
        return x
