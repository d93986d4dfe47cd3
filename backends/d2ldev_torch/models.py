"""Models: the tensors of a torch module, optimizer and tensor.

``Module.to`` moves parameters and buffers, and what a module's own ``_apply`` moves. ``place`` also
moves tensors that are attributes, lists and dicts with trained tensors, and optimizers. Parameters
move in place. So references to them stay valid, above all those of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from types import MemberDescriptorType
from typing import Any

import torch

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import Devices, Models, Role, Slot, Tensor, Tensors, text_of
from d2ldev_torch import optimizers
from d2ldev_torch.sharing import transfer_together
from d2ldev_torch.writing import plan_writes

_ACTIVATIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh, "sigmoid": torch.nn.Sigmoid}

# The attributes of every module: hooks, flags, and the three that ``members`` reads.
_OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
# The size of a module without slots; each slot adds to it.
_SIZE = torch.nn.Module.__basicsize__
# The only module inside a module that ``torch.compile`` has made.
WRAPPED = "_orig_mod"
_PARAMETER, _ATTRIBUTE = Role.PARAMETER, Role.ATTRIBUTE
_REGISTRATION = "self.register_buffer({!r}, x)"
# Objects that stay on one device.
_BOUND = (torch.Generator, torch.Stream)
# Most attributes have one of these types, and hold no tensor.
_WITHOUT_TENSORS: frozenset[type] = frozenset({bool, int, float, str, type(None), torch.dtype})


class TorchModels(Models):
    """``torch.nn.Module`` and ``torch.optim.Optimizer``."""

    types = (torch.nn.Module, torch.optim.Optimizer)

    def __init__(self, devices: Devices, tensors: Tensors) -> None:
        self._devices, self._tensors = devices, tensors

    # -- making -----------------------------------------------------------------------------------

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> torch.nn.Module:
        modules: list[torch.nn.Module] = []
        for kernel, bias in layers:
            # On ``meta`` it draws nothing from torch's random state, and takes no memory.
            n_out, n_in = kernel.shape
            linear = torch.nn.Linear(n_in, n_out, device="meta")
            linear.weight, linear.bias = torch.nn.Parameter(kernel), torch.nn.Parameter(bias)
            modules += [linear, _ACTIVATIONS[activation]()]
        return torch.nn.Sequential(*modules[:-1])

    # -- placing ----------------------------------------------------------------------------------

    def members(self, obj: Any) -> list[Slot]:
        if not isinstance(obj, torch.nn.Module):
            return optimizers.list_slots(obj)
        attributes = obj.__dict__
        # Private: the public lists neither replace a tensor nor tell which buffers are saved. A
        # module's ``__getattr__`` makes its attributes slow to read. A traced one has properties.
        kept = attributes if "_parameters" in attributes else _properties(obj)
        modules = kept["_modules"]
        if WRAPPED in modules:
            return self.members(modules[WRAPPED])
        slots: list[Slot] = []
        tensors = kept["_parameters"]
        for name, x in tensors.items():
            if x is not None:
                put = partial(tensors.__setitem__, name)
                slots.append(Slot(name, x, put, _PARAMETER, x.requires_grad))
        if tensors := kept["_buffers"]:
            passing = obj._non_persistent_buffers_set
            for name, x in tensors.items():
                if x is not None:
                    put = partial(tensors.__setitem__, name)
                    slots.append(Slot(name, x, put, is_saved=name not in passing))
        for name, inner in modules.items():
            slots.append(Slot(name, inner))
        cls: type = type(obj)
        moves_itself = _moves_itself(cls)
        # Hooks of weight_norm and spectral_norm make an attribute anew before each call. No public
        # function lists hooks.
        hooks = attributes.get("_forward_pre_hooks")
        remade = [getattr(each, "name", None) for each in hooks.values()] if hooks else ()
        for name in attributes:
            if name not in _OWN_ATTRIBUTES:
                value = attributes[name]
                if type(value) not in _WITHOUT_TENSORS:
                    if isinstance(value, _BOUND):  # nothing moves it: its device is named
                        value = value.device
                    if moves_itself and type(value) is torch.device:
                        continue  # a module that moves its tensors itself keeps up with its device
                    put = partial(attributes.__setitem__, name)
                    role = Role.WORKING if name in remade else _ATTRIBUTE
                    slots.append(Slot(name, value, put, role, False, False, _REGISTRATION))
        if moves_itself:
            slots.append(_slot_of_own_move(obj, slots))
        if cls.__basicsize__ != _SIZE:
            for name in _slots_of(cls):
                if hasattr(obj, name):
                    put = partial(object.__setattr__, obj, name)
                    value = getattr(obj, name)
                    slots.append(Slot(name, value, put, _ATTRIBUTE, False, False, _REGISTRATION))
        return slots

    def find_unsaved(self, model: Any) -> Sequence[str]:
        is_optimizer = isinstance(model, torch.optim.Optimizer)
        return optimizers.find_hidden(model) if is_optimizer else ()

    def list_attached(self, x: Tensor) -> Sequence[Slot]:
        if x.is_leaf and x.grad is not None:
            return (Slot("grad", x.grad, partial(setattr, x, "grad"), Role.WORKING),)
        return ()

    def find_refill(self, x: Tensor) -> Callable[[Tensor], object] | None:
        # Other objects may hold these as their parameter, also frozen ones.
        is_held = x.is_leaf and (
            x.requires_grad or isinstance(x, torch.nn.Parameter) or x.grad is not None
        )
        return partial(_refill, x) if is_held else None

    def plan_writes(
        self, values: Sequence[tuple[Tensor, Tensor, bool]]
    ) -> list[Callable[[], object] | None]:
        return plan_writes(values)

    def finish(self, obj: Any) -> None:
        obj = original(obj)
        if isinstance(obj, torch.nn.RNNBase):
            # cuDNN prefers the weights in one piece. Without enough memory for it, they stay in
            # pieces, which only makes them slower.
            with suppress(torch.OutOfMemoryError):
                obj.flatten_parameters()

    @contextmanager
    def place_context(self, device: Device) -> Iterator[Callable[..., list[Tensor]]]:
        with ExitStack() as stack:
            # A tensor made in inference mode can never be trained, and a model outlives the mode.
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield partial(transfer_together, self._tensors.transfer)

    def settle(self, obj: Any, device: Device) -> None:
        cls: type = type(obj)
        if _moves_itself(cls):
            native = self._devices.native(device)
            # Such a module may make a tensor for the function, which shows it the device.
            obj.to(native)


def _refill(x: torch.Tensor, new: torch.Tensor) -> None:
    new = new.detach()
    if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        x.data = new
        return
    # Its memory belongs to the tensors that it wraps, and ``data`` would not move them. As in
    # ``Module.to``, the two tensors swap.
    if isinstance(x, torch.nn.Parameter):
        new = torch.nn.Parameter(new, x.requires_grad)
    swap: Any = torch.utils.swap_tensors
    swap(x, new.requires_grad_(x.requires_grad))


@lru_cache(1024)
def _moves_itself(cls: type) -> bool:
    """Return whether modules of a class move tensors by an ``_apply`` of their own.

    The name is private, and libraries define it, such as torchmetrics. ``Module.to`` calls it.
    torch's own modules keep nothing there that has no slot. An optimizer's is its own affair.
    """
    move = getattr(cls, "_apply", None) if issubclass(cls, torch.nn.Module) else None
    return not getattr(move, "__module__", "torch.").startswith("torch.")


def _slot_of_own_move(module: Any, slots: Sequence[Slot]) -> Slot:
    """Return a slot with the tensors that only the ``_apply`` of a module reaches.

    Raises:
        UnsupportedValueError: if the method fails for a function that returns its argument.
    """
    found: dict[int, Any] = {}

    def note(x: Any) -> Any:
        found[id(x)] = x
        return x

    try:
        module._apply(note)
    except Exception as error:  # whatever a user's method raises
        raise UnsupportedValueError(
            f"list the tensors of a {type(module).__name__}",
            "the method _apply by which it moves its tensors raised "
            f"{type(error).__name__}: {text_of(error)}",
            "mend that method: it first gets a function that returns its argument",
        ) from error
    for x in (*module.parameters(), *module.buffers(), *(each.value for each in slots)):
        found.pop(id(x), None)
        found.pop(id(getattr(x, "grad", None)) if isinstance(x, torch.nn.Parameter) else 0, None)
    beside = list(found.values())

    def put(new: Sequence[Any]) -> None:
        new_of = {id(x): each for x, each in zip(beside, new, strict=True)}
        module._apply(lambda x: new_of.get(id(x), x))

    return Slot("_apply", beside, put, Role.WORKING)


def original(obj: Any) -> Any:
    """Return the module inside a module that ``torch.compile`` made; another object as itself."""
    return getattr(obj, WRAPPED, obj)


def plain_name(name: str) -> str:
    """Return the name of a module, or of its tensor, without the prefix of ``torch.compile``.

    So compiled and plain models read each other's files. torch's distributed checkpoints use the
    same names.
    """
    return ".".join(each for each in name.split(".") if each != WRAPPED)


def _properties(module: torch.nn.Module) -> dict[str, Any]:
    return {name: getattr(module, name) for name in ("_parameters", "_buffers", "_modules")}


@lru_cache(1024)
def _slots_of(cls: type) -> tuple[str, ...]:
    """Return the slots of a class's objects, outside of their ``__dict__``: mostly none."""
    return tuple(
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    )
