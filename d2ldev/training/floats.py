"""The floats of a batch in the dtype of the model that computes with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from d2ldev.contract import Framework
from d2ldev.nesting.kinds import TENSOR
from d2ldev.nesting.walk import Flattened
from d2ldev.operations import creation
from d2ldev.operations.inventory import list_named_tensors
from d2ldev.operations.values import is_float


def dtype_of_model(framework: Framework, model: Any) -> str | None:
    """Return the dtype of a model's floats; None if it has none yet, or several.

    Where the framework tells parameters from other tensors, such as buffers, those count.
    """
    dtype_of, find_refill = framework.tensors.dtype_of, framework.models.find_refill
    found = [x for _, x in list_named_tensors(framework, model)]
    floats = {name for name in map(dtype_of, found) if is_float(name)}
    if len(floats) > 1:
        floats = {name for name in map(dtype_of, filter(find_refill, found)) if is_float(name)}
    return floats.pop() if len(floats) == 1 else None


class Cast:
    """Casts the floats of batches to a dtype. Integers, complex numbers and text stay.

    Args:
        framework: whose tensors are in the batches, beside NumPy arrays.
        name: of the dtype.

    Attributes:
        others: the names of the dtypes that were cast.
        has_met_data: whether it has met data that becomes a tensor later. The dtype of that tensor
            is not known yet.
    """

    def __init__(self, framework: Framework, name: str) -> None:
        self._framework, self._name = framework, name
        self._kinds, self._dtype_of = framework.state.kinds, framework.tensors.dtype_of
        self.others: dict[str, None] = {}
        self.has_met_data = False

    def convert(self, flat: Flattened) -> bool | None:
        """Replace the floats of a batch that are of another dtype.

        Returns:
            Whether there are any; None for a batch without floats.
        """
        if not self.has_met_data:
            self.has_met_data = not all(map(_is_of_numbers, flat.others.values()))
        leaves = {**flat.tensors, **flat.others}
        names = {key: name for key, x in leaves.items() if is_float(name := self._name_of(x))}
        found = {key: self._cast(leaves[key]) for key, name in names.items() if name != self._name}
        flat.replace(found)
        return bool(found) if names else None

    def _name_of(self, x: Any) -> str:
        if self._kinds[type(x)] is TENSOR:
            return self._dtype_of(x)
        return x.dtype.name if isinstance(x, np.ndarray) else ""

    def _cast(self, x: Any) -> Any:
        tensors = self._framework.tensors
        is_tensor = self._kinds[type(x)] is TENSOR
        self.others[tensors.dtype_of(x) if is_tensor else x.dtype.name] = None
        if not is_tensor:
            if self._name in _OF_NUMPY:
                return x.astype(self._name)
            x = creation.asarray(self._framework, x, None, "cpu", None, None)
        return tensors.astype(x, tensors.dtype(self._name))


_OF_NUMPY = ("float16", "float32", "float64")


def _is_of_numbers(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "biufc"
