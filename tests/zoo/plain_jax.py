"""What JAX does without d2ldev: the numbers that d2ldev has to give, too."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from flax import nnx
from jax_models import MODELS, seed  # noqa: F401  # the table of this framework
from zoo import Model

from d2ldev import Backend


def build(model: Model, number: int) -> Any:
    seed.value = number
    return model.build()


def make_optimizer(model: Model, net: Any) -> Any:
    return model.optimizer(net) if model.optimizer else optax.adamw(1e-3, eps=1e-3)


def start(model: Model, net: Any) -> Any:
    """Return Flax's optimizer, or a list of the state of optax for a model of Equinox."""
    optimizer = optax.with_extra_args_support(make_optimizer(model, net))
    if isinstance(net, nnx.Module):
        return nnx.Optimizer(net, optimizer, wrt=nnx.Param)
    return [optimizer.init(eqx.filter(net, eqx.is_inexact_array))]


def call(net: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return net(**{name: x for name, x in batch.items() if name != "y"})
    return net(batch[0])


def compute_loss(net: Any, batch: Any) -> jax.Array:
    y = batch["y"] if isinstance(batch, dict) else batch[1]
    return optax.softmax_cross_entropy_with_integer_labels(call(net, batch), y).mean()


def predict(model: Model, net: Any, batch: Any) -> dict[str, np.ndarray]:
    if isinstance(net, nnx.Module):
        net.eval()
    return flatten(call(net, batch))


def train(model: Model, net: Any, batches: list[Any], optimizer: Any) -> Any:
    """Train as a loop of one's own does, and return the model."""
    if not isinstance(net, nnx.Module):
        return _train_equinox(model, net, batches, optimizer)
    net.train()

    @nnx.jit
    def step(net: Any, optimizer: Any, batch: Any) -> None:
        loss, gradients = nnx.value_and_grad(compute_loss)(net, batch)
        graph, _, rest = nnx.split(net, nnx.Param, ...)
        value = lambda params: compute_loss(nnx.merge(graph, params, rest), batch)  # noqa: E731
        search = {"value": loss, "grad": gradients, "value_fn": value}  # as optax documents it
        optimizer.update(net, gradients, **(search if model.name == "lbfgs" else {}))

    for batch in batches:
        step(net, optimizer, batch)
    return net


def _train_equinox(model: Model, net: Any, batches: list[Any], state: list[Any]) -> Any:
    optimizer = make_optimizer(model, net)

    @eqx.filter_jit
    def step(net: Any, state: Any, batch: Any) -> Any:
        gradients = eqx.filter_grad(compute_loss)(net, batch)
        updates, state = optimizer.update(gradients, state, eqx.filter(net, eqx.is_inexact_array))
        return eqx.apply_updates(net, updates), state

    for batch in batches:
        net, state[0] = step(net, state[0], batch)
    return net


def _leaves(net: Any) -> list[tuple[str, jax.Array]]:
    tree = nnx.state(net, nnx.Not(nnx.RngState)) if isinstance(net, nnx.Module) else net
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), x) for path, x in leaves if isinstance(x, jax.Array)]


def state_of(net: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in _leaves(net)}


def flatten(output: Any) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(output))}


def find_elsewhere(model: Model, net: Any, backend: Backend[Any, Any], device: str) -> list[str]:
    """Return the names of arrays that are not on a device."""
    there = backend.device(device)
    return [name for name, x in _leaves(net) if backend.device_of(x) != there]


def has_batch_statistics(net: Any) -> bool:
    return False  # one program for the whole batch: its statistics are those of one GPU


def ties_of(net: Any) -> set[frozenset[str]]:
    return set()
