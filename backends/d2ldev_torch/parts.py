"""What a torch module, optimizer and tensor keep, for ``place``.

More than ``Module.to`` moves: also plain tensor attributes, and the tensors and modules in a
module's lists and dicts. Parameters are moved in place (``TorchBackend._refill``), so that
whoever holds one, an optimizer above all, still holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import filterfalse
from types import MemberDescriptorType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from d2ldev.nesting.walk import register_container
from d2ldev.operations.placing import Part

OBJECT_TYPES: tuple[type, ...] = (torch.nn.Module, torch.optim.Optimizer)

# What every module has in its ``__dict__``: hooks and flags, and the three that are read below.
_OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
# Most attributes are of these types, and hold no tensor.
_WITHOUT_TENSORS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def parts_of(obj: Any) -> Iterator[Part]:
    """The parts of a module or an optimizer."""
    return _module_parts(obj) if isinstance(obj, torch.nn.Module) else _optimizer_parts(obj)


def _module_parts(module: torch.nn.Module) -> Iterator[Part]:
    attributes = vars(module)
    for kept in (attributes["_parameters"], attributes["_buffers"], attributes["_modules"]):
        if kept:
            put = kept.__setitem__
            for name, value in kept.items():
                if value is not None:
                    yield Part(name, value, partial(put, name))
    for name in filterfalse(_OWN_ATTRIBUTES.__contains__, attributes):
        value = attributes[name]
        if not isinstance(value, _WITHOUT_TENSORS):
            yield Part(name, value, partial(attributes.__setitem__, name))
    cls: type = type(module)
    for name in _slots_of(cls):
        if hasattr(module, name):
            yield Part(name, getattr(module, name), partial(object.__setattr__, module, name))


@lru_cache(1024)
def _slots_of(cls: type) -> tuple[str, ...]:
    """What objects of a class keep outside of their ``__dict__``; for most there is nothing."""
    return tuple(
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    )


def _optimizer_parts(optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    index = 0
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params" or not _is_host_scalar(value):
                yield Part(f"param_groups.{i}.{key}", value, partial(group.__setitem__, key))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                # torch's own policy (Optimizer.load_state_dict): the step stays on the host,
                # unless the kernel itself reads it.
                on_device = group.get("capturable") or group.get("fused")
                if key != "step" or on_device or not _is_host_scalar(value):
                    yield Part(f"state.{index}.{key}", value, partial(state.__setitem__, key))
            index += 1


def _is_host_scalar(value: Any) -> bool:
    """Whether a value is a 0-dim CPU tensor, which torch takes together with any device's."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu


def attached_to(x: torch.Tensor) -> tuple[Part, ...]:
    """A leaf's gradient, which has to be where the leaf is."""
    if x.is_leaf and x.grad is not None:
        return (Part("grad", x.grad, partial(setattr, x, "grad")),)
    return ()


def is_parameter(x: torch.Tensor) -> bool:
    """Whether others may hold this very tensor as their parameter, also a frozen one."""
    return x.is_leaf and (
        x.requires_grad or isinstance(x, torch.nn.Parameter) or x.grad is not None
    )


def refill(x: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``x`` the memory of ``new``, and keep ``x`` who it is."""
    new = new.detach()
    if not is_traceable_wrapper_subclass(x):
        x.data = new
        return
    # Its memory is that of the tensors it wraps, which ``data`` would leave where they are: as
    # ``Module.to`` does, the two change places.
    if isinstance(x, torch.nn.Parameter):
        new = torch.nn.Parameter(new, x.requires_grad)
    torch.utils.swap_tensors(x, new.requires_grad_(x.requires_grad))


def finish(obj: Any) -> None:
    """Put the weights of a recurrent layer in one piece again, as cuDNN wants them."""
    if isinstance(obj, torch.nn.RNNBase):
        # They work in many pieces too, only slower: no reason to fail when memory is short.
        with suppress(torch.OutOfMemoryError):
            obj.flatten_parameters()


def register_containers() -> None:
    """A packed batch of sequences moves but for its batch sizes, which torch wants on the host."""
    register_container(
        PackedSequence,
        lambda packed: (packed.data, packed.sorted_indices, packed.unsorted_indices),
        lambda packed, new: PackedSequence(new[0], packed.batch_sizes.clone(), new[1], new[2]),
    )
