"""``Backend``: what one framework must say, and what every user may call.

Design rules, as in einops' backends:

- Native tensors go in and come out. A backend wraps nothing.
- The methods with a leading underscore, and those marked abstract, are what an author
  writes; they are given devices that exist and arguments that were checked. Everything else
  is derived from them, here, once.
- A copy happens only where the user wrote one, and never by way of another device.
- No framework's state is changed that the user did not ask to change.

The conformance suite (``d2ldev conformance NAME``) says when a backend is done.

Source: D2L, section 6.7, "GPUs"; names and signatures of the creation functions are those of
the Python array API standard, 2024.12.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from d2ldev.containers import PLAIN, TENSOR, Kind, Kinds, every, rebuild
from d2ldev.device import CPU, Device, cpu, gpu
from d2ldev.errors import (
    DeviceUnavailableError,
    InvalidDeviceError,
    OutOfDeviceMemoryError,
    UnsupportedValueError,
)
from d2ldev.placing import Part, describe, named_tensors, place

if TYPE_CHECKING:
    import numpy as np
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


class Backend(ABC):
    """One framework behind the contract.

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
    dtype_names: ClassVar[tuple[str, ...]]
    """The dtypes that its tensors can have, by name."""

    def __init__(self, virtual_gpus: int | None = None) -> None:
        if virtual_gpus is not None and virtual_gpus > self.max_virtual_gpus:
            raise DeviceUnavailableError(
                f"make {virtual_gpus} virtual GPUs",
                f"the {self.name} backend can make {self.max_virtual_gpus}",
                "unset D2LDEV_VIRTUAL_GPUS, or D2LDEV_BACKEND=reference (2 virtual GPUs)",
            )
        self.virtual_gpus = virtual_gpus
        self.kinds = Kinds(self.tensor_types, self.object_types)
        self._scope: ContextVar[Device | None] = ContextVar(f"{self.name}_scope", default=None)
        # Devices that are known to exist, by every spelling in which they were asked for.
        self._devices: dict[Any, Device] = {}
        self._natives: dict[Any, Any] = {}

    # -- devices: what an author writes ---------------------------------------------------

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

    # -- tensors: what an author writes ---------------------------------------------------

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
        """The name of a tensor's dtype, such as ``'float32'``."""

    @abstractmethod
    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        """A tensor with the values of a number, a nesting of lists, or a NumPy array.

        The array is of a dtype in ``dtype_names``, and the tensor never aliases it.
        """

    @abstractmethod
    def _full(self, shape: tuple[int, ...], value: Any, *, dtype: Any, device: Any) -> Tensor:
        """A tensor filled with a number; ``dtype`` and ``device`` are the framework's own."""

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

    @abstractmethod
    def _to_numpy(self, x: Tensor) -> NDArray[Any]:
        """The values in a new NumPy array."""

    @abstractmethod
    def _from_dlpack(self, x: Any) -> Tensor:
        """A tensor on the memory of another framework's."""

    # -- models: what an author writes ----------------------------------------------------

    @abstractmethod
    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        device: DeviceLike = None,
        seed: int = 0,
    ) -> Any:
        """A multilayer perceptron of the framework's own dense layers, callable as ``net(x)``.

        Args:
            sizes: the number of features of the input, of each hidden layer, and of the
                output: ``[20, 64, 1]``.
            activation: between the layers: ``'relu'``, ``'tanh'`` or ``'sigmoid'``.
            device: where its parameters are made.
            seed: of the initial parameters; the framework's own random state is left alone.

        Returns:
            A model in float32; ``net(x)`` maps ``(n, sizes[0])`` to ``(n, sizes[-1])``.

        Raises:
            UnsupportedValueError: for fewer than two sizes, or another activation.
        """

    def _parts(self, obj: Any) -> Iterator[Part]:
        """What one of ``object_types`` keeps: each tensor, nesting or object, for ``place``."""
        return iter(())

    def _attached(self, x: Tensor) -> Iterator[Part]:
        """What hangs on a tensor and has to be where it is, such as its gradient."""
        return iter(())

    def _is_refilled(self, x: Tensor) -> bool:
        """Whether ``place`` gives a tensor other memory instead of replacing the object.

        So that whoever else holds a parameter, such as an optimizer, still holds it afterwards.
        """
        return False

    def _refill(self, x: Tensor, new: Tensor) -> None:
        """Give ``x`` the memory of ``new``; called only where ``_is_refilled(x)``."""

    def _finish(self, obj: Any) -> None:
        """Called for each of ``object_types`` when its parts have moved. It must not fail."""

    # -- the machine: what an author writes -----------------------------------------------

    @abstractmethod
    def _synchronize(self, device: Device) -> None:
        """Return when all work queued on a device is done, without making a context there."""

    def is_idle(self, device: DeviceLike = None) -> bool:
        """Whether no work queued on a device (None: on any) is unfinished.

        A framework that computes before it returns is always idle.
        """
        return True

    @abstractmethod
    def _memory(self, device: Device) -> Memory:
        """The memory of a device that exists."""

    def _is_out_of_memory(self, error: Exception) -> bool:
        """Whether an exception of the framework says that memory ran out."""
        return isinstance(error, MemoryError)

    # -- devices: the contract ------------------------------------------------------------

    def cpu(self) -> Device:
        """The CPU."""
        return cpu()

    def gpu(self, i: int = 0) -> Device:
        """The GPU of index ``i``, whether or not it exists.

        Raises:
            InvalidDeviceError: if ``i`` is negative or no integer.
        """
        return gpu(i)

    def try_gpu(self, i: int = 0) -> Device:
        """``gpu(i)`` if it exists, else the CPU."""
        return gpu(i) if gpu(i).index < self.num_gpus() else CPU

    def try_all_gpus(self) -> list[Device]:
        """All GPUs, or ``[cpu()]`` if there is none: never empty."""
        return [gpu(i) for i in range(self.num_gpus())] or [CPU]

    def devices(self) -> list[Device]:
        """All devices that exist: the CPU first, then the GPUs."""
        return [CPU, *(gpu(i) for i in range(self.num_gpus()))]

    def device(self, spec: DeviceLike) -> Device:
        """The ``Device`` for a device in any spelling; whether it exists is not checked.

        Args:
            spec: a ``Device``, a string, or the framework's own device object.

        Raises:
            InvalidDeviceError: for anything else, such as another framework's device.
        """
        if isinstance(spec, Device):
            return spec
        if isinstance(spec, str):
            try:
                return Device.parse(spec)
            except InvalidDeviceError:
                # TensorFlow's own device objects are strings.
                device = self._from_native(spec)
                if device is None:
                    raise
                return device
        device = self._from_native(spec)
        if device is None:
            raise InvalidDeviceError(
                f"use {describe(spec)} as a device",
                f"it is neither a d2ldev.Device, a string, nor a device of {self.name}",
                "device = d2ldev.gpu(0), or a string: 'cpu', 'gpu:1'",
            )
        return device

    def native(self, device: DeviceLike) -> Any:
        """The framework's own object for a device, to be used in the framework's own calls.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        return self._existing(device, "use a device")[1]

    def platform(self, device: DeviceLike) -> str:
        """What a device is: ``'cpu'``, ``'cuda'``, ``'rocm'``, ``'xpu'``, ``'mps'``, ``'virtual'``.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        return self._platform(self._existing(device, "ask for the platform")[0])

    @contextmanager
    def on(self, device: DeviceLike) -> Iterator[Device]:
        """Make a device the place where tensors are created, for the length of a block.

        d2ldev's creation functions follow it per thread and per asyncio task. The
        framework's own default device is changed with it, by the framework's own means and
        with its rules: most keep it per thread, so do not ``await`` in such a block.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        place, _ = self._existing(device, "make tensors")
        with self._native_scope(place):
            token = self._scope.set(place)
            try:
                yield place
            finally:
                self._scope.reset(token)

    def _existing(self, spec: DeviceLike, attempted: str) -> tuple[Device, Any]:
        """A device that exists, and its native object; remembered by its spelling."""
        device = self.device(spec)
        if device is not CPU and device.index >= (count := self.num_gpus()):
            raise DeviceUnavailableError(
                f"{attempted} on {device}",
                f"{self.name} has {count} GPU{'' if count == 1 else 's'} here",
                f"use one that exists: backend.try_gpu({device.index}) is "
                f"{self.try_gpu(device.index)} here",
                self.devices(),
            )
        native = self._native(device)
        if spec is device or isinstance(spec, str):
            # Not the framework's own objects: torch.device('cuda') means another GPU after
            # torch.cuda.set_device.
            self._devices[spec] = device
            self._natives[spec] = native
        return device, native

    # -- creation: the contract -----------------------------------------------------------

    def asarray(
        self, obj: Any, *, dtype: DType = None, device: DeviceLike = None, like: Tensor = None
    ) -> Tensor:
        """A tensor with the values of ``obj``.

        Args:
            obj: a number, a nesting of lists, a NumPy array or scalar, anything with
                ``__array__``, or a tensor of this backend. NumPy memory is never aliased.
            dtype: None keeps NumPy's, and is the framework's default for numbers.
            device: None is the scope's device, else the CPU; a tensor stays where it is.
            like: a tensor that gives dtype and device where they are not given.

        Returns:
            A new tensor; a tensor that already is as asked for comes back itself.

        Raises:
            UnsupportedValueError: for object arrays, strings, ragged lists, and dtypes that
                the framework does not have.
            DeviceUnavailableError, OutOfDeviceMemoryError: see ``zeros``.
        """
        attempted = "make a tensor of data"
        if isinstance(obj, self.tensor_types):
            return self._convert(obj, dtype, device, like)
        native_dtype, native = self._destination(attempted, dtype, device, like)
        data = self._checked_data(obj, attempted)
        try:
            return self._from_data(data, native_dtype, native)
        except Exception as error:
            self._raise_if_out_of_memory(error, attempted, native)
            raise UnsupportedValueError(
                attempted,
                f"{self.name} cannot take {describe(obj)} {error}",
                "give numbers in a rectangular nesting, and a dtype that holds them",
            ) from error

    def zeros(
        self,
        shape: Shape,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """A tensor of zeros, made on the device.

        Args:
            shape: an integer or a sequence of them.
            dtype: None is the framework's default, float32.
            device: None is the scope's device, else the CPU.
            like: a tensor that gives dtype and device where they are not given.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if the device's memory does not suffice.
            InvalidDeviceError, UnsupportedValueError: for what is no device or no dtype.
        """
        return self._filled(shape, 0.0, dtype, device, like)

    def ones(
        self,
        shape: Shape,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """A tensor of ones, made on the device; see ``zeros``."""
        return self._filled(shape, 1.0, dtype, device, like)

    def full(
        self,
        shape: Shape,
        fill_value: float | complex,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """A tensor filled with a number, made on the device; see ``zeros``.

        ``dtype=None`` is the framework's default for that number, as in ``asarray``.
        """
        return self._filled(shape, fill_value, dtype, device, like)

    def arange(
        self,
        start: float,
        stop: float | None = None,
        step: float = 1,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """The numbers ``start, start + step, ...`` up to ``stop``, made on the device.

        Args:
            start: the first number; the only one given is ``stop``, and it starts from 0.
            stop: not included.
            step: the distance of two neighbours.
            dtype, device, like: see ``zeros``; None is the framework's default for the numbers.

        Returns:
            A tensor of shape ``(ceil((stop - start) / step),)``.
        """
        if stop is None:
            start, stop = 0, start
        dtype, native = self._destination("make a tensor", dtype, device, like)
        try:
            return self._arange(start, stop, step, dtype, native)
        except Exception as error:
            self._raise_if_out_of_memory(error, "make a tensor of a range", native)
            raise

    def rand(
        self,
        shape: Shape,
        *,
        seed: int | None = None,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """Random numbers, uniform in [0, 1), made on the device; see ``zeros``.

        Args:
            seed: None draws from the framework's own random state. With a seed, that state
                is left alone, and the same seed gives the same numbers on the same device.
        """
        return self._randomly("uniform", shape, seed, dtype, device, like)

    def randn(
        self,
        shape: Shape,
        *,
        seed: int | None = None,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """Random numbers, normal with mean 0 and deviation 1; see ``rand``."""
        return self._randomly("normal", shape, seed, dtype, device, like)

    def _filled(
        self, shape: Shape, value: Any, dtype: DType, device: DeviceLike, like: Tensor
    ) -> Tensor:
        native = None
        if dtype is None and like is None:
            try:
                native = self._natives.get(device)  # the common call, without a detour
            except TypeError:  # not hashable, so no device: the error is raised below
                pass
        if native is None:
            dtype, native = self._destination("make a tensor", dtype, device, like)
        if type(shape) is not tuple:
            shape = _as_tuple(shape)
        try:
            return self._full(shape, value, dtype=dtype, device=native)
        except Exception as error:
            self._raise_if_out_of_memory(error, f"make a tensor of shape {shape}", native)
            raise

    def _randomly(
        self,
        distribution: str,
        shape: Shape,
        seed: int | None,
        dtype: DType,
        device: DeviceLike,
        like: Tensor,
    ) -> Tensor:
        dtype, native = self._destination("make a random tensor", dtype, device, like)
        if seed is not None:
            seed = operator.index(seed)
        try:
            return self._random(distribution, _as_tuple(shape), seed, dtype, native)
        except Exception as error:
            self._raise_if_out_of_memory(error, f"make a tensor of shape {shape}", native)
            raise

    def dtype(self, spec: DType) -> Any:
        """The framework's own dtype for a name, its own dtype, or NumPy's.

        Raises:
            UnsupportedValueError: if the framework does not have it.
        """
        # NumPy's dtypes have a ``name``, its scalar classes a ``__name__``.
        name = spec if isinstance(spec, str) else getattr(spec, "name", None)
        if not isinstance(name, str):
            name = getattr(spec, "__name__", None)
        if isinstance(name, str) and name in self.dtype_names:
            return self._native_dtype(name)
        if any(spec is self._native_dtype(name) for name in self.dtype_names):
            return spec
        raise UnsupportedValueError(
            f"use {spec!r} as a dtype",
            f"{self.name} has no such dtype",
            f"one of {', '.join(self.dtype_names)}",
        )

    def _destination(
        self, attempted: str, dtype: DType, device: DeviceLike, like: Tensor
    ) -> tuple[Any, Any]:
        """The native dtype (or None) and the native device of a new tensor."""
        if like is not None:
            if device is None:
                device = self.device_of(like)
            if dtype is None:
                dtype = self.dtype_of(like)
        if device is None:
            device = self._scope.get() or CPU
        return (
            None if dtype is None else self.dtype(dtype),
            self._existing(device, attempted)[1],
        )

    def _convert(self, x: Tensor, dtype: DType, device: DeviceLike, like: Tensor) -> Tensor:
        """``asarray`` of a tensor: nothing happens that was not asked for."""
        if like is not None:
            dtype = self.dtype_of(like) if dtype is None else dtype
            device = self.device_of(like) if device is None else device
        if device is not None:
            x = self.to(x, device)
        if dtype is not None and self.dtype(dtype) is not self._native_dtype(self.dtype_of(x)):
            x = self._astype(x, self.dtype(dtype))
        return x

    def _checked_data(self, obj: Any, attempted: str) -> Any:
        """Numbers as they are; anything that NumPy has to read as an array that can be taken."""
        if isinstance(obj, (bool, int, float, complex)):
            return obj
        import numpy as np

        try:
            array: NDArray[Any] = np.asarray(obj)
        except Exception as error:  # ragged lists, and whatever an ``__array__`` raises
            raise UnsupportedValueError(
                attempted,
                f"NumPy makes no array of {describe(obj)} {error}",
                "pad a ragged list to one length, or make a tensor of each row",
            ) from error
        if array.dtype.name not in self.dtype_names:
            raise UnsupportedValueError(
                attempted,
                f"{describe(obj)} is an array of {array.dtype.name}, which {self.name} has not",
                f"obj.astype('float32'), or another of {', '.join(self.dtype_names)}",
            )
        if isinstance(obj, (list, tuple)):
            return obj
        # The machine's byte order, no negative strides: what every framework can read.
        native_order: np.dtype[Any] = array.dtype.newbyteorder("=")
        return np.ascontiguousarray(array, native_order).reshape(array.shape)

    # -- moving: the contract -------------------------------------------------------------

    def to(self, x: Any, device: DeviceLike) -> Any:
        """Move a tensor, or every tensor in a nesting, to a device.

        Args:
            x: a tensor, or any nesting of dicts, lists, tuples, namedtuples, dataclasses and
                ``d2ldev.register_container``'s; None, numbers and strings stay as they are.
            device: where to.

        Returns:
            ``x`` itself if it is there already (``to(x, device) is x``), else a copy on
            ``device``. Containers come back as what they were, tied leaves tied; a container
            in which nothing moved is itself.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if its memory does not suffice.
            UnsupportedValueError: if ``x`` holds something else, which the message names.
                Nothing has moved then.
        """
        try:
            target = self._devices[device]
        except (KeyError, TypeError):
            target = self._existing(device, "move a tensor")[0]
        kinds = self.kinds
        if kinds[type(x)] is TENSOR:
            if self.device_of(x) is target:
                return x
            return self._copy_to(x, target, f"move a tensor to {target}")
        device_of = self.device_of
        try:
            if every(x, kinds, lambda tensor: device_of(tensor) is target):
                return x
        except RecursionError:
            pass  # the walk below finds the cycle and names it
        return self._copied(x, target, f"move a batch to {target}", always=False)

    def copy(self, x: Any, device: DeviceLike = None) -> Any:
        """Copy a tensor, or every tensor in a nesting, into new memory.

        Args:
            x: as in ``to``.
            device: where to; None leaves each tensor on its device.

        Returns:
            A copy that shares no memory with ``x``, also when it was there already. Leaves
            that were tied to each other are tied again.

        Raises:
            As ``to``.
        """
        target = None if device is None else self._existing(device, "copy a tensor")[0]
        return self._copied(x, target, "copy a tensor", always=True)

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        """The values of a tensor in a NumPy array that the caller owns.

        Returns:
            A new, writable array of the same shape and dtype; bfloat16 and float8 are those of
            ``ml_dtypes``.

        Raises:
            UnsupportedValueError: if ``x`` is no tensor of this backend.
        """
        if kinds_name := self._foreign(x):
            raise self._refusal("make a NumPy array", x, "", kinds_name)
        return self._to_numpy(x)

    def from_dlpack(self, x: Any) -> Tensor:
        """A tensor on the memory of another framework's tensor, without a copy.

        Args:
            x: anything with ``__dlpack__`` and ``__dlpack_device__``.

        Raises:
            UnsupportedValueError: if the protocol does not allow it: no such method, a dtype
                without a number in DLPack, a tensor that needs gradients, read-only memory.
        """
        attempted = f"take over the memory of {describe(x)}"
        try:
            return self._from_dlpack(x)
        except Exception as error:
            raise UnsupportedValueError(
                attempted,
                f"{type(error).__name__}: {error}",
                "copy instead: backend.asarray(d2ldev.backend_of(x).to_numpy(x))",
            ) from error

    def _copied(self, x: Any, target: Device | None, attempted: str, *, always: bool) -> Any:
        def change(leaf: Any, kind: Kind, name: str) -> Any:
            if kind is not TENSOR:
                raise self._refusal(attempted, leaf, name, self._foreign(leaf))
            there = self.device_of(leaf)
            if there is (target or there) and not always:
                return leaf
            return self._copy_to(leaf, target or there, attempted)

        return rebuild(x, self.kinds, change, attempted)

    def _copy_to(self, x: Tensor, device: Device, attempted: str) -> Tensor:
        native = self._natives.get(device) or self._existing(device, attempted)[1]
        try:
            return self._copy(x, native)
        except Exception as error:
            self._raise_if_out_of_memory(error, attempted, native)
            raise

    def _foreign(self, x: Any) -> str:
        """What a value is instead of a tensor of this backend; empty if it is one."""
        kind = self.kinds[type(x)]
        if kind is TENSOR:
            return ""
        return "a plain value" if kind is PLAIN else f"no tensor of the {self.name} backend"

    def _refusal(self, attempted: str, x: Any, name: str, what: str) -> UnsupportedValueError:
        where = f" at {name}" if name else ""
        fix = "backend.asarray(x, device=device) makes a tensor of numbers and NumPy arrays"
        if isinstance(x, self.object_types):
            fix = "model = backend.place(model, device) moves models and optimizers"
        elif hasattr(x, "__dlpack__") and type(x).__module__ != "numpy":
            fix = "x = backend.from_dlpack(x) takes over another framework's tensor"
        elif not hasattr(x, "__array__"):
            fix = "take it out of the batch, or d2ldev.register_container(type(x), ...)"
        problem = f"{describe(x)}{where} is {what}"
        return UnsupportedValueError(attempted, problem, fix)

    # -- models: the contract -------------------------------------------------------------

    def place(self, obj: Any, device: DeviceLike) -> Any:
        """Move a model, an optimizer or a parameter pytree to a device, all of it, once.

        Args:
            obj: a model (its parameters with their gradients, its buffers, and the tensors
                in its plain attributes), an optimizer with its state, or any nesting of
                them and of tensors. What they share with each other stays shared.
            device: where to.

        Returns:
            What to use from then on: ``obj`` itself where the framework moves in place.

        Raises:
            DeviceUnavailableError, OutOfDeviceMemoryError, UnsupportedValueError: as ``to``;
                everything is where it was then.
        """
        target = self._existing(device, "place a model")[0]
        return place(self, obj, target, f"place {type(obj).__name__} on {target}")

    def placement(self, obj: Any) -> Mapping[str, Device]:
        """Where everything is that ``place`` looks after: name -> device.

        >>> backend.placement(net)                                         # doctest: +SKIP
        {'0.weight': Device('gpu', 0), '0.bias': Device('gpu', 0)}
        """
        return {name: self.device_of(x) for name, x in named_tensors(self, obj)}

    def named_tensors(self, obj: Any) -> Mapping[str, Tensor]:
        """The tensors that ``place`` looks after: name -> tensor."""
        return dict(named_tensors(self, obj))

    # -- the machine: the contract --------------------------------------------------------

    def synchronize(self, device: DeviceLike = None) -> None:
        """Return when all work queued on a device (None: on every device) is done."""
        if device is not None:
            self._synchronize(self._existing(device, "synchronize")[0])
            return
        for every_device in self.devices():
            self._synchronize(every_device)

    def memory(self, device: DeviceLike) -> Memory:
        """The memory of a device, in bytes; None where the framework cannot say."""
        return self._memory(self._existing(device, "ask for the memory")[0])

    def _raise_if_out_of_memory(self, error: Exception, attempted: str, native: Any) -> None:
        if self._is_out_of_memory(error):
            device = self._from_native(native)
            raise OutOfDeviceMemoryError(
                attempted,
                f"{device} has too little free memory: {error}",
                "use a smaller batch, or free tensors; backend.memory(device) shows the memory",
                [device],
            ) from error


def _as_tuple(shape: Shape) -> tuple[int, ...]:
    try:
        return (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(shape)  # type: ignore[arg-type]
