"""Optimizers: how to write the whole state of an optimizer into a file and restore it.

torch's own optimizers keep all state in ``state`` and ``param_groups``. Others keep momenta in
attributes, or wrap another optimizer. So d2ldev looks through their attributes. It also calls their
own ``state_dict`` and ``load_state_dict``.

In a state, a dict with the key ``_TAG`` stands for any value but a number, text, tensor or
container.
"""

from __future__ import annotations

import copyreg
import io
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache, partial
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np
import torch

from d2ldev.framework import (
    OBJECT,
    PLAIN,
    TENSOR,
    Container,
    Keepers,
    Kind,
    Kinds,
    Member,
    UnsupportedValueError,
    describe,
    join_path,
    label_children,
    leaves,
    map_tensors,
    optimizer_refusal,
    text_of,
)
from d2ldev_torch.devices import NATIVE_CPU

_TAG = "d2ldev"
_SAME = {_TAG: "same"}
_MISSING = object()
_NO_SETTINGS: Mapping[str, Any] = {}
# A file restores values of these types exactly.
_VALUES = frozenset((NoneType, bool, int, float, complex, str, bytes, bytearray))
# A file cannot hold the state of these objects, which changes with each call.
_STATEFUL = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


@cache
def _own_attributes() -> frozenset[str]:
    """Return the attributes that torch and its schedulers give an optimizer, beside the state."""
    # The first optimizer imports torch's compiler. So this runs only for a user's own optimizer.
    plain = torch.optim.SGD([torch.zeros(1, device="cpu")], 1.0)
    return frozenset((*vars(plain), "step", "_opt_called"))


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps its whole state in ``state`` and ``param_groups``."""
    return type(optimizer).__module__.startswith("torch.optim.") and not _has_hooks(optimizer)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a program registered hooks that change the state before it is read."""
    attributes = vars(optimizer)
    return bool(
        attributes.get("_optimizer_state_dict_post_hooks")
        or attributes.get("_optimizer_load_state_dict_pre_hooks")
    )


def list_members(optimizer: torch.optim.Optimizer) -> Iterator[Member]:
    """Yield the members of an optimizer; see ``Models.members``."""
    numbers: dict[int, int] = {}
    groups: dict[int, Mapping[str, Any]] = {}
    number = 0
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if type(value) not in _VALUES and (key == "params" or not _is_host_scalar(value)):
                yield f"param_groups.{i}.{key}", value, group.__setitem__, key
        for x in group["params"]:
            numbers.setdefault(id(x), number)
            groups[id(x)] = group
            number += 1
    for owner, state in optimizer.state.items():
        name = f"state.{numbers.get(id(owner), owner)}"
        if type(state) is not dict and not isinstance(state, MutableMapping):
            yield name, state, optimizer.state.__setitem__, owner
            continue
        settings, put = groups.get(id(owner), _NO_SETTINGS), state.__setitem__
        for key, value in state.items():
            if type(value) in _VALUES or (
                is_kept_on_host(key, settings) and _is_host_scalar(value)
            ):
                continue
            yield f"{name}.{key}" if type(key) is str else join_path(name, key), value, put, key
    if is_of_torch(optimizer):
        return
    for name, value in _attributes(optimizer):
        if type(value) in _VALUES:
            continue
        if isinstance(value, MutableMapping) and any(isinstance(x, torch.Tensor) for x in value):
            for key, inner in value.items():
                label = numbers.get(id(key), "") if isinstance(key, torch.Tensor) else key
                yield join_path(name, label), inner, value.__setitem__, key
        else:
            yield name, value, vars(optimizer).__setitem__, name


def is_simple(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each value of an optimizer belongs to one parameter, or is a number."""
    if is_of_torch(optimizer):
        return True
    values = [x for _, x in _attributes(optimizer)]
    return not _has_own_state(optimizer) and all(type(x) in _VALUES or callable(x) for x in values)


def reduce(optimizer: torch.optim.Optimizer) -> Any:
    """Return how ``pickle`` rebuilds an optimizer; see ``Parallel.reduce``.

    torch itself pickles only ``state``, ``param_groups`` and ``defaults``.
    """
    cls = type(optimizer)
    if is_of_torch(optimizer) or cls.__getstate__ is not torch.optim.Optimizer.__getstate__:
        return NotImplemented
    by_id = {id(x): x for x in parameters_of(optimizer)}
    attributes = {
        name: _ById([by_id[key] for key in x], list(x.values()))
        if type(x) is dict and x and all(type(key) is int and key in by_id for key in x)
        else x
        for name, x in _attributes(optimizer)
    }
    state = {**optimizer.__getstate__(), **attributes}
    return copyreg.__newobj__, (cls,), state  # type: ignore[attr-defined]


class _ById:
    """A dict by the ids of parameters. The ids differ in another process."""

    def __init__(self, parameters: list[torch.Tensor], values: list[Any]) -> None:
        self._operands = parameters, values

    def __reduce__(self) -> Any:
        return _by_id, self._operands


def _by_id(parameters: list[torch.Tensor], values: list[Any]) -> dict[int, Any]:
    return {id(x): value for x, value in zip(parameters, values, strict=True)}


def is_kept_on_host(key: str, group: Mapping[str, Any]) -> bool:
    """Return whether a value of an optimizer's state stays on the CPU.

    This is torch's policy in ``Optimizer.load_state_dict``: the step does, unless the kernel reads
    it.
    """
    return key == "step" and not (group.get("capturable") or group.get("fused"))


def _is_host_scalar(value: Any) -> bool:
    """Return whether a value is a 0-dim CPU tensor, which torch combines with any device."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of their numbers in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the number of each parameter in a state, by its id."""
    found: dict[int, int] = {}
    for number, x in enumerate(parameters_of(optimizer)):
        found.setdefault(id(x), number)
    return found


def _attributes(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Return the attributes of an optimizer, beside its state."""
    own = _own_attributes()
    return [(name, value) for name, value in vars(optimizer).items() if name not in own]


def _has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class of an optimizer defines how its state is read and written."""
    cls, base = type(optimizer), torch.optim.Optimizer
    if _has_hooks(optimizer):
        return True
    return cls.state_dict is not base.state_dict and cls.load_state_dict is not base.load_state_dict


class States:
    """States of optimizers that are not torch's own.

    Args:
        kinds: how the framework classifies types.
        keepers: how to look inside objects.
    """

    def __init__(self, kinds: Kinds, keepers: Keepers) -> None:
        self.kinds, self.keepers = kinds, keepers

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer as a nesting that a file can hold.

        Raises:
            UnsupportedValueError: if a file cannot restore something in it.
        """
        return _Writer(self, optimizer, {}).state()

    def check(self, optimizer: torch.optim.Optimizer, state: Any) -> Callable[[], None]:
        """Return a function that sets the state of an optimizer and cannot fail.

        Raises:
            ValueError: if the state does not fit the optimizer.
        """
        own = state.get("own")
        if own is None:
            return _Reader(self, optimizer).check(state)
        # The optimizer's own function may fail halfway, and no contract says how. So it is tried
        # first, and its visible changes to the optimizer are undone.
        before = map_tensors(
            lambda x: x.detach().cpu().clone(),
            _Writer(self, optimizer, {}, is_lenient=True).state(),
            self.kinds,
            "load the state of an optimizer",
        )

        def put() -> None:
            moved = _on_device_of(optimizer, own["state"], self.kinds)
            try:
                optimizer.load_state_dict(moved)
            except Exception as error:
                if own["is_needed"]:
                    raise ValueError(f"its load_state_dict() fails: {text_of(error)}") from error
            _Reader(self, optimizer).check(state)()

        try:
            put()
        finally:
            _Reader(self, optimizer).check(before)()
        return put


def _on_device_of(optimizer: torch.optim.Optimizer, own: Any, kinds: Kinds) -> Any:
    """Return a state with its tensors on the parameters' devices; 0-dim tensors stay."""
    devices = {x.device for x in parameters_of(optimizer)}
    if len(devices) != 1:
        return own
    (device,) = devices
    attempted = "load the state of an optimizer"
    return map_tensors(
        lambda x: x.to(device, copy=True) if x.dim() else x.clone(), own, kinds, attempted
    )


class _Writer:
    """The state of one optimizer, as a nesting that a file can hold.

    Args:
        states: how to look inside objects.
        optimizer: stays unchanged.
        seen: values that were found before, by their id; each is written once.
        is_lenient: whether to leave out values that a file cannot restore.

    Attributes:
        has_left_out: whether a value was left out.
    """

    def __init__(
        self,
        states: States,
        optimizer: torch.optim.Optimizer,
        seen: dict[int, Any],
        *,
        is_lenient: bool = False,
    ) -> None:
        self._states, self._optimizer, self._seen = states, optimizer, seen
        self._kinds = states.kinds
        self._numbers = _numbers(optimizer)
        self._is_lenient, self.has_left_out = is_lenient, False
        # A new optimizer has nothing there, and a file cannot make objects.
        self._is_of_state = False
        # The settings are written below, and an inner optimizer may share them.
        for x in (optimizer, optimizer.state, optimizer.param_groups):
            seen[id(x)] = x

    def state(self) -> dict[str, Any]:
        """Return the whole state; see ``States.of``."""
        optimizer = self._optimizer
        own = None if self._is_lenient else self._own()
        self._is_lenient |= own is not None
        self._is_of_state = True
        state = {
            self._owner(x): self._write(kept, f"state.{self._owner(x)}")
            for x, kept in optimizer.state.items()
        }
        self._is_of_state = False
        groups = [
            self._settings(group, f"param_groups.{i}")
            for i, group in enumerate(optimizer.param_groups)
        ]
        told: dict[str, Any] = {"state": state, "param_groups": groups}
        attributes = {name: self._write(x, name) for name, x in _attributes(optimizer)}
        attributes = {name: x for name, x in attributes.items() if not _is_constant(x)}
        if attributes:
            told["attributes"] = attributes
        if own is not None:
            told["own"] = {"state": own, "is_needed": self.has_left_out}
        return told

    def _own(self) -> Any:
        """Return the optimizer's own ``state_dict()``; None if it fails or no file can hold it.

        Then its attributes have to hold all state. Some ``state_dict`` methods fail with newer
        releases of torch.
        """
        if not _has_own_state(self._optimizer):
            return None
        try:
            own = self._optimizer.state_dict()
        except Exception:
            return None
        return own if _is_held(own, self._kinds) else None

    def _owner(self, x: Any) -> Any:
        """Return a file's form of a key of the state."""
        if isinstance(x, torch.Tensor) and id(x) in self._numbers:
            return self._numbers[id(x)]
        if isinstance(x, str):
            return x
        raise self._refusal(x, "state")

    def _settings(self, group: Mapping[str, Any], path: str) -> dict[str, Any]:
        numbers = [self._numbers[id(x)] for x in group["params"]]
        others = {
            key: self._write(x, f"{path}.{key}") for key, x in group.items() if key != "params"
        }
        return {**others, "params": numbers}

    def _write(self, x: Any, path: str) -> Any:
        kind = self._kinds[type(x)]
        if kind is TENSOR:
            number = self._numbers.get(id(x))
            return x if number is None else {_TAG: "parameter", "number": number}
        if kind is PLAIN or isinstance(x, np.ndarray):
            return x if _is_value(x) else _SAME
        if id(x) in self._seen:
            return _SAME
        self._seen[id(x)] = x
        if not isinstance(kind, Kind):
            return self._container(x, kind, path)
        if self._is_of_state:
            return self._unknown(x, path)
        if isinstance(x, torch.optim.Optimizer):
            inner = _Writer(self._states, x, self._seen, is_lenient=self._is_lenient)
            written = {_TAG: "optimizer", "state": inner.state()}
            self.has_left_out |= inner.has_left_out
            return written
        if isinstance(x, torch.nn.Module):
            others = {name: y for name, y in _tensors_of(x) if id(y) not in self._numbers}
            return {_TAG: "module", "tensors": others} if others else _SAME
        if isinstance(x, torch.Generator):
            return {_TAG: "generator", "state": x.get_state()}
        return self._object(x, path)

    def _container(self, x: Any, kind: Container, path: str) -> Any:
        if isinstance(x, (set, frozenset)):
            return x if _is_held(x, self._kinds) else self._unknown(x, path)
        found = label_children(x, kind, path, "save the state of an optimizer")
        if not isinstance(x, Mapping):
            items = [self._write(y, join_path(path, label)) for label, y in found]
            if type(x) is deque:
                return deque(items, x.maxlen)
            if type(x) in (list, tuple):
                return type(x)(items)
            like = {_TAG: "like", "items": items}
            return self._unknown(x, path) if self._is_of_state else like
        for by, number_of in (
            ("parameter", lambda key: self._numbers.get(id(key))),
            ("id", self._numbers.get),
        ):
            numbers = [None if isinstance(key, str) else number_of(key) for key in x]
            if numbers and None not in numbers:
                values = zip(numbers, x.values(), strict=True)
                by_number = {n: self._write(y, join_path(path, n)) for n, y in values}
                return {_TAG: f"by {by}", "items": by_number}
        if not all(_is_key(key) for key in x):
            return self._unknown(x, path)
        return {label: self._write(y, join_path(path, label)) for label, y in found}

    def _object(self, x: Any, path: str) -> Any:
        is_stateful = isinstance(x, Iterator) and not isinstance(x, io.IOBase)
        if is_stateful or isinstance(x, _STATEFUL):
            return self._unknown(x, path)
        if hasattr(type(x), "state_dict") and hasattr(type(x), "load_state_dict"):
            state = x.state_dict()
            is_held = _is_held(state, self._kinds)
            return {_TAG: "state_dict", "state": state} if is_held else self._unknown(x, path)
        keeper = self._states.keepers[type(x)]
        if keeper is None:
            return _SAME
        if not keeper.is_fixed:
            kept = keeper.members(x)
            written = {name: self._write(y, join_path(path, name)) for name, y, _, _ in kept}
            return {_TAG: "object", "kept": written}
        hidden = self._write_hidden(x, path)
        return self._unknown(*hidden) if hidden else _SAME

    def _write_hidden(self, x: Any, path: str) -> tuple[Any, str] | None:
        """Return a tensor inside an object that cannot be changed, for example in a closure."""
        waiting, entered = [(x, path)], {*self._seen} - {id(x)}
        while waiting:
            value, name = waiting.pop()
            kind = self._kinds[type(value)]
            if kind is TENSOR and id(value) not in self._numbers:
                return value, name
            if kind in (TENSOR, PLAIN, OBJECT) or id(value) in entered:
                continue
            entered.add(id(value))
            if not isinstance(kind, Kind):
                found = label_children(value, kind, name, "save the state of an optimizer")
                waiting += [(inner, join_path(name, label)) for label, inner in found]
            elif keeper := self._states.keepers[type(value)]:
                kept = keeper.members(value)
                waiting += [(inner, join_path(name, label)) for label, inner, _, _ in kept]
        return None

    def _unknown(self, x: Any, path: str) -> Any:
        if not self._is_lenient:
            raise self._refusal(x, path)
        self.has_left_out = True
        return _SAME

    def _refusal(self, x: Any, path: str) -> UnsupportedValueError:
        cls = type(self._optimizer).__name__
        attempted = f"save the state of the optimizer {cls}"
        return optimizer_refusal(attempted, self._optimizer, path, x)


class _Reader:
    """A state to restore in one optimizer.

    Args:
        states: how to look inside objects.
        optimizer: stays unchanged until the function that ``check`` returns is called.
    """

    def __init__(self, states: States, optimizer: torch.optim.Optimizer) -> None:
        self._states, self._optimizer = states, optimizer
        self._parameters = parameters_of(optimizer)
        self._puts: list[Callable[[], object]] = []
        # A tensor that occurs in two places of the state stays one tensor.
        self._moved: dict[tuple[int, torch.device], torch.Tensor] = {}

    def check(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that gives the optimizer the state; see ``States.check``."""
        optimizer = self._optimizer
        kept = {self._owner(owner): self._keep(owner, x) for owner, x in state["state"].items()}
        groups = [
            self._settings(group, saved)
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
        ]
        attributes, device = {}, self._parameters[0].device
        for name, x in state.get("attributes", {}).items():
            if not (isinstance(name, str) and name.isidentifier()) or name in _own_attributes():
                raise ValueError(f"{describe(name)} is not an attribute of an optimizer's own")
            now = vars(optimizer).get(name, _MISSING)
            attributes[name] = self._read(x, now, name, device)

        def put() -> None:
            optimizer.state.clear()
            optimizer.state.update(kept)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
            vars(optimizer).update(attributes)
            for each in self._puts:
                each()

        return put

    def _owner(self, owner: Any) -> Any:
        return owner if isinstance(owner, str) else self._parameters[owner]

    def _keep(self, owner: Any, saved: Any) -> Any:
        now = self._optimizer.state.get(self._owner(owner), _MISSING)
        path, device = f"state.{owner}", self._parameters[0].device
        if not isinstance(owner, str):
            device = self._parameters[owner].device
        if not isinstance(saved, Mapping) or _TAG in saved:
            return self._read(saved, now, path, device)
        groups = self._optimizer.param_groups
        group = next((g for g in groups if any(x is self._owner(owner) for x in g["params"])), {})
        inner = now if isinstance(now, Mapping) else {}
        return {
            key: self._read(
                x,
                inner.get(key, _MISSING),
                join_path(path, key),
                NATIVE_CPU if is_kept_on_host(key, group) else device,
            )
            for key, x in saved.items()
        }

    def _settings(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        device = next(iter(group["params"]), self._parameters[0]).device
        return {
            key: self._read(x, group.get(key, _MISSING), key, device)
            for key, x in saved.items()
            if key != "params"
        }

    def _read(self, saved: Any, now: Any, path: str, device: torch.device) -> Any:
        """Return a value of the state in the optimizer's form.

        Args:
            saved: the value.
            now: the optimizer's present value; ``_MISSING`` if it has none.
            path: the name of the value.
            device: for its tensors; those that are on the CPU now stay there.
        """
        if isinstance(saved, torch.Tensor):
            is_on_host = isinstance(now, torch.Tensor) and now.is_cpu
            key = id(saved), NATIVE_CPU if is_on_host else device
            if key not in self._moved:
                self._moved[key] = saved.to(key[1])
            return self._moved[key]
        if isinstance(saved, Mapping):
            if _TAG in saved:
                return self._read_tagged(saved, now, path, device)
            return self._fill_mapping(saved, now, path, device, {key: key for key in saved})
        if isinstance(saved, (list, tuple, deque)):
            old = list(now) if isinstance(now, (list, tuple, deque)) else []
            old += [_MISSING] * (len(saved) - len(old))
            new = [
                self._read(x, was, join_path(path, i), device)
                for i, (x, was) in enumerate(zip(saved, old, strict=False))
            ]
            if isinstance(now, (list, deque)) and type(now) is type(saved):
                # Another holder of the list then sees the new items, too.
                self._puts += [now.clear, lambda: now.extend(new)]
                return now
            return deque(new, saved.maxlen) if isinstance(saved, deque) else type(saved)(new)
        return saved

    def _fill_mapping(
        self,
        saved: Mapping[Any, Any],
        now: Any,
        path: str,
        device: torch.device,
        keys: Mapping[Any, Any],
    ) -> Any:
        """Return a mapping with the values of a state; the present mapping, if there is one."""
        old = now if isinstance(now, Mapping) else {}
        new = {
            keys[label]: self._read(
                x, old.get(keys[label], _MISSING), join_path(path, label), device
            )
            for label, x in saved.items()
        }
        if not isinstance(now, MutableMapping):
            return OrderedDict(new) if isinstance(saved, OrderedDict) else new
        self._puts += [now.clear, lambda: now.update(new)]
        return now

    def _read_tagged(
        self, saved: Mapping[str, Any], now: Any, path: str, device: torch.device
    ) -> Any:
        tag = saved[_TAG]
        if tag == "parameter":
            return self._parameters[saved["number"]]
        if tag in ("by parameter", "by id"):
            keys = {n: self._parameters[n] for n in saved["items"]}
            by_id = {n: id(x) for n, x in keys.items()}
            keys = keys if tag == "by parameter" else by_id
            return self._fill_mapping(saved["items"], now, path, device, keys)
        if now is _MISSING:
            raise ValueError(f"its {path}: an object that the optimizer does not have yet")
        kind = self._states.kinds[type(now)]
        if tag == "like" and not isinstance(kind, Kind):
            found = label_children(now, kind, path, "load the state of an optimizer")
            pairs = zip(saved["items"], found, strict=True)
            return kind.rebuild(
                now, [self._read(x, was, join_path(path, n), device) for x, (n, was) in pairs]
            )
        if tag == "optimizer" and isinstance(now, torch.optim.Optimizer):
            self._puts.append(self._states.check(now, saved["state"]))
        elif tag == "module" and isinstance(now, torch.nn.Module):
            tensors = dict(_tensors_of(now))
            for name, x in saved["tensors"].items():
                if tensors[name].shape != x.shape:
                    raise ValueError(f"its {path}.{name}: {tensors[name].shape}, not {x.shape}")
                self._puts.append(partial(_write, tensors[name], x))
        elif tag == "generator" and isinstance(now, torch.Generator):
            self._try(now.set_state, now.get_state(), saved["state"])
        elif tag == "state_dict" and hasattr(type(now), "load_state_dict"):
            self._try(now.load_state_dict, now.state_dict(), saved["state"])
        elif tag == "object":
            self._read_object(saved["kept"], now, path, device)
        elif tag != "same":
            raise ValueError(f"its {path}: {describe(now)}, which has no such state")
        return now

    def _read_object(
        self, saved: Mapping[str, Any], now: Any, path: str, device: torch.device
    ) -> None:
        keeper = self._states.keepers[type(now)]
        if keeper is None:
            raise ValueError(f"its {path}: {describe(now)}, which has no such state")
        kept = {name: (x, put, key) for name, x, put, key in keeper.members(now)}
        for name, x in saved.items():
            was, put, key = kept.get(name, (_MISSING, partial(setattr, now), name))
            new = self._read(x, was, join_path(path, name), device)
            if new is not was:
                if put is None:
                    raise ValueError(f"its {path}.{name} cannot be replaced")
                self._puts.append(partial(put, key, new))

    def _try(self, load: Callable[[Any], object], before: Any, state: Any) -> None:
        """Try a function that may refuse a state, and plan its call."""
        try:
            load(state)
        finally:
            load(before)
        self._puts.append(partial(load, state))


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


@torch.no_grad()
def _write(x: torch.Tensor, new: torch.Tensor) -> None:
    x.copy_(new)


def _is_value(x: Any) -> bool:
    """Return whether a file restores a plain value, or an array, exactly."""
    return type(x) in _VALUES or isinstance(x, np.generic) or type(x) is np.ndarray


def _is_key(x: Any) -> bool:
    if type(x) is tuple:
        return all(type(each) is not tuple and _is_key(each) for each in x)
    return type(x) in (str, bytes, bool, int, float, NoneType)


def _is_held(x: Any, kinds: Kinds) -> bool:
    """Return whether a file can hold all values of a nesting."""
    return all(kind is TENSOR or _is_value(leaf) for _, leaf, kind in leaves(x, kinds))


def _is_constant(written: Any) -> bool:
    """Return whether an attribute adds nothing to the state."""
    if isinstance(written, Mapping):
        if _TAG not in written:
            return bool(written) and all(map(_is_constant, written.values()))
        if written[_TAG] in ("same", "parameter"):
            return True
        inner = written.get("kept") or written.get("items") or ()
        values = inner.values() if isinstance(inner, Mapping) else inner
        return bool(values) and all(map(_is_constant, values))
    return isinstance(written, (list, tuple)) and bool(written) and all(map(_is_constant, written))
