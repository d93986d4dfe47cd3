"""What of a model or an optimizer is saved: what it has learned, and no gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from d2ldev.framework import Framework, Part
from d2ldev.operations.placing import Inventory


class Learned(Inventory):
    """What ``place`` looks after but for gradients, which the next step makes anew."""

    def parts_of(self, value: Any, name: str) -> list[Part]:
        parts = super().parts_of(value, name)
        return [part for part in parts if not self.framework.files.is_gradient(value, part)]

    def attached_to(self, value: Any) -> Iterable[Part]:
        return ()


def tensors_of(framework: Framework, model: Any, attempted: str) -> dict[str, Any]:
    """Return the tensors of a model that are saved: name -> tensor."""
    return dict(Learned(framework, model, attempted).entries)
