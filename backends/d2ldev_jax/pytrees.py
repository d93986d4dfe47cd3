"""Classes that were registered with ``jax.tree_util`` are containers, as everywhere in JAX.

Among them are ``flax.struct`` dataclasses, such as linen's ``TrainState``, of which only the fields
that are data are looked at, and ``FrozenDict``.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.tree_util import _registry

from d2ldev.nesting.containers import Container

# d2ldev's own walk does these, and keeps more of them: the order of a dict, attributes.
_PYTHONS_OWN = (dict, list, tuple)


def container_of(cls: type) -> Container | None:
    """How JAX walks a class; None for what is not registered with it."""
    # No public function says whether a class is registered.
    if cls not in _registry or issubclass(cls, _PYTHONS_OWN):
        return None
    return Container(
        lambda x: [child for _, child in _children(x)],
        lambda x: [_label(path[0]) for path, _ in _children(x)],
        _rebuild,
    )


def _children(x: Any) -> list[tuple[Any, Any]]:
    """What a node holds itself, with the keys that lead there."""
    children: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(
        x, is_leaf=lambda child: child is not x
    )[0]
    return children


def _rebuild(old: Any, new: list[Any]) -> Any:
    structure = jax.tree.structure(old, is_leaf=lambda child: child is not old)
    return jax.tree.unflatten(structure, new)


def _label(key: Any) -> object:
    """What a person calls a key: that of a dict, an index, the name of an attribute."""
    found = [getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)]
    return found[0] if found else key
