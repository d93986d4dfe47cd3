"""What one framework must say: the primitives that an author of a backend writes.

Here those about devices and tensors; ``model_primitives.py`` has those about models, files and
training. ``Backend`` (``interface.py``) derives everything else from them. They are given devices
that exist and arguments that were checked; what they raise is translated by their callers.

Source: names and meanings of the creation functions are those of the Python array API
standard, 2024.12.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from d2ldev.device import Device
from d2ldev.errors import (
    DeviceMismatchError,
    DeviceUnavailableError,
    UnsupportedValueError,
    describe,
)
from d2ldev.nesting.walk import TENSOR, Kinds
from d2ldev.operations.strictness import Strictness

if TYPE_CHECKING:
    from numpy.typing import NDArray


Tensor = Any
"""A native tensor of the backend."""

DeviceLike = Any
"""A ``Device``, a string such as ``'gpu:1'``, or the framework's own device object."""

DType = Any
"""A dtype's name such as ``'float32'``, the framework's own dtype, or NumPy's."""

Shape = int | Sequence[int]


class Memory(NamedTuple):
    """The memory of a device in bytes; ``None`` where the framework cannot say.

    Args:
        used: held by live tensors of this process now.
        peak: the most that was ever held so.
        total: the size of the device's memory.
    """

    used: int | None
    peak: int | None
    total: int | None


class Primitives(ABC):
    """One framework, as far as it has to be said by hand.

    Args:
        virtual_gpus: how many GPUs to make out of nothing, ``None`` for the hardware's.
    """

    name: ClassVar[str]
    """The name it is selected by."""
    distributions: ClassVar[tuple[str, ...]]
    """The distributions whose versions identify it, the framework's first."""
    max_virtual_gpus: ClassVar[int] = 0
    """How many virtual GPUs it can make."""
    tensor_types: ClassVar[tuple[type, ...]]
    """The classes of its tensors."""
    object_types: ClassVar[tuple[type, ...]] = ()
    """The classes of the models, optimizers and the like that ``place`` takes apart."""
    plain_types: ClassVar[tuple[type, ...]] = ()
    """The classes of its values that may stand in a batch and stay as they are: dtypes, devices."""
    dtype_names: ClassVar[tuple[str, ...]]
    """The dtypes that its tensors can have, by name."""

    def __init__(self, virtual_gpus: int | None = None) -> None:
        if virtual_gpus is not None and virtual_gpus > self.max_virtual_gpus:
            raise DeviceUnavailableError(
                f"make {virtual_gpus} virtual GPUs",
                f"the {self.name} backend can make {self.max_virtual_gpus}",
                f"D2LDEV_VIRTUAL_GPUS={self.max_virtual_gpus}, or unset it",
            )
        self.virtual_gpus = virtual_gpus
        self.kinds = Kinds(self.tensor_types, self.object_types, self.plain_types)
        self._strictness = Strictness(self._refuse_mixing)
        # The device of the innermost ``on`` of this thread or task, and all that were entered.
        self._scope: ContextVar[Device | None] = ContextVar(f"{self.name}_scope", default=None)
        self._scopes: ContextVar[tuple[tuple[object, Device], ...]] = ContextVar(
            f"{self.name}_scopes", default=()
        )
        # Devices that are known to exist, by every spelling in which they were asked for.
        self._devices: dict[Any, Device] = {}
        self._natives: dict[Any, Any] = {}

    # -- devices --------------------------------------------------------------------------

    @abstractmethod
    def num_gpus(self) -> int:
        """How many GPUs of this process's machine the framework can use; 0 if none.

        Asking makes no context on any GPU, so that a later fork works. There being none is
        no error; hardware that was found but cannot be initialised is a
        ``DeviceInitializationWarning`` with the reason.
        """

    @abstractmethod
    def _native(self, device: Device) -> Any:
        """The framework's own object for a device that exists."""

    @abstractmethod
    def _from_native(self, native: Any) -> Device | None:
        """The device that the framework's own object stands for; None if it is no such thing."""

    @abstractmethod
    def _platform(self, device: Device) -> str:
        """``'cpu'``, ``'cuda'``, ``'rocm'``, ``'xpu'``, ``'mps'``, ``'virtual'`` ..."""

    @abstractmethod
    def default_device(self) -> Device:
        """Where the framework's own creation calls would put a tensor now.

        d2ldev's own calls do not follow it: they go to the scope's device, else to the CPU.
        """

    def _native_scope(self, device: Device) -> AbstractContextManager[Any]:
        """The framework's own context that makes a device its default."""
        return nullcontext()

    # -- tensors --------------------------------------------------------------------------

    @abstractmethod
    def device_of(self, x: Tensor) -> Device:
        """Where the bytes of a tensor are.

        A value that is only traced (under ``jit`` or ``tf.function``), spread over several
        devices, or has no bytes (torch's ``meta``) has no one place: that is an
        ``UnsupportedValueError`` which says so, never a guess.

        Raises:
            UnsupportedValueError: also if ``x`` is no tensor of this backend.
        """

    @abstractmethod
    def _native_dtype(self, name: str) -> Any:
        """The framework's own dtype of one of the names in ``dtype_names``."""

    @abstractmethod
    def dtype_of(self, x: Tensor) -> str:
        """The name of a tensor's dtype, such as ``'float32'``.

        Raises:
            UnsupportedValueError: if ``x`` is no tensor of this backend (``_require_tensor``).
        """

    @abstractmethod
    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        """A tensor with the values of a number, a nesting of lists, or a NumPy array.

        The array is of a dtype in ``dtype_names``, and the tensor never aliases it.
        """

    @abstractmethod
    def _full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        """A tensor filled with a number."""

    def _zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        """A tensor of zeros, for a framework that has something faster than ``_full``."""
        return self._full(shape, 0.0, dtype, native)

    def _ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        """A tensor of ones, for a framework that has something faster than ``_full``."""
        return self._full(shape, 1.0, dtype, native)

    @abstractmethod
    def _arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        """The numbers from ``start`` to ``stop``, which is not included."""

    @abstractmethod
    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        """Random numbers: ``'uniform'`` in [0, 1), or ``'normal'`` with mean 0 and deviation 1.

        With a seed, the framework's own random state is neither read nor changed.
        """

    @abstractmethod
    def _astype(self, x: Tensor, dtype: Any) -> Tensor:
        """A tensor in another dtype, on the same device."""

    @abstractmethod
    def _copy(self, x: Tensor, native: Any) -> Tensor:
        """The tensor in new memory on a device, which may be the one where it is."""

    def _copy_all(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        """Copies of several tensors, for a framework that makes them together at less cost."""
        return [self._copy(x, native) for x in xs]

    def _data_dtype(self, name: str) -> str:
        """The dtype that the framework gives to NumPy data of a dtype, if none is asked for.

        The same, but for a framework that prefers narrow numbers: JAX makes float64 float32.
        """
        return name

    @abstractmethod
    def _to_numpy(self, x: Tensor) -> NDArray[Any]:
        """The values in a new NumPy array."""

    @abstractmethod
    def address(self, x: Tensor) -> int:
        """The address of a tensor's first byte in its device's memory.

        Two tensors of one device with the same address are the same memory.

        Raises:
            UnsupportedValueError: if ``x`` is no tensor of this backend, or has no one address.
        """

    @abstractmethod
    def _from_dlpack(self, x: Any) -> Tensor:
        """A tensor on the memory of another framework's."""

    def _dlpack_of(self, x: Tensor) -> Any:
        """What has ``__dlpack__`` and ``__dlpack_device__`` for a tensor.

        The tensor itself, but for a framework whose tensors lack these methods: MXNet.
        """
        return x

    def _require_tensor(self, x: Any, attempted: str) -> None:
        """Raise an ``UnsupportedValueError`` unless ``x`` is a tensor of this backend."""
        if self.kinds[type(x)] is not TENSOR:
            raise UnsupportedValueError(
                attempted,
                f"{describe(x)} is no tensor of the {self.name} backend",
                "x = backend.asarray(x) makes a tensor",
            )

    # -- strictness -----------------------------------------------------------------------

    def _refuse_mixing(self) -> Callable[[], None]:
        """Have the framework refuse operands of different devices; returns what ends that.

        For a framework that does not refuse them by itself: its functions are replaced, where
        ``self._strictness.in_force()`` they raise ``strictness.mismatch(...)``, and elsewhere
        they do what they did. Called once, however many blocks there are.
        """
        return lambda: None

    def _strict_scope(self, everywhere: bool) -> AbstractContextManager[Any]:
        """The framework's own context that belongs to one block, if it has one.

        With ``everywhere`` it is entered for every thread of the process, and never left.
        """
        return nullcontext()

    def _mismatch(self, error: BaseException) -> DeviceMismatchError | None:
        """What an exception of the framework says about mixed devices; None if it is another."""
        return None

    # -- the machine ----------------------------------------------------------------------

    @abstractmethod
    def _synchronize(self, device: Device) -> None:
        """Return when all work queued on a device is done, without making a context there."""

    @abstractmethod
    def _memory(self, device: Device) -> Memory:
        """The memory of a device that exists."""

    def _is_out_of_memory(self, error: Exception) -> bool:
        """Whether an exception of the framework says that memory ran out."""
        return isinstance(error, MemoryError)
