"""The containers of ``load_into`` again, with what is in the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from d2ldev.errors import UnsupportedValueError
from d2ldev.files import nodes
from d2ldev.files.restoring import Outline
from d2ldev.framework import Framework
from d2ldev.nesting.containers import Container
from d2ldev.nesting.walk import PLAIN, Kind


class Remaking:
    """One walk through a nesting that fits a file.

    Args:
        backend: whose tensors they are.
        attempted: what the caller is doing, for messages.
        replaced: what takes the place of tensors and models, by their ids.
        rows: what each container of the file becomes.
    """

    def __init__(
        self, framework: Framework, attempted: str, replaced: Mapping[int, Any], rows: list[Any]
    ) -> None:
        self._kinds = framework.kinds
        self._attempted = attempted
        self._replaced = replaced
        self._rows = rows
        # What is shared both here and in the file stays shared.
        self._done: dict[tuple[int, int], Any] = {}

    def of(self, x: Any, found: Any) -> Any:
        """What takes the place of ``x``, which ``found`` is in the file."""
        kind = self._kinds[type(x)]
        if id(x) in self._replaced:
            return self._replaced[id(x)]
        if kind is PLAIN or isinstance(x, np.generic):
            return found
        if isinstance(kind, Kind) or not isinstance(found, Outline):
            return x
        key = (id(x), found.number)
        if key not in self._done:
            self._done[key] = self._container(x, kind, found)
        return self._done[key]

    def _container(self, x: Any, kind: Container, found: Outline) -> Any:
        if found.type in nodes.SETS:
            return self._rows[found.number]
        old = list(kind.children(x))
        new = [
            self.of(child, found.children[label])
            for label, child in zip(kind.labels(x), old, strict=True)
        ]
        if all(_is_same(after, before) for after, before in zip(new, old, strict=True)):
            return x
        try:
            return kind.rebuild(x, new)
        except Exception as error:  # whatever a class's own methods raise
            raise UnsupportedValueError(
                self._attempted,
                f"the {type(x).__name__} cannot be made again: {error}",
                f"d2ldev.register_container({type(x).__name__}, children, rebuild)",
            ) from error


def _is_same(after: Any, before: Any) -> bool:
    if after is before:
        return True
    return (
        type(after) in (int, float, str, bool) and type(after) is type(before) and (after == before)
    )
