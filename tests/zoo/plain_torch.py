"""What PyTorch does without d2ldev: the numbers that d2ldev has to give, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_models import MODELS  # noqa: F401  # the table of this framework
from zoo import Model

from d2ldev import Backend

_RATES = (
    "dropout",
    "drop_prob",
    "layerdrop",
    "attention_dropout",
    "activation_dropout",
    "dropout_prob",
)


def build(model: Model, seed: int) -> nn.Module:
    """Return the model without dropout: one and the same for a seed."""
    torch.manual_seed(seed)
    net = model.build()
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return net


def make_optimizer(model: Model, net: nn.Module) -> torch.optim.Optimizer:
    if model.optimizer is not None:
        return model.optimizer(net)
    return torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-3)


def target_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch.get("y")
    return batch[1] if len(batch) > 1 else None


def call(model: Model, net: nn.Module, batch: Any) -> Any:
    """Call the model as its documentation does."""
    if isinstance(batch, dict):
        return net(**{name: value for name, value in batch.items() if name != "y"})
    return net(batch[0] if isinstance(batch, tuple) else batch)


def compute_loss(model: Model, net: nn.Module, batch: Any) -> torch.Tensor:
    if model.loss is None:
        return net.training_step(batch)
    output = call(model, net, batch)
    if model.loss == "model":
        return output.loss
    if model.loss == "cross_entropy":
        return nn.functional.cross_entropy(output, target_of(batch))
    return model.loss(output) if target_of(batch) is None else model.loss(output, target_of(batch))


start = make_optimizer  # a loop of one's own and ``fit`` take the same object


def predict(model: Model, net: nn.Module, batch: Any) -> dict[str, np.ndarray]:
    """Return the numbers of the model's output."""
    net.eval()
    with torch.no_grad():
        return flatten(call(model, net, batch))


def train(model: Model, net: nn.Module, batches: list[Any], optimizer: Any) -> Any:
    """Train as a loop of one's own does, and return the model."""
    net.train()
    for batch in batches:

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = compute_loss(model, net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return net


def state_of(net: nn.Module) -> dict[str, np.ndarray]:
    """Return what the model's own ``state_dict`` has, and its parameters."""
    return flatten({**net.state_dict(), **dict(net.named_parameters())})


def flatten(output: Any) -> dict[str, np.ndarray]:
    return {name: _numbers(x) for name, x in find(output, "", set()) if not x.is_complex()}


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().float().numpy().copy()


def find_elsewhere(
    model: Model, net: nn.Module, backend: Backend[Any, Any], device: str
) -> list[str]:
    """Return the tensors that ``net.to(device)`` moves, and that are elsewhere in ``net``."""
    there = backend.native(device)
    moved = find(build(model, 0).to(there), "net", set())
    places = {name: x.device for name, x in find(net, "net", set())}
    return [name for name, x in moved if x.device == there != places.get(name)]


def find(obj: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of modules, of their attributes and of containers, with their names."""
    if isinstance(obj, torch.Tensor):
        yield name, obj
        return
    if isinstance(obj, nn.Module):
        items = list(vars(obj).items())
    elif isinstance(obj, Mapping) or hasattr(obj, "items"):
        items = list(obj.items())
    elif isinstance(obj, (list, tuple)):
        items = list(enumerate(obj))
    elif is_dataclass(obj) and not isinstance(obj, type):
        items = [(field.name, getattr(obj, field.name)) for field in fields(obj)]
    else:
        return
    if id(obj) not in seen:
        seen.add(id(obj))
        for key, value in items:
            yield from find(value, f"{name}.{key}", seen)


def has_batch_statistics(net: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())


def ties_of(net: nn.Module) -> set[frozenset[str]]:
    """Return the sets of names that one parameter has."""
    names: dict[int, set[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}
