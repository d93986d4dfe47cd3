"""Files: torch's layouts are canonical; the state of an optimizer is saved with its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from d2ldev.framework import (
    SPARSE,
    Files,
    Kinds,
    Layer,
    Tensor,
    Tensors,
    describe,
    join_path,
)
from d2ldev_torch import optimizers
from d2ldev_torch.devices import NATIVE_CPU
from d2ldev_torch.models import original, plain_name
from d2ldev_torch.tensors import array_of, foreign_dtype, make_strided, view_unsigned

_WITH_KERNELS: Any = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
# The keys of an optimizer's state. Earlier files have the keys of ``state_dict`` beside others.
_KEYS = frozenset({"class", "shapes", "state_dict"})
_OWN_KEYS = frozenset({"state", "param_groups"})
_CONVOLUTIONS: Any = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)
# Modules of torch whose layers keep the order of their input's columns or channels.
_KEEP_ORDER = tuple(
    f"torch.nn.modules.{name}"
    for name in (
        *("activation", "batchnorm", "dropout", "instancenorm"),
        *("normalization", "padding", "pooling", "upsampling"),
    )
)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class TorchFiles(Files):
    """Tensors, ``torch.nn.Sequential`` and ``torch.optim.Optimizer`` in files.

    Args:
        tensors: the area of tensors.
        kinds: how the framework classifies types.
    """

    def __init__(self, tensors: Tensors, kinds: Kinds) -> None:
        super().__init__(tensors)
        self._kinds = kinds

    # -- tensors ----------------------------------------------------------------------------------

    def borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        if x.layout is not torch.strided:
            raise ValueError(SPARSE)
        host = make_strided(x).to("cpu").resolve_conj().resolve_neg()
        # ``Tensor.numpy`` would mark the memory as lent, and ``load_into`` would not write to it.
        return array_of(host, np.from_dlpack)

    def adopt(self, array: np.ndarray[Any, Any], dtype: str, native: Any) -> Tensor:
        if native != NATIVE_CPU:
            return super().adopt(array, dtype, native)
        foreign = foreign_dtype(dtype)
        if foreign is None:
            return torch.from_numpy(array)
        return torch.from_numpy(view_unsigned(array)).view(foreign)

    # -- models -----------------------------------------------------------------------------------

    def layers(self, model: Any) -> Sequence[Layer] | None:
        if not isinstance(model, torch.nn.Module):
            return None
        model = original(model)
        if type(model) is not torch.nn.Sequential:
            return None
        layers = []
        for layer in model:
            # By the exact type: a parametrized layer computes its kernel.
            if type(layer) in _WITH_KERNELS:
                layers.append(Layer(layer.weight, layer.bias))
            elif not _keeps_order(layer):
                return None
        return layers

    def complete(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        undo: Callable[..., object],
        *,
        is_strict: bool,
    ) -> tuple[Collection[str], Collection[str]]:
        if isinstance(model, torch.nn.Module):
            for path, module in model.named_modules(remove_duplicate=False):
                for name in _empty_buffers(module):
                    key = join_path(plain_name(path), name)
                    if dtypes.get(key) in self.tensors.dtype_names:
                        undo(setattr, module, name, None)
                        dtype, device = self.tensors.dtype(dtypes[key]), _device_in((module, model))
                        setattr(module, name, torch.empty(shapes[key], dtype=dtype, device=device))
                kept = {
                    **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
                    **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
                }
                waiting = {name: x for name, x in kept.items() if is_lazy(x)}
                names = {name: join_path(plain_name(path), name) for name in waiting}
                # All tensors of a module or none: its first batch would make the missing ones, and
                # fail at the others.
                if not waiting or not shapes.keys() >= {*names.values()}:
                    continue
                found = {name: shapes[key] for name, key in names.items()}
                sizes = _size_of_input(module, found)
                if sizes is None:
                    continue
                # The first batch would leave the size at 0.
                for key, size in sizes.items():
                    undo(setattr, module, key, getattr(module, key))
                    setattr(module, key, size)
                for name, x in waiting.items():
                    undo(_make_lazy, x, type(x))
                    x.materialize(found[name])
        return (), ()  # a file lacks these as tensors, too

    # -- optimizers -------------------------------------------------------------------------------

    def state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return None
        return {
            "class": type(optimizer).__name__,
            "shapes": [[list(p.shape) for p in g["params"]] for g in optimizer.param_groups],
            "state_dict": optimizers.state_of(optimizer),
        }

    def list_parameters(self, optimizer: Any) -> Sequence[tuple[str, Tensor]]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return ()
        return [(plain_name(label), x) for label, x in optimizers.list_parameters(optimizer)]

    def prepare_state(
        self, optimizer: Any, state: Any, order: Sequence[int] | None = None
    ) -> Callable[[], None]:
        own = _check(optimizer, state, order)
        if order is not None:
            own = optimizers.reorder(optimizer, own, order)
        if type(optimizer).__module__.startswith("torch.optim."):
            # The state of another one may have any shape.
            _check_own(optimizer, own)
            _check_next_step(optimizer, own)
        return optimizers.prepare(optimizer, own, self._kinds)


def _empty_buffers(module: torch.nn.Module) -> list[str]:
    """Return the names of the buffers that a module registers as None, and sets in a call.

    In layers of torch, None means that they lack the buffer: for example normalization without
    running statistics.
    """
    if type(module).__module__.startswith("torch."):
        return []
    # Private: the public list leaves out buffers that are None, and says not which are saved.
    kept, not_saved = module._buffers, module._non_persistent_buffers_set
    own = _STATISTICS if _is_norm(module) else ()
    return [name for name in kept if kept[name] is None and name not in (*not_saved, *own)]


def _is_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is a batch or instance normalization: only these have the switch."""
    return hasattr(module, "track_running_stats")


def _device_in(modules: Iterable[torch.nn.Module]) -> torch.device | None:
    """Return the device of the first tensor in the modules; None without tensors."""
    tensors = (x for module in modules for x in chain(module.parameters(), module.buffers()))
    return next((x.device for x in tensors), None)


def _size_of_input(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int] | None:
    """Return the attribute of a lazy torch layer that holds the size of its input.

    Args:
        module: the layer; another module has no such attribute.
        shapes: the file's shapes of all tensors that wait for the first batch.

    Returns:
        None if the layer was made with other sizes than the file's.
    """
    fitting: dict[str, tuple[int, ...]]
    first, second = (*next(iter(shapes.values())), 0, 0)[:2]
    if _is_norm(module):
        fitting, size = dict.fromkeys(shapes, (first,)), {"num_features": first}
    elif isinstance(module, torch.nn.Linear):
        n_out = module.out_features
        fitting, size = {"weight": (n_out, second), "bias": (n_out,)}, {"in_features": second}
    elif isinstance(module, _CONVOLUTIONS):
        n_out, groups = module.out_channels, module.groups
        is_transposed = module.transposed
        rows = (first, n_out // groups) if is_transposed else (n_out, second)
        fitting = {"weight": (*rows, *module.kernel_size), "bias": (n_out,)}
        size = {"in_channels": first if is_transposed else second * groups}
    else:
        return {}
    return size if all(fitting.get(key, x) == x for key, x in shapes.items()) else None


def _make_lazy(x: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Turn a parameter or buffer back into a lazy one, without memory."""
    x.data = x.data.new_empty(0)
    x.__class__ = kind


def _keeps_order(layer: torch.nn.Module) -> bool:
    """Return whether a layer without kernels keeps the order of its input."""
    kind = type(layer)
    return kind in (torch.nn.Flatten, torch.nn.Identity) or kind.__module__ in _KEEP_ORDER


def _check(optimizer: torch.optim.Optimizer, saved: Any, order: Sequence[int] | None) -> Any:
    """Return what ``state_dict`` returned of an optimizer like this one.

    Raises:
        ValueError: if the state belongs to another optimizer.
    """
    keys = saved.keys() if isinstance(saved, Mapping) else ()
    if not keys or keys not in (_KEYS, _KEYS - {"state_dict"} | _OWN_KEYS):
        raise ValueError(f"{describe(saved)} is not the state of a torch optimizer")
    here = type(optimizer).__name__
    if saved["class"] != here:
        raise ValueError(f"its class: {here}, {describe(saved['class'])} in the state")
    mine = [[list(x.shape) for x in group["params"]] for group in optimizer.param_groups]
    theirs = saved["shapes"]
    if order is not None:
        mine, there = [list(chain(*mine))], list(chain(*theirs))
        theirs = [[there[i] for i in order]] if len(there) == len(order) else theirs
    if mine != theirs:
        raise ValueError(f"its shapes: {mine}, {describe(theirs)} in the state")
    return saved.get("state_dict", {key: saved.get(key) for key in sorted(_OWN_KEYS)})


def _check_own(optimizer: torch.optim.Optimizer, own: Any) -> None:
    """Raise a ``ValueError`` if this is not the ``state_dict`` of one of torch's optimizers."""
    if not isinstance(own, Mapping) or not own.keys() >= _OWN_KEYS:
        raise ValueError(f"{describe(own)} is not the state of a torch optimizer")
    # Of the settings only the parameters: schedulers and new releases of torch add settings. The
    # optimizer keeps those that the state lacks.
    if _parameters(own["param_groups"]) != _parameters(optimizer.state_dict()["param_groups"]):
        raise ValueError("its groups have other parameters")
    kept, count = own["state"], len(optimizers.parameters_of(optimizer))
    if not isinstance(kept, Mapping) or not all(
        type(index) is int and 0 <= index < count and isinstance(x, Mapping)
        for index, x in kept.items()
    ):
        raise ValueError(f"{describe(kept)} is not a state of its parameters")


def _check_next_step(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Raise a ``ValueError`` if torch would fail in the next step, or broadcast the state.

    The state of torch's own optimizers depends on their settings. So a small one takes a step with
    them. An optimizer that needs more than gradients, or a GPU, is not checked.
    """
    kind, first = type(optimizer), 0
    for now, then in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        parameters = now["params"]
        try:
            _small_step(kind, now, parameters)
        except Exception:
            return
        try:
            examples = _small_step(kind, {**now, **then}, parameters)
        except Exception as error:
            raise ValueError(f"its settings: {error}") from error
        for index, (x, (begins, after)) in enumerate(zip(parameters, examples, strict=True), first):
            kept = saved["state"].get(index, {})
            if kept or begins:
                _check_kept(after, kept, dict(enumerate(x.shape, 2)))
        first += len(parameters)


def _small_step(
    kind: Any, group: Mapping[str, Any], parameters: Sequence[Tensor]
) -> list[tuple[bool, Mapping[str, Any]]]:
    """Return the state for small parameters after a step, and whether it exists before the step.

    The axes of the small parameters have the lengths 2, 3, 4 and so on.
    """
    small = [
        torch.zeros(tuple(range(2, 2 + x.dim())), dtype=x.dtype, device="cpu") for x in parameters
    ]
    for x in small:
        x.grad = torch.ones_like(x)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    made = kind([{**settings, "params": small}])
    begins = [bool(made.state.get(x)) for x in small]
    made.step()
    return [(begin, made.state.get(x, {})) for begin, x in zip(begins, small, strict=True)]


def _check_kept(
    example: Mapping[str, Any], kept: Mapping[Any, Any], lengths: Mapping[int, int]
) -> None:
    """Raise a ``ValueError`` if the state of a parameter differs from the example.

    Args:
        example: the state of a small parameter.
        kept: the parameter's state in the file.
        lengths: the lengths of the parameter's axes, by those of the small parameter.
    """
    for key, wanted in example.items():
        found: Any = kept.get(key)
        if isinstance(wanted, torch.Tensor):
            shape = tuple(lengths.get(size, size) for size in wanted.shape)
            if not isinstance(found, torch.Tensor) or (
                (tuple(found.shape), found.is_floating_point(), found.is_complex())
                != (shape, wanted.is_floating_point(), wanted.is_complex())
            ):
                raise ValueError(f"its {key}: of shape {shape}, {describe(found)} in the state")
        elif wanted is not None and type(found) not in (int, float):
            raise ValueError(f"its {key}: a number, {describe(found)} in the state")
        if key == "step" and not 0 <= found < math.inf:
            raise ValueError(f"its step: {describe(found)} in the state")


def _parameters(groups: Any) -> Any:
    """Return the numbers of the parameters of each group."""
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return None
    return [group.get("params") for group in groups]
