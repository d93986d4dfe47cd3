"""Train a pytree that can be called: an Equinox module, or ``Partial(net.apply, variables)``.

A learner trains ``nnx`` modules. A pytree becomes one of them, and is made again after the steps:
it cannot be changed itself. Its trained arrays are those of floats, as for ``jax.grad``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from d2ldev.framework import D2LDevError, UnsupportedValueError, text_of


class PytreeModule(nnx.Module):
    """The leaves of a pytree by their names.

    Args:
        tree: can be called. Its other leaves, such as functions, are static.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.names = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        for name, (_, leaf) in zip(self.names, leaves, strict=True):
            if isinstance(leaf, jax.Array):
                is_trained = jnp.issubdtype(leaf.dtype, jnp.inexact)
                leaf = (nnx.Param if is_trained else nnx.Variable)(leaf)
            setattr(self, name, leaf)

    def merge(self) -> Any:
        """Return the pytree with the current arrays."""
        leaves = [getattr(self, name) for name in self.names]
        leaves = [x[...] if isinstance(x, nnx.Variable) else x for x in leaves]
        return jax.tree.unflatten(self.structure, leaves)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        tree = self.merge()
        try:
            return tree(*inputs, **named)
        except D2LDevError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            name = type(tree).__name__
            raise UnsupportedValueError(
                f"call {name} with a batch",
                f"{type(error).__name__}: {text_of(error)}",
                f"a pytree that takes a batch. For a {name} of one example: "
                "jax.tree_util.Partial(lambda net, x: jax.vmap(net)(x), net)",
            ) from error


def wrap(model: Any) -> Any:
    """Return a pytree that can be called as an ``nnx.Module``, and any other model as it is."""
    if isinstance(model, nnx.Module) or not callable(model):
        return model
    has_arrays = any(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
    return PytreeModule(model) if has_arrays else model


def unwrap(model: Any) -> Any:
    """Return a model as the user gave it to ``wrap``, with the current arrays."""
    return model.merge() if isinstance(model, PytreeModule) else model
