"""Make torch know virtual GPUs: once for a process, and only when they were asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils import backend_registration

from d2ldev.errors import DeviceUnavailableError
from d2ldev_torch.virtual import (
    devices,
    engine,
    generators,
    methods,
    storages,
    torch_accelerator,
)
from d2ldev_torch.virtual.composites import COMPOSED_BY_DEVICE, run_autocast, run_composed
from d2ldev_torch.virtual.copies import COPYING
from d2ldev_torch.virtual.drawing import run_drawing
from d2ldev_torch.virtual.fallback import (
    CPU_KERNELS,
    operator,
    plan_of,
    refuse_layout,
    run,
    run_any,
)
from d2ldev_torch.virtual.labels import NAME
from d2ldev_torch.virtual.module import make_module

# What is registered with torch stays so for as long as these live.
_libraries: list[Any] = []
_Library: Any = torch.library.Library


def set_up(number: int) -> None:
    """Make virtual GPUs ``vgpu:0`` to ``vgpu:{number - 1}``.

    Raises:
        DeviceUnavailableError: if another package uses the one spare device type that torch
            has, or if there is another number of virtual GPUs already.
    """
    devices.make(number)
    if _libraries:
        return
    engine.start()
    _name_the_device()
    everything = _Library("_", "IMPL")
    everything.fallback(run_any, "PrivateUse1")
    aten = _Library("aten", "IMPL")
    _libraries.extend((everything, aten))
    everything.fallback(run_any, "NestedTensorPrivateUse1")
    # Under autocast most operators compute as ever: as for CUDA, and not for PrivateUse1.
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for layout in ("Sparse", "SparseCsr", "Quantized"):
        everything.fallback(refuse_layout, f"{layout}PrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            _register(aten, name.removeprefix("aten::"))
    engine.install()
    storages.install()
    methods.install(aten)
    generators.install()
    torch_accelerator.install()


def _name_the_device() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    try:
        backend_registration._setup_privateuseone_for_python_backend(
            NAME, make_module(), device_guard=engine.DeviceGuard()
        )
    except RuntimeError as error:
        raise DeviceUnavailableError(
            "make virtual GPUs",
            "torch has one spare device type for all packages, and it is taken: by "
            f"{taken!r} ({error})",
            f"run without the package that brings {taken!r}, or unset D2LDEV_VIRTUAL_GPUS",
        ) from error


def _register(aten: Any, name: str) -> None:
    """Give an operator its kernel for virtual GPUs, where the fallback would not be called.

    The fallback stands behind the kernels that torch composes for any device. Those run the
    CPU's composition instead: in one call, and with our error for operands that do not agree.
    """
    packet, op = name.partition(".")[0], operator(name)
    if _has(name, "AutocastCPU"):
        aten.impl(name, partial(run_autocast, plan_of(op)), "AutocastPrivateUse1")
    if name in COPYING:
        aten.impl(name, COPYING[name], "PrivateUse1")
        if _has(name, "CompositeImplicitAutograd"):
            aten.impl(name, COPYING[name], "AutogradPrivateUse1")
    elif name in COMPOSED_BY_DEVICE:
        kernel = partial(run_composed, plan_of(op))
        aten.impl(name, kernel, "AutogradPrivateUse1")
        aten.impl(name, kernel, "PrivateUse1")
    elif plan_of(op).draws:
        if not _has(name, "CompositeImplicitAutograd"):
            aten.impl(name, partial(run_drawing, plan_of(op)), "PrivateUse1")
    elif _is_view(op):
        if _has(name, "CPU"):
            aten.impl(name, partial(op.redispatch, CPU_KERNELS), "PrivateUse1")
    elif packet not in _ABOUT_TENSORS and (
        any(_has(name, key) for key in _COMPOSED)
        # The CPU's kernel, and a composition for all others.
        or (_has(name, "CPU") and _has(name, "CompositeImplicitAutograd"))
    ):
        aten.impl(name, partial(run, plan_of(op)), "PrivateUse1")


_COMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# They look at the tensor itself, its storage above all, and not at its numbers.
_ABOUT_TENSORS = frozenset(
    (
        *("_has_same_storage_numel", "_new_zeros_with_same_feature_meta", "is_same_size"),
        *("_lazy_clone", "lift", "is_pinned", "_pin_memory", "set", "resize", "resize_as"),
        *("sparse_dim", "dense_dim", "is_coalesced", "_coalesced"),
    )
)


def _is_view(op: Any) -> bool:
    """Whether an operator makes or changes a view: what it returns has its operand's storage."""
    returned = (value.alias_info for value in op._schema.returns)
    return torch.Tag.inplace_view in op.tags or any(
        alias is not None and not alias.is_write for alias in returned
    )


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
