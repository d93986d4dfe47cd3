"""Files: the layers of an ``MLP``, in the canonical layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_strict as xp
import numpy as np

from d2ldev.framework import Files, Layer, Tensor
from d2ldev_reference.models import MLP
from d2ldev_reference.tensors import numpy_of


class ReferenceFiles(Files):
    """array-api-strict's arrays in files."""

    def borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        return numpy_of(x)

    def adopt(self, array: np.ndarray[Any, Any], dtype: str, native: Any) -> Tensor:
        return xp.asarray(array, dtype=self.tensors.dtype(dtype), device=native)

    def layers(self, model: Any) -> Sequence[Layer] | None:
        if type(model) is not MLP:
            return None
        return [Layer(layer["weight"], layer["bias"]) for layer in model.layers]
