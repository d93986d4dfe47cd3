"""The devices of virtual GPUs, and their registration with torch.

d2ldev registers them once in a process, and only if the user asks for virtual GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import backend_registration

from d2ldev import Device, DeviceUnavailableError
from d2ldev.framework import Memory
from d2ldev_torch.devices import TorchDevices
from d2ldev_torch.virtual import (
    autograd,
    communication,
    cuda_kernels,
    devices,
    memory,
    patches,
    random,
    sparse,
    torch_module,
)
from d2ldev_torch.virtual.copies import COPY_KERNELS
from d2ldev_torch.virtual.devices import NAME
from d2ldev_torch.virtual.dtypes import follow_cuda
from d2ldev_torch.virtual.kernels import (
    Schema,
    fall_back,
    operator_named,
    refuse_layout,
    run_on_cpu,
    schema_of,
)
from d2ldev_torch.virtual.memory import CPU_KEYS


class VirtualDevices(TorchDevices):
    """The CPU and virtual GPUs ``vgpu:0`` to ``vgpu:{number - 1}``, in place of the hardware's.

    Args:
        number: the number of virtual GPUs.

    Raises:
        DeviceUnavailableError: if another package uses torch's one spare device type.
    """

    def __init__(self, number: int) -> None:
        devices.make(number)
        if not _libraries:
            _set_up()
        super().__init__(NAME, "virtual", torch_module)
        self.types = (NAME, "cuda", "xpu", "mps")  # a program that names another GPU means this one
        self.streams = None

    def native_of_missing(self, device: Device) -> None:
        """Return None: torch has no name for it."""

    def is_idle(self, device: Device) -> bool:
        return True  # nothing is queued

    def memory(self, device: Device) -> Memory:
        return Memory(
            memory.count_used_bytes(device.index), None, None
        )  # its memory has no limit of its own


# torch keeps the operators registered as long as these objects exist.
_libraries: list[Any] = []
_Library: Any = torch.library.Library


def _set_up() -> None:
    _name_the_device()
    everything = _Library("_", "IMPL")
    everything.fallback(fall_back, "PrivateUse1")
    aten = _Library("aten", "IMPL")
    _libraries.extend((everything, aten))
    for key in ("NestedTensorPrivateUse1", *sparse.KEYS):
        everything.fallback(fall_back, key)
    # Under autocast most operators compute as before, as on CUDA but unlike ``PrivateUse1``.
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    everything.fallback(refuse_layout, "QuantizedPrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            _register(aten, name.removeprefix("aten::"))
    autograd.install()
    random.install()
    patches.install(aten)
    _libraries.extend(communication.install())


def _name_the_device() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    try:
        backend_registration._setup_privateuseone_for_python_backend(
            NAME, torch_module, device_guard=autograd.DeviceGuard()
        )
    except RuntimeError as error:
        raise DeviceUnavailableError(
            "make virtual GPUs",
            "torch has one spare device type for all packages, and it is taken: by "
            f"{taken!r} ({error})",
            f"run without the package that brings {taken!r}, or unset D2LDEV_VIRTUAL_GPUS",
        ) from error


def _register(aten: Any, name: str) -> None:
    """Register an operator's kernel for virtual GPUs where the fallback would not be called.

    torch calls its compositions for any device before the fallback. d2ldev runs the CPU's
    composition instead, in one call, and with its own error for operands on different devices.
    """
    op = operator_named(name)
    schema = schema_of(op)
    if _has(name, "AutocastCPU"):
        under_autocast: Any = partial(autograd.run_differentiable, schema)
        if schema.name in sparse.UNDER_AUTOCAST:
            under_autocast = partial(sparse.run_under_autocast, schema, under_autocast)
        aten.impl(name, under_autocast, "AutocastPrivateUse1")
    is_composed = _has(name, "CompositeImplicitAutograd")
    if name == "_sparse_mm":
        aten.impl(name, partial(sparse.refuse_two_devices, schema), "AutogradPrivateUse1")
    for key in sparse.KEYS:
        of_layout = sparse.choose_kernel(
            name, schema, key, is_composed_elsewhere=any(_has(name, each) for each in _COMPOSED)
        )
        if of_layout is not None:
            aten.impl(name, of_layout, key)
    kernel = _choose_kernel(name, schema, is_composed=is_composed)
    # A composition is called by the dispatcher of C++, in half the time of ``op.decompose``.
    run = partial(op._handle.redispatch_boxed, _COMPOSITION) if is_composed else None
    run = run or partial(run_on_cpu, schema)
    as_on_cuda = follow_cuda(schema, kernel or run, is_composed=is_composed)
    kernel = as_on_cuda or kernel
    if kernel is None:
        return
    aten.impl(name, kernel, "PrivateUse1")
    if is_composed and (as_on_cuda or name in COPY_KERNELS or name in autograd.COMPOSED_BY_DEVICE):
        aten.impl(name, kernel, "AutogradPrivateUse1")
    if is_composed and as_on_cuda:  # ``vmap`` composes it before any kernel is called
        aten.impl(name, kernel, "FuncTorchBatched")


_COMPOSITION = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)


def _choose_kernel(name: str, schema: Schema, *, is_composed: bool) -> Callable[..., Any] | None:
    """Return an operator's kernel for virtual GPUs; None if torch finds one by itself."""
    special = COPY_KERNELS.get(name) or cuda_kernels.KERNELS.get(name)
    if special is not None:
        return special
    if schema.outs and schema.name in cuda_kernels.KERNELS:
        return partial(cuda_kernels.write, schema, cuda_kernels.KERNELS[schema.name])
    if name in autograd.COMPOSED_BY_DEVICE:
        return partial(autograd.run_composite, schema)
    if schema.is_random:
        return None if is_composed else partial(random.run_random, schema)
    has_cpu = _has(name, "CPU")
    if _is_view(schema.op):
        # torch's own kernels make a view of the tensor itself, on its storage.
        return partial(schema.op._handle.redispatch_boxed, CPU_KEYS) if has_cpu else None
    if schema.name in _LEFT_TO_TORCH:
        return None
    # Where the CPU has a kernel, torch may have a composition for all other devices. The fallback
    # would find the rest, and takes longer: it looks up the schema in each call.
    is_run = has_cpu or any(_has(name, key) for key in _COMPOSED)
    return partial(run_on_cpu, schema) if is_run else None


_COMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# These operators read the tensor itself, above all its storage, and not its elements. As on CUDA,
# the composition of a packed sequence takes its lengths on the host, and leaves its sizes there.
_LEFT_TO_TORCH = frozenset(
    (
        *("_has_same_storage_numel", "_new_zeros_with_same_feature_meta", "is_same_size"),
        *("_lazy_clone", "lift", "is_pinned", "_pin_memory", "set", "resize", "resize_as"),
        *("_pack_padded_sequence", "_pad_packed_sequence"),
        *("sparse_dim", "dense_dim", "is_coalesced", "_coalesced"),
    )
)


def _is_view(op: Any) -> bool:
    """Return whether an operator makes or changes a view: its result shares the storage."""
    returned = (value.alias_info for value in op._schema.returns)
    return torch.Tag.inplace_view in op.tags or any(
        alias is not None and not alias.is_write for alias in returned
    )


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
