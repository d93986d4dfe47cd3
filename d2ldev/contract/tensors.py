"""The area ``tensors``: create, copy and read a framework's own tensors.

Source: names and meanings of the creation functions are those of the Python array API standard,
2024.12.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from d2ldev.device import Device
from d2ldev.nesting.containers import Container

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensor = Any
"""A native tensor of the framework."""


class Tensors(ABC):
    """Methods a framework implements about its tensors.

    The core has checked the arguments. ``native`` comes from ``Devices.native``, and ``shape`` is a
    tuple of integers. ``dtype`` comes from ``dtype``, or is None for the framework's own choice.
    ``x`` is a tensor of ``types``.

    The caller translates every exception. If ``Devices.is_out_of_memory`` accepts the exception,
    the error is an ``OutOfDeviceMemoryError``. Any other one is an ``UnsupportedValueError`` with
    the exception's text. Each method has to raise within its call. If the framework allocates
    memory later, compare sizes first, or wait. A lazy framework computes what a method returns: a
    recorded copy would see later writes.

    Attributes:
        types: the classes of the tensors.
        plain_types: the classes of other values of the framework that stay in a batch: dtypes,
            devices.
        dtype_names: the dtypes that tensors can have, by name. A property where that may change.
            A framework that makes float32 of NumPy's float64 leaves ``'float64'`` out.
        own_methods: the names of two methods, if the framework has such a convention. ``to`` calls
            the first, ``method(native)``, to move an object that is not a container. ``copy`` calls
            the second, without an argument.
        default_dtypes: those of Python's integers and floats. A property where they may change.
    """

    types: tuple[type, ...]
    plain_types: tuple[type, ...] = ()
    own_methods: tuple[str, str] | None = None
    dtype_names: tuple[str, ...]
    default_dtypes: tuple[str, str] = ("int64", "float32")

    # -- asking -----------------------------------------------------------------------------------

    @abstractmethod
    def device_of(self, x: Any) -> Device:
        """Return the device that holds the bytes of a tensor.

        Raises:
            UnsupportedValueError: if ``x`` is not a tensor, or has no single device. Examples are
                tensors that ``jit`` or ``tf.function`` traces, tensors on several devices, and
                torch's ``meta`` tensors. Never guess.
        """

    def is_on(self, x: Tensor, device: Device) -> bool:
        """Return whether ``to`` and ``place`` leave a tensor as it is, for a device.

        It is called for every tensor of every batch that moves, so it has to be fast. A framework
        overrides it whose operations may bring a tensor of the device elsewhere: JAX, with its
        uncommitted arrays. So does one with tensors that only the host can hold: TensorFlow, with
        its texts. They are at home for every device.

        Raises:
            UnsupportedValueError: as ``device_of``.
        """
        return self.device_of(x) is device

    @abstractmethod
    def dtype_of(self, x: Tensor) -> str:
        """Return the name of a tensor's dtype, such as ``'float32'``."""

    @abstractmethod
    def dtype(self, name: str) -> Any:
        """Return the framework's own dtype of a name.

        Raises:
            UnsupportedValueError: for a dtype that another setting of the framework makes
                available. The fix is the line that sets it.
            Exception: for any other name that is not one of ``dtype_names``.
        """

    @abstractmethod
    def address(self, x: Tensor) -> int:
        """Return the address of a tensor's first byte in its device's memory.

        Two tensors of one device with the same address are the same memory.

        Raises:
            UnsupportedValueError: if the tensor has no one address.
        """

    def has_values(self, x: Tensor) -> bool:
        """Return whether a tensor has values: it is not only traced, and was not deleted."""
        return True

    def nbytes(self, x: Tensor) -> int:
        """Return the bytes of a tensor's elements."""
        return int(x.nbytes)

    def live(self) -> Iterable[Tensor]:
        """Return the tensors that still exist in this process.

        The default asks Python's garbage collector. A framework may keep a list of its own.
        """
        # Not ``isinstance``, which asks the objects, and proxies among them answer for others. Each
        # class is asked once: with memory traced, a question costs as much as the stack is deep.
        objects = gc.get_objects()
        classes = {cls for cls in set(map(type, objects)) if issubclass(cls, self.types)}
        return [x for x in objects if type(x) in classes]

    def container_of(self, cls: type) -> Container | None:
        """Return how to walk a container class of the framework; None for other classes.

        Called once for each class that d2ldev does not know.
        """
        return None

    # -- making -----------------------------------------------------------------------------------

    @abstractmethod
    def from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        """Return a tensor with the values of a Python number or a NumPy array.

        The array is contiguous, and in the machine's byte order. The result never aliases it.

        Args:
            obj: the number or the array.
            dtype: None keeps the array's, which is one of ``dtype_names``; a number comes with one.
            native: where it is made.
        """

    @abstractmethod
    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        """Return a tensor filled with a value. Without a dtype, it is a float or a tensor."""

    def zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        """Return a tensor of zeros; override it if the framework has a faster way than ``full``."""
        return self.full(shape, 0.0, dtype, native)

    def ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        """Return a tensor of ones; override it if the framework has a faster way than ``full``."""
        return self.full(shape, 1.0, dtype, native)

    def empty(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        """Return a tensor of arbitrary values; override it if the framework need not write them."""
        return self.zeros(shape, dtype, native)

    @abstractmethod
    def arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        """Return the numbers from ``start`` up to ``stop``, without ``stop``.

        The numbers are Python's, and there always is a dtype. ``stop`` is ``start`` where the range
        is empty.
        """

    @abstractmethod
    def random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        """Return random numbers: ``'uniform'`` in [0, 1), ``'normal'`` with mean 0, deviation 1.

        With a seed, a device draws the same numbers at each call. The call then neither reads nor
        changes the framework's own random state. Another device may draw others.
        """

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the framework's global random numbers, on all devices; see ``random``.

        Called by ``backend.seed``, with 0 to ``2**32 - 1``.
        """

    @abstractmethod
    def astype(self, x: Tensor, dtype: Any) -> Tensor:
        """Return a tensor in another dtype, on the same device."""

    # -- copying ----------------------------------------------------------------------------------

    @abstractmethod
    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        """Return tensors on a device: one for each, for which ``is_on`` is true.

        Args:
            xs: one or more tensors, on any devices.
            native: the device.
            copy: whether each is in new memory. Otherwise a tensor whose memory is there already
                may share it. ``to``, ``place`` and batches ask so.
        """

    def transfer_ahead(self, xs: list[Tensor], native: Any) -> Callable[[], list[Tensor]]:
        """Begin to bring a batch to a GPU while it computes; return a function that ends it.

        That one returns the tensors as ``transfer`` does, and is called when the batch is due. The
        work that is queued from then on has to wait for the copies. Nobody writes into the tensors
        meanwhile. Override it for a framework that computes and copies in one queue: PyTorch.
        """
        new = self.transfer(xs, native, copy=False)
        return lambda: new

    @abstractmethod
    def to_numpy(self, x: Tensor) -> NDArray[Any]:
        """Return the values in a new NumPy array."""

    @abstractmethod
    def from_dlpack(self, x: Any) -> Tensor:
        """Return a tensor on the memory of ``x``.

        Args:
            x: a tensor of ``types``, or anything with ``__dlpack__`` and ``__dlpack_device__``.

        Raises:
            Exception: if it cannot use that memory, or would copy it.
        """

    def dlpack_of(self, x: Tensor) -> Any:
        """Return an object with ``__dlpack__`` and ``__dlpack_device__``: by default the tensor."""
        return x

    # -- for logs ---------------------------------------------------------------------------------

    @abstractmethod
    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        """Return tensors of one shape, dtype and device as one tensor with a new first axis."""

    def norm(self, x: Tensor) -> Tensor:
        """Return the square root of the sum of the squares, a scalar on the tensor's device.

        For a framework whose tensors have no ``sum``, or whose sum has another shape than ``()``.
        """
        return (x * x).sum() ** 0.5

    def detach(self, x: Tensor) -> Tensor:
        """Return a tensor without its history; a scalar can be kept for long. No copy if possible.

        It is for frameworks whose tensors keep their operands, or the tensor that they are a view
        of, alive: a lazy one computes here. It is also for frameworks whose variables are tensors,
        and change their values.
        """
        return x
