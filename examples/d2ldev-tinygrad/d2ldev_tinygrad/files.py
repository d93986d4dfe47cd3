"""Files: the dense layers of a model, which other frameworks read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d2ldev.framework import Files, Layer

from d2ldev_tinygrad.models import MLP


class TinygradFiles(Files):
    """The files of tinygrad. The defaults work, with one copy more than necessary."""

    def layers(self, model: Any) -> Sequence[Layer] | None:
        if not isinstance(model, MLP):
            return None
        return [Layer(each.weight, each.bias) for each in model.layers]
