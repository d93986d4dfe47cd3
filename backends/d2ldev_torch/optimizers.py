"""Optimizers: ``state_dict()`` and ``load_state_dict()`` are their file, whatever they keep inside.

``place`` moves what an optimizer keeps in its state, its attributes and their containers. It
follows torch's own policy, whoever wrote the class. It moves the same of the optimizers that it
wraps. The same walk finds tensors that ``state_dict`` lacks.
"""

from __future__ import annotations

import copy
import copyreg
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from d2ldev import UnsupportedValueError
from d2ldev.framework import Kinds, Slot, map_tensors, text_of
from d2ldev_torch.devices import NATIVE_CPU

_PLAIN = frozenset((NoneType, bool, int, float, complex, str, bytes, bytearray))
_LABELS = frozenset((str, int))
_CHANGEABLE = (dict, list, deque)
_ENTERED = (Optimizer, torch.nn.Module, Mapping, list, tuple, deque, AbstractSet)
_ATTEMPTED = "load the state of an optimizer"


@cache
def _own_attributes() -> frozenset[str]:
    """Return the attributes that torch and its schedulers give an optimizer."""
    plain = torch.optim.SGD([torch.zeros(1, device="cpu")], 1.0)
    torch.optim.lr_scheduler.LambdaLR(plain, float)
    plain.step()  # the scheduler notes the call
    return frozenset(vars(plain))


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of their numbers in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def list_parameters(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters with their names; see ``Files.list_parameters``."""
    found: list[tuple[str, torch.Tensor]] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        found += zip(names, group["params"], strict=True)
    return found


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer, beside those that torch gives it."""
    own = _own_attributes()
    return {name: value for name, value in vars(optimizer).items() if name not in own}


# -- what it keeps --------------------------------------------------------------------------------


def list_slots(optimizer: Optimizer) -> list[Slot]:
    """Return what an optimizer keeps; see ``Models.members``.

    This follows torch's policy in ``Optimizer.load_state_dict``: a step that is on the CPU stays
    there, unless the kernel reads it. So does a learning rate.
    """
    stay = () if _reads_numbers(optimizer) else ("step", "lr")
    slots = _walk(optimizer, _CHANGEABLE, {}, frozenset(stay))
    # Nothing moves a generator: its device is named.
    return [
        each._replace(value=each.value.device) if isinstance(each.value, torch.Generator) else each
        for each in slots
    ]


def _reads_numbers(optimizer: Optimizer) -> bool:
    """Return whether a kernel reads the step and the learning rate."""
    return any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def _walk(
    x: Any, entered: Any, seen: dict[int, Any], stay: AbstractSet[str] = frozenset()
) -> list[Slot]:
    """Return what an optimizer or a container holds, as slots.

    Args:
        x: the optimizer, or the container.
        entered: the types of the values whose contents are returned in their place.
        seen: gets each of them by its id.
        stay: the keys of numbers that are left out if they are on the CPU.
    """
    found: list[Slot] = []
    numbers = {}
    if isinstance(x, Optimizer):
        numbers = {id(p): number for number, p in enumerate(parameters_of(x))}
    queue = [("", x)]
    for prefix, outer in queue:
        if id(outer) in seen:
            continue
        seen[id(outer)] = outer
        contents, put = _open(outer)
        for position, (key, value) in enumerate(contents):
            cls = type(value)
            if cls in _PLAIN:
                continue
            label = key if type(key) in _LABELS else numbers.get(id(key), position)
            # Of the class: ``isinstance`` takes three times as long for a tensor.
            if issubclass(cls, entered):
                queue.append((f"{prefix}{label}.", value))
            elif key not in stay or not _is_on_host(value):
                found.append(Slot(f"{prefix}{label}", value, put and partial(put, key)))
    return found


def _open(x: Any) -> tuple[Iterable[tuple[Any, Any]], Any]:
    """Return the contents of a value by their keys, and a function that puts others there."""
    if isinstance(x, dict):
        return x.items(), x.__setitem__
    if isinstance(x, Optimizer):
        own = {"param_groups": x.param_groups, "state": x.state, **_attributes(x)}
        return own.items(), vars(x).__setitem__
    if isinstance(x, torch.nn.Module):
        return [*x.named_parameters(), *x.named_buffers()], None
    return x.items() if isinstance(x, Mapping) else enumerate(x), getattr(x, "__setitem__", None)


def _is_on_host(x: Any) -> bool:
    """Return whether a value is a number in a tensor on the CPU."""
    return isinstance(x, torch.Tensor) and x.is_cpu and not x.dim()


def _find_tensors(x: Any, seen: dict[int, Any]) -> list[tuple[str, Any]]:
    """Return the tensors and generators in an optimizer or container, with their names.

    One scan of attributes and containers, and of the optimizers and modules in them.
    """
    kinds = (torch.Tensor, torch.Generator)
    return [
        (each.name, each.value)
        for each in _walk(x, _ENTERED, seen)
        if isinstance(each.value, kinds)
    ]


def find_hidden(optimizer: Optimizer) -> list[str]:
    """Return the names of the tensors and generators that ``state_dict`` does not show."""
    parameters = parameters_of(optimizer)
    gradients = [x.grad for x in parameters if x.grad is not None]
    held = _find_tensors(optimizer, {})
    shown = [x for _, x in _find_tensors((state_of(optimizer),), {})]
    known = {_address(x) for x in (*shown, *parameters, *gradients)}
    hidden: dict[int, tuple[str, Any]] = {}
    for name, x in held:
        if _address(x) not in known:
            hidden.setdefault(_address(x), (name, x))
    # A tensor in ``state_dict`` that the optimizer does not hold may be the copy of a hidden one.
    addresses = {_address(x) for _, x in held}
    for shown_copy in (x for x in shown if _address(x) not in addresses):
        for address, (_, x) in hidden.items():
            if _is_copy(x, shown_copy):
                del hidden[address]
                break
    return [name for name, _ in hidden.values()]


def _address(x: Any) -> int:
    """Return a number that a tensor shares with its views."""
    with suppress(AttributeError, RuntimeError):  # a generator, or a sparse tensor
        return x.data_ptr() or id(x)
    return id(x)


def _is_copy(x: Any, other: Any) -> bool:
    """Return whether a tensor has the values of another one, or a generator has that state."""
    if isinstance(x, torch.Generator):
        x = x.get_state()
    return (
        isinstance(x, torch.Tensor)
        and (other.shape, other.dtype, other.layout) == (x.shape, x.dtype, x.layout)
        and torch.equal(other.to(x.device), x)
    )


# -- files ----------------------------------------------------------------------------------------


def state_of(optimizer: Optimizer) -> Any:
    """Return what ``state_dict`` of an optimizer returns.

    Without settings that no file can hold, such as dtypes and functions: a program gives them.

    Raises:
        UnsupportedValueError: if it fails.
    """
    try:
        own = optimizer.state_dict()
        if not _has_groups(own):
            return own
        groups = [
            {key: x for key, x in group.items() if _is_held(x)} for group in own["param_groups"]
        ]
        return {**own, "param_groups": groups}
    except Exception as error:
        cls = type(optimizer).__name__
        raise UnsupportedValueError(
            f"save the state of the optimizer {cls}",
            f"its state_dict() fails: {text_of(error)}",
            f"define state_dict() and load_state_dict() in {cls}",
        ) from error


def _has_groups(own: Any) -> bool:
    """Return whether a state has groups with settings, as torch's own ``state_dict`` has."""
    groups = own.get("param_groups") if isinstance(own, Mapping) else None
    return isinstance(groups, list) and all(isinstance(group, dict) for group in groups)


def _is_held(x: Any) -> bool:
    """Return whether a file can hold a setting."""
    if isinstance(x, (list, tuple, dict)):
        return all(map(_is_held, x.values() if isinstance(x, dict) else x))
    return type(x) in _PLAIN or isinstance(x, (torch.Tensor, np.generic, np.ndarray))


def prepare(optimizer: Optimizer, own: Any, kinds: Kinds) -> Callable[[], None]:
    """Return a function that loads what ``state_of`` returned; see ``Files.prepare_state``.

    ``load_state_dict`` may fail halfway, and no contract says how. So it is tried first, and all
    that it has changed is taken back.

    Raises:
        ValueError: if it fails.
    """
    groups, shown = optimizer.param_groups, state_of(optimizer)
    devices = {x.device for x in parameters_of(optimizer)}
    if len(devices) == 1:
        # As ``torch.load`` returns them. A class of the user's may not move them.
        (device,) = devices
        # A tensor that is on the host now stays there, such as the state of a generator.
        now = {name: x.device for name, x in _find_tensors(shown, {})}
        stay = {id(x) for name, x in _find_tensors(own, {}) if now.get(name) == NATIVE_CPU}
        keeps_numbers = not _reads_numbers(optimizer)

        def move(x: torch.Tensor) -> torch.Tensor:
            is_of_host = id(x) in stay or (keeps_numbers and not x.dim())
            return x if is_of_host else x.to(device)

        own = map_tensors(move, own, kinds, _ATTEMPTED)
    if _has_groups(own) and len(own["param_groups"]) == len(groups):
        # A file lacks some settings. A scheduler, or a newer torch, may have added others here.
        # The names belong to the parameters here.
        merged = [
            {**mine, **{key: x for key, x in theirs.items() if key != "param_names"}}
            for mine, theirs in zip(groups, own["param_groups"], strict=True)
        ]
        own = {**own, "param_groups": merged}
    is_plain = type(optimizer).load_state_dict is Optimizer.load_state_dict
    tensors = {id(x): x for _, x in _find_tensors((own,), {})}

    def load() -> None:
        # Other containers each time: a class of the user's may take out what it reads.
        optimizer.load_state_dict(copy.deepcopy(own, {**tensors}))
        if is_plain:
            _keep_dtypes(optimizer, own)

    restore = _remember((optimizer, shown, own), with_values=not is_plain)
    try:
        load()
    except Exception as error:
        raise ValueError(f"its load_state_dict() fails: {text_of(error)}") from error
    finally:
        restore()
    return load


def _keep_dtypes(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """Give the state its own dtypes: torch casts it to the dtype of its parameter."""
    parameters = parameters_of(optimizer)
    for number, kept in own["state"].items():
        if not isinstance(kept, Mapping) or isinstance(number, str):
            continue
        now = optimizer.state[parameters[number]]
        for key, x in kept.items():
            if isinstance(x, torch.Tensor) and key in now and now[key].dtype != x.dtype:
                now[key] = x.to(now[key].device)


def _remember(changeable: Any, *, with_values: bool) -> Callable[[], None]:
    """Return a function that gives an optimizer the present contents of all its containers.

    Args:
        changeable: the optimizer, what it shows, and the state whose tensors it may change.
        with_values: whether it also writes the present values into the tensors.
    """
    seen: dict[int, Any] = {}
    found = [x for _, x in _find_tensors(changeable, seen)]
    tensors = [x for x in found if isinstance(x, torch.Tensor) and with_values]
    values = [(x, x.detach().to("cpu", copy=True)) for x in tensors]
    holders = [vars(x) if isinstance(x, Optimizer) else x for x in seen.values()]
    kept = [(x, copy.copy(x)) for x in holders if isinstance(x, (*_CHANGEABLE, set))]

    @torch.no_grad()
    def restore() -> None:
        for x, contents in kept:
            x.clear()
            (x.update if isinstance(x, (dict, set)) else x.extend)(contents)
        for tensor, value in values:
            tensor.copy_(value)

    return restore


def reorder(optimizer: Optimizer, own: Any, order: Sequence[int]) -> dict[str, Any]:
    """Return a state whose parameters have the optimizer's order.

    Args:
        optimizer: whose parameters they are.
        own: what ``state_of`` returned of one with the parameters in another order.
        order: see ``Files.prepare_state``.

    Raises:
        ValueError: if the state is not made of one for each parameter, or if its groups have other
            parameters.
    """
    problem = "it has the parameters in another order: give them in the order of the file"
    if not isinstance(own, Mapping) or own.keys() != {"state", "param_groups"}:
        raise ValueError(f"{problem}. Its state_dict() has more than the state of each")
    state, theirs = own["state"], own["param_groups"]
    if sorted(i for group in theirs for i in group["params"]) != sorted(order):
        raise ValueError(problem)
    parameters = parameters_of(optimizer)
    for number, x in enumerate(parameters):
        for key, value in state.get(order[number], {}).items():
            is_tensor = isinstance(value, torch.Tensor)
            is_one = value.numel() <= max(x.numel(), 1) if is_tensor else type(value) in _PLAIN
            if not is_one:
                raise ValueError(f"{problem}. Its {key} may belong to several")
    numbers = {id(x): number for number, x in enumerate(parameters)}
    groups = []
    for group in optimizer.param_groups:
        mine = [numbers[id(x)] for x in group["params"]]
        wanted = {order[i] for i in mine}
        found = next((each for each in theirs if {*each["params"]} == wanted), None)
        if found is None:
            raise ValueError("its groups are divided in another way")
        groups.append({**found, "params": mine})
    found_at = {position: number for number, position in enumerate(order)}
    kept = {found_at.get(key, key): value for key, value in state.items()}
    return {"state": kept, "param_groups": groups}


# -- several processes ----------------------------------------------------------------------------


def reduce(optimizer: Optimizer) -> Any:
    """Return how ``pickle`` rebuilds an optimizer; see ``Parallel.reduce``.

    torch itself pickles only ``state``, ``param_groups`` and ``defaults``.
    """
    cls = type(optimizer)
    if cls.__getstate__ is not Optimizer.__getstate__:
        return NotImplemented
    state = {**optimizer.__getstate__(), **_attributes(optimizer)}
    has_scheduler = all("initial_lr" in group for group in optimizer.param_groups)
    restore = _restore_with_scheduler if has_scheduler else None
    return copyreg.__newobj__, (cls,), state, None, None, restore  # type: ignore[attr-defined]


def _restore_with_scheduler(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore an optimizer whose ``step`` a scheduler of torch has wrapped.

    Without the wrapper the scheduler warns that ``step`` was overridden. Each new scheduler wraps
    it: https://github.com/pytorch/pytorch/blob/main/torch/optim/lr_scheduler.py
    """
    optimizer.__setstate__(state)
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
