"""The types in public signatures: tensors, devices, data, callbacks and options that are text.

``Backend[TensorT, NativeDeviceT]`` is generic in the framework's own two types. Without them it is
``Backend[Any, Any]``, as the handle ``backend`` is, whose framework changes.

>>> import torch                                                           # doctest: +SKIP
>>> def scale(d2l: Backend[torch.Tensor, torch.device], x: torch.Tensor) -> torch.Tensor:
...     return d2l.to(x, 'gpu:0') * 2                                      # doctest: +SKIP

Held by ``tests/types``, under mypy and pyright.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

from d2ldev.device import Device
from d2ldev.history import History
from d2ldev.options import (
    Activation,
    Loss,
    LossName,
    MatmulPrecisionName,
    Metric,
    MetricName,
    Metrics,
    Mode,
    NumGpus,
    Optimizer,
    OptimizerName,
    Period,
    Precision,
    Statistics,
)

__all__ = [
    "JSON",
    "Activation",
    "Array",
    "Callback",
    "DTypeLike",
    "DataModule",
    "DeviceLike",
    "HasShape",
    "History",
    "Inputs",
    "Loss",
    "LossName",
    "MatmulPrecisionName",
    "Metric",
    "MetricName",
    "Metrics",
    "Mode",
    "NativeDeviceT",
    "NumGpus",
    "Optimizer",
    "OptimizerName",
    "Period",
    "Precision",
    "Scheduler",
    "Shape",
    "Statistics",
    "SupportsDLPack",
    "Target",
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

Target: TypeAlias = TensorT | Sequence[Any] | Mapping[str, Any] | None
"""The target of a batch: a tensor, or a nesting of tensors; None for a loss without a target."""

Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
"""The inputs of a model: a tuple by position, or a mapping by name."""

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""A value that JSON can hold."""


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


class HasShape(Protocol):
    """An array, a tensor, or a variable of any framework: an object with a shape."""

    @property
    def shape(self) -> Any: ...


class Array(HasShape, Protocol):
    """A NumPy array, or a tensor of any framework, with the operators that all of them have.

    They are operators of the Python array API standard. The others are not in the annotations of
    every framework: TensorFlow's stubs have no ``%``, ``~``, ``^``, ``float(x)`` and ``x.ndim``.
    MXNet has no ``//``, and JAX and TensorFlow have no ``x[0] = y``. ``x.device`` is not in every
    version of NumPy, and not in MXNet: see ``Backend.device_of``.

    A type checker refuses a ``torch.nn.Parameter``, because ``parameter - 1`` is a tensor.

    Held by ``tests/types/test_arrays.py``, and on each framework by ``tests/together``.

    Source: the Python array API standard, 2024.12, "Array object".
    """

    @property
    def dtype(self) -> Any: ...

    # The libraries disagree on the other operand: a number, an array, a list.
    def __add__(self, other: Any, /) -> Self: ...
    def __radd__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __rsub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def __rtruediv__(self, other: Any, /) -> Self: ...
    def __matmul__(self, other: Any, /) -> Self: ...
    def __rmatmul__(self, other: Any, /) -> Self: ...
    def __pow__(self, other: Any, /) -> Self: ...
    def __and__(self, other: Any, /) -> Self: ...
    def __or__(self, other: Any, /) -> Self: ...
    def __neg__(self) -> Self: ...
    def __abs__(self) -> Self: ...
    def __getitem__(self, key: Any, /) -> Self: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...

    # The dtype of the result is another one, and NumPy's types have a dtype.
    def __eq__(self, other: Any, /) -> Any: ...
    def __ne__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...


class DataModule(Protocol):
    """An object with data loaders, such as D2L's ``DataModule``.

    ``Trainer`` also uses its methods ``val_dataloader`` and ``predict_dataloader``.

    Source: D2L, section 3.2.3.
    """

    def train_dataloader(self) -> Iterable[Any]: ...


class Scheduler(Protocol):
    """A scheduler of learning rates, such as those of ``torch.optim.lr_scheduler``."""

    # Some take a metric.
    @property
    def step(self) -> Callable[..., Any]: ...


class _EndsSteps(Protocol):
    @property
    def on_step_end(self) -> Callable[[int, Any], object]: ...


class _EndsEpochs(Protocol):
    @property
    def on_epoch_end(self) -> Callable[[int, History], object]: ...


Callback: TypeAlias = Callable[[int, History], object] | _EndsEpochs | _EndsSteps
"""A function of ``(epoch, history)``, or an object with hooks.

The hooks are ``on_epoch_end(epoch, history)`` and ``on_step_end(step, loss)``; it has one or both.
"""
