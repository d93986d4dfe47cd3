"""Models that are not ``nnx`` modules, wrapped in one: the learners train only these.

A pytree that can be called cannot be changed, and is made again with the trained arrays. Examples
are an Equinox module, and ``Partial(net.apply, variables)``. Its arrays of floats are trained,
as for ``jax.grad``. A wrapper of another library's model takes its values, and gives them back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from d2ldev import D2LDevError, UnsupportedValueError
from d2ldev.framework import Signature, Tensor, TrainingSettings, read_signature, text_of

SWITCHES = ("train", "training", "deterministic", "rngs")
"""The parameters of a call that choose a mode of the module."""


class Wrapper(nnx.Module):
    """A module around a user's model."""

    def pull(self) -> None:
        """Take the values of the model, which the user may have changed."""

    def push(self) -> None:
        """Give the model the values from here."""

    def unwrap(self) -> Any:
        """Return the model with the values that it was given last."""
        raise NotImplementedError

    def check(self, settings: TrainingSettings) -> None:
        """Refuse settings that have no effect on the model."""

    def read_signature(self) -> Signature:
        """Return the inputs of the model."""
        return read_signature(self.unwrap(), switches=SWITCHES)

    def list_dependencies(self) -> list[Any]:
        """Return objects whose plain attributes the programs depend on, and the graph lacks."""
        return []

    def take_losses(self) -> list[Tensor]:
        """Return the losses that layers have added in the last call."""
        return []


class PytreeModule(Wrapper):
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

    def unwrap(self) -> Any:
        leaves = [getattr(self, name) for name in self.names]
        leaves = [x[...] if isinstance(x, nnx.Variable) else x for x in leaves]
        return jax.tree.unflatten(self.structure, leaves)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        tree = self.unwrap()
        try:
            return tree(*inputs, **named)
        except D2LDevError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            name = type(tree).__name__
            raise UnsupportedValueError(
                f"call {name} with a batch",
                f"{type(error).__name__}: {text_of(error)}",
                f"a pytree that takes a batch alone. For a {name} of one example: "
                "jax.tree_util.Partial(lambda net, x: jax.vmap(net)(x), net). Its function also "
                "gives what else the net takes, such as a key, or a state",
            ) from error
