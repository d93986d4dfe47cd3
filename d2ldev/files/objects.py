"""What of a model or an optimizer is saved: what it has learned, and no gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from d2ldev.operations.placing import Inventory, Part

if TYPE_CHECKING:
    from d2ldev.interface import Backend


class Learned(Inventory):
    """What ``place`` looks after but for gradients, which the next step makes anew."""

    def _parts_of(self, value: Any, name: str) -> list[Part]:
        parts = super()._parts_of(value, name)
        return [part for part in parts if not self._backend._is_gradient(value, part)]

    def _attached_to(self, value: Any) -> Iterable[Part]:
        return ()


def tensors_of(backend: Backend, model: Any, attempted: str) -> dict[str, Any]:
    """The tensors of a model that are saved: name -> tensor."""
    return dict(Learned(backend, model, attempted).entries)
