"""Set-up for the conformance suite: objects of every kind that ``place`` looks after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from d2ldev.device import Device


class Everything(nnx.Module):
    """A module that keeps arrays in every place where a module can."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.weight = nnx.Param(jnp.ones((3, 3)))
        self.tied = self.weight
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.plain = jnp.zeros(2)
        self.kept = nnx.data({"masks": [jnp.ones(2), (jnp.zeros(1), None, "a string")]})
        self.same = nnx.data([self.kept["masks"][0], self.weight])


def samples(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of small objects, by name; each makes its object on the device given."""

    def made_there(make: Callable[[], Any]) -> Callable[[Device], Any]:
        def made(device: Device) -> Any:
            with backend.on(device):
                return make()

        return made

    return {
        "module": made_there(Everything),
        "module and optimizer": made_there(_trained_module),
        "linen train state": made_there(_train_state),
        "random keys": made_there(lambda: (jax.random.key(0), jax.random.split(jax.random.key(1)))),
    }


def _trained_module() -> dict[str, Any]:
    """Return a module and the optimizer that has made a step with it."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    return {"model": model, "optimizer": optimizer}


def _train_state() -> Any:
    """Return the parameters of linen with the state of an optimizer that has made a step."""
    model = linen.Dense(2)
    variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    momentum = optax.sgd(0.1, momentum=0.9)
    create: Callable[..., Any] = TrainState.create
    state = create(apply_fn=model.apply, params=variables["params"], tx=momentum)
    state = state.replace(step=jnp.zeros((), jnp.int32))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
