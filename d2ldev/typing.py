"""The types in public signatures: tensors, devices, dtypes, shapes and options that are text.

``Backend[TensorT, NativeDeviceT]`` is generic in the framework's own two types. Without them it is
``Backend[Any, Any]``, as the handle ``backend`` is, whose framework changes.

>>> import torch                                                           # doctest: +SKIP
>>> def scale(d2l: Backend[torch.Tensor, torch.device], x: torch.Tensor) -> torch.Tensor:
...     return d2l.to(x, 'gpu:0') * 2                                      # doctest: +SKIP

Held by ``tests/types``, under mypy and pyright.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from d2ldev.device import Device
from d2ldev.options import (
    Activation,
    Keep,
    Loss,
    LossName,
    MatmulPrecisionName,
    Metric,
    MetricName,
    Mode,
    NumGpus,
    Optimizer,
    OptimizerName,
    Period,
    Precision,
    Shard,
    Statistics,
)

__all__ = [
    "Activation",
    "DTypeLike",
    "DeviceLike",
    "History",
    "Keep",
    "Loss",
    "LossName",
    "MatmulPrecisionName",
    "Metric",
    "MetricName",
    "Mode",
    "NativeDeviceT",
    "NumGpus",
    "Optimizer",
    "OptimizerName",
    "Period",
    "Precision",
    "Shape",
    "Shard",
    "Statistics",
    "SupportsDLPack",
    "TensorT",
]

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import TypeVar

    TensorT = TypeVar("TensorT", default=Any)
    NativeDeviceT = TypeVar("NativeDeviceT", default=Any)
else:  # type variables have defaults from Python 3.13 on
    from typing import TypeVar

    TensorT = TypeVar("TensorT")
    NativeDeviceT = TypeVar("NativeDeviceT")

T = TypeVar("T")
"""The type of an argument that comes back as what it was."""

DeviceLike: TypeAlias = Device | str | NativeDeviceT
"""A ``Device``, a string such as ``'gpu:1'``, or the framework's own device object."""

Shape: TypeAlias = int | Sequence[int]
"""The sizes of a tensor; an integer is the size of its one axis."""


History: TypeAlias = dict[str, list[float]]
"""Name -> one number per epoch."""


class _HasItemSize(Protocol):
    """``torch.dtype``."""

    @property
    def itemsize(self) -> int: ...


class _HasNumPyDType(Protocol):
    """``tf.DType``."""

    @property
    def as_numpy_dtype(self) -> Any: ...


class _HasDType(Protocol):
    """A scalar type of JAX, such as ``jnp.float32``."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


DTypeLike: TypeAlias = str | type[Any] | _HasItemSize | _HasNumPyDType | _HasDType
"""The name of a dtype, such as ``'float32'``, the framework's own dtype, or NumPy's."""


class SupportsDLPack(Protocol):
    """A tensor of any library that exports its memory by DLPack.

    Source: the Python array API standard, 2024.12, "Data interchange mechanisms".
    """

    # The libraries' signatures differ.
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...
