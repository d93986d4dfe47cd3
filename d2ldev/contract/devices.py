"""The area ``devices``: the framework's devices, with their queues and their memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from d2ldev.device import Device


class Memory(NamedTuple):
    """The memory of a device in bytes; ``None`` where the framework cannot say.

    Args:
        used: held by live tensors of this process now; on the CPU, by all of this process.
        peak: the most that was ever held so.
        total: the size of the device's memory.

    >>> Memory(used=1024, peak=4096, total=None).peak
    4096
    """

    used: int | None
    peak: int | None
    total: int | None


UNKNOWN_MEMORY = Memory(None, None, None)
"""The memory of a device of which the framework says nothing."""


class Devices(ABC):
    """Methods a framework implements about its devices.

    A framework that computes before it returns leaves out ``synchronize`` and ``is_idle``. A lazy
    one only records work until its values are needed, and needs both.
    """

    @abstractmethod
    def count(self) -> int:
        """Return how many GPUs of this process's machine the framework can use.

        Called by ``num_gpus``, and when a device is named for the first time; not called where
        ``D2LDEV_VIRTUAL_GPUS=0``. It makes no context on any GPU, so that a later fork works.

        Raises:
            Exception: if there is hardware that cannot be initialised. The exception becomes a
                ``DeviceInitializationWarning`` with its text, and the count 0.
        """

    @abstractmethod
    def native(self, device: Device) -> Any:
        """Return the framework's own object for a device that exists.

        ``backend.native`` calls it, and so does the first creation or copy on a device. ``Tensors``
        receives the returned object as ``native``.

        Raises:
            DeviceUnavailableError: if the framework finds only now that it cannot use the device.
        """

    def native_of_missing(self, device: Device) -> Any:
        """Return the framework's own object for a GPU that does not exist; None if it has none.

        Called by the book's ``gpu(i)``, which does not use it; see ``d2ldev.native``.
        """
        return None

    @abstractmethod
    def from_native(self, native: Any) -> Device | None:
        """Return the device of a framework's own device object; None for any other object.

        Args:
            native: any object that a user passed as a device, also every string. Of the strings,
                accept those that ``str(x.device)`` returns for a tensor of the framework.
        """

    @abstractmethod
    def platform(self, device: Device) -> str:
        """Return ``'cpu'``, ``'cuda'``, ``'rocm'``, ``'xpu'``, ``'mps'``, ``'virtual'`` ..."""

    @abstractmethod
    def default(self) -> Any:
        """Return the native device where the framework's own creation calls put a tensor now.

        d2ldev's own calls do not follow it: they go to the scope's device, else to the CPU.
        """

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        """Return the framework's own context that makes a device its default.

        Each call returns a new object. ``with backend.on(device):`` enters it, in the thread that
        leaves it. Another context may begin inside it by other means. Until that context ends,
        ``__exit__`` raises a ``RuntimeError``, and changes nothing. See ``d2ldev.scopes.Contexts``.
        """
        return nullcontext()

    def synchronize(self, device: Device) -> None:
        """Wait until all work on a device is done, without making a context there.

        A lazy framework computes all that is recorded there and that somebody holds. The error of
        an operation that fails only now is raised, once. Each read of its result raises it again.
        """

    def is_idle(self, device: Device) -> bool:
        """Return whether all work on a device is done, without waiting for it.

        False as long as ``synchronize`` would still compute or wait. Do not begin it here.
        """
        return True

    # The defaults are for a framework that always multiplies float32 in float32. A framework that
    # never does has 'multiply in float32' in ``Framework.cannot``.

    def matmul_precision(self) -> str:
        """Return the precision of matrix products and convolutions of float32 in this process.

        ``'highest'`` is float32; ``'high'`` is as good as TensorFloat-32, with 10 bits;
        ``'medium'`` is as good as bfloat16, with 7. Where several switches differ, it is the least
        precise of them.
        """
        return "highest"

    def set_matmul_precision(self, precision: str) -> Callable[[], None]:
        """Set the precision of products and convolutions, or a better one, in the process.

        Args:
            precision: as ``matmul_precision`` returns it.

        Returns:
            A function that puts back exactly what was.
        """
        return lambda: None

    def memory(self, device: Device) -> Memory:
        """Return the memory of a GPU; the core itself reads the memory of the process."""
        return UNKNOWN_MEMORY

    def empty_cache(self, device: Device) -> None:
        """Release the device memory that the allocator caches, if it can."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Return whether an exception of the framework says that memory ran out."""
        return isinstance(error, MemoryError)
