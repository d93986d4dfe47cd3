"""``Backend``: the methods that a user calls, the same on every framework.

Each method checks its arguments. It then calls one function of ``d2ldev.operations`` or
``d2ldev.files``, or one object of the framework. It takes and returns native tensors, and copies
only where you ask for a copy. Authors of backends find their interface in ``d2ldev.framework``.

Source: D2L, section 6.7, "GPUs".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, overload

from d2ldev.contract import Framework, Learner, Memory, TrainingSettings
from d2ldev.contract.abilities import check_precision, require, set_precision
from d2ldev.contract.framework import count_gpus
from d2ldev.contract.training.steps import find_precision
from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import UnsupportedValueError, describe, quote
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations import creation, devices, moving, placing
from d2ldev.operations.arguments import flag, whole_number
from d2ldev.operations.devices import resolve_all
from d2ldev.operations.inventory import Inventory, NamedTensors
from d2ldev.operations.other_backends import of_another_backend
from d2ldev.options import (
    Activation,
    Loss,
    MatmulPrecisionName,
    Optimizer,
    Precision,
    Statistics,
)
from d2ldev.registry.selection import get_framework
from d2ldev.typing import (
    DeviceLike,
    DTypeLike,
    NativeDeviceT,
    Shape,
    SupportsDLPack,
    T,
    TensorT,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from d2ldev.contract.group import Group
    from d2ldev.files.load_into import Loaded
    from d2ldev.operations.live_tensors import LiveTensor
    from d2ldev.operations.summary import Summary
    from d2ldev.operations.timing import Timing


class Backend(Generic[TensorT, NativeDeviceT]):
    """A framework with the methods of the contract, generic in its tensors and its device objects.

    Args:
        framework: the author's ``Framework``; ``d2ldev.get_backend(name)`` makes both objects.

    >>> from d2ldev import get_backend
    >>> backend = get_backend('reference')
    >>> X = backend.ones((2, 3), device='gpu:0')
    >>> backend.to(X, 'gpu:0') is X
    True
    """

    _framework: Framework
    # The same, or None in the handle inside ``use_backend``. The handle has to ask for
    # ``_framework`` at each call. Python reads this attribute in half the time.
    _known_framework: Framework | None

    def __init__(self, framework: Framework) -> None:
        if not isinstance(framework, Framework):
            raise UnsupportedValueError(
                f"make a backend of {describe(framework)}",
                "it is not a Framework",
                "d2ldev.get_backend('torch')",
            )
        self._framework = self._known_framework = framework
        _backends.setdefault(framework, self)

    def __repr__(self) -> str:
        return f"<the {self.name} backend>"

    def __reduce__(self) -> tuple[Any, ...]:
        # A model may keep its backend, and travel to another process. The name finds it there.
        return _by_name, (self.name,)

    # -- names and types --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name that it is selected by: ``'torch'``."""
        return self._framework.name

    @property
    def dtype_names(self) -> tuple[str, ...]:
        """The dtypes that its tensors can have, by name."""
        return self._framework.tensors.dtype_names

    # -- devices ----------------------------------------------------------------------------------

    def cpu(self) -> Device:
        """Return the CPU.

        >>> backend.cpu()
        Device('cpu')
        """
        return CPU

    def gpu(self, i: int = 0) -> Device:
        """Return the GPU of index ``i``, whether or not it exists.

        Args:
            i: the index of the GPU, from 0.

        Raises:
            InvalidDeviceError: if ``i`` is negative or not an integer.

        >>> backend.gpu(1)
        Device('gpu', 1)
        """
        return gpu(i)

    def num_gpus(self) -> int:
        """Return how many GPUs of this process's machine the framework can use.

        Without a GPU it is 0. The call makes no context on any GPU, so that a later fork works.
        Hardware that cannot be initialised gives a ``DeviceInitializationWarning`` with the reason.

        >>> backend.num_gpus()
        2
        """
        return count_gpus(self._framework)

    def try_gpu(self, i: int = 0) -> Device:
        """Return ``gpu(i)`` if it exists, else the CPU.

        Args:
            i: the index of the GPU, from 0.

        Raises:
            InvalidDeviceError: if ``i`` is negative or not an integer.

        >>> backend.try_gpu(1), backend.try_gpu(9)
        (Device('gpu', 1), Device('cpu'))
        """
        return gpu(i) if gpu(i).index < self.num_gpus() else CPU

    def try_all_gpus(self) -> list[Device]:
        """Return all GPUs, or ``[cpu()]`` if there is none: never empty.

        >>> backend.try_all_gpus()
        [Device('gpu', 0), Device('gpu', 1)]
        """
        return self.devices()[1:] or [CPU]

    def devices(self) -> list[Device]:
        """Return all devices that exist: the CPU first, then the GPUs.

        >>> backend.devices()
        [Device('cpu'), Device('gpu', 0), Device('gpu', 1)]
        """
        return devices.all_devices(self._framework)

    def device(self, spec: DeviceLike[NativeDeviceT]) -> Device:
        """Return the ``Device`` for a device, without a check whether it exists.

        Args:
            spec: a ``Device``, a string, or the framework's own device object. A string is
                ``'cpu'``, ``'gpu:1'``, ``'cuda:1'``, or ``str(x.device)`` of a tensor, such as
                ``'vgpu:1'`` or ``'TFRT_CPU_1'``. On virtual GPUs ``torch.device('cuda:1')`` and
                ``mx.gpu(1)`` are ``gpu(1)``.

        Raises:
            InvalidDeviceError: for anything else, such as another framework's device.

        >>> backend.device('cuda:1')
        Device('gpu', 1)
        """
        return devices.parse(self._framework, spec)

    def native(self, device: DeviceLike[NativeDeviceT]) -> NativeDeviceT:
        """Return the framework's own object for a device, to be used in the framework's own calls.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> X = backend.ones(2, device='gpu:1')
        >>> backend.native('gpu:1') == X.device
        True
        """
        place = devices.resolve(self._framework, device, "compute")
        return devices.native(self._framework, place, "compute")

    def platform(self, device: DeviceLike[NativeDeviceT]) -> str:
        """Return the platform of a device: ``'cpu'``, ``'cuda'``, ``'rocm'``, ``'virtual'`` ...

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> backend.platform('cpu'), backend.platform('gpu:0')
        ('cpu', 'virtual')
        """
        place = devices.resolve(self._framework, device, "ask for the platform")
        return self._framework.devices.platform(place)

    def default_device(self) -> Device:
        """Return the device where the framework's own creation calls put a tensor now.

        d2ldev's own calls do not follow it. They use the scope's device, else the CPU.

        >>> backend.default_device()
        Device('cpu')
        """
        self._framework.state.contexts.settle()
        return devices.parse(self._framework, self._framework.devices.default())

    def on(self, device: DeviceLike[NativeDeviceT]) -> AbstractContextManager[Device]:
        """Create tensors on a device, within a block.

        d2ldev's creation functions follow the block per thread and per asyncio task. The block also
        sets the framework's own default device, by the framework's own rules. Most frameworks keep
        it per thread, so do not ``await`` in such a block. Blocks may end in any order.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Returns:
            A context manager, whose ``as`` is the ``Device``.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.
            ScopeError: if the block ends in another thread, or in a block of the framework's own
                that began in this one. The framework's default device is not restored then, but
                d2ldev's own calls have left the block.

        >>> with backend.on('gpu:1'):
        ...     X = backend.ones((2, 3))
        >>> backend.device_of(X)
        Device('gpu', 1)
        """
        return devices.on(self._framework, device)

    def synchronize(self, device: DeviceLike[NativeDeviceT] | None = None) -> None:
        """Return when all work on a device (None: on every device) is done.

        That is the work in its queue, and what a lazy framework has only recorded so far.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Raises:
            OutOfDeviceMemoryError: if the memory ran out only now.
            Exception: the framework's own error of an operation that has failed only now.
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> Y = backend.ones((2, 3), device='gpu:0') + 1
        >>> backend.synchronize('gpu:0')
        """
        devices.synchronize(self._framework, device)

    def timeit(
        self, function: Callable[..., Any], /, *args: Any, seconds: float = 1.0, **kwargs: Any
    ) -> Timing:
        """Measure how long a call takes, with all the work that it queues on any device.

        Each run waits for every device before and after the call. A test on long products first
        shows that ``synchronize`` of each device really waits. The first call may compile, and does
        not count. Short calls run many times for one measurement. A lazy framework computes each of
        them, and not what the call drops.

        Args:
            function: called as often as the measurement needs.
            args, kwargs: its arguments.
            seconds: about how long to measure after the first calls, in at least five runs.

        Returns:
            The median and the quartiles of the seconds of a call. Then the number of runs, the
            calls in each run, and the devices.

        Raises:
            UnsupportedValueError: if the function is not callable, or the seconds are not a number.
            DeviceUnavailableError: if ``synchronize`` of a device does not wait.

        >>> X = backend.ones((8, 8))
        >>> timing = backend.timeit(lambda: X @ X, seconds=0.01)
        >>> timing.low <= timing.median <= timing.high
        True
        """
        from d2ldev.operations.timing import timeit

        return timeit(self._framework, function, args, kwargs, seconds)

    def is_idle(self, device: DeviceLike[NativeDeviceT] | None = None) -> bool:
        """Return whether all work on a device (None: on every device) is done; see ``synchronize``.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> backend.synchronize()
        >>> backend.is_idle()
        True
        """
        asked = devices.resolve_or_all(self._framework, device, "ask whether there is work")
        return all(self._framework.devices.is_idle(each) for each in asked)

    @overload
    def matmul_precision(self) -> MatmulPrecisionName: ...

    @overload
    def matmul_precision(self, precision: MatmulPrecisionName) -> AbstractContextManager[str]: ...

    def matmul_precision(
        self, precision: MatmulPrecisionName | None = None
    ) -> str | AbstractContextManager[str]:
        """Set, or return, the precision of float32 products and convolutions.

        A call holds from now on. A block holds to its end, and restores exactly the earlier
        precision. A call in a block holds to the end of that block. The process has one switch, so
        the last setting holds in all threads.

        Args:
            precision: ``'highest'`` is float32, ``'high'`` TensorFloat-32 and ``'medium'``
                bfloat16. Devices and frameworks without the last two use a better one. None only
                returns the precision.

        Returns:
            A block, whose ``as`` is the precision in force. Without an argument, that precision. It
            may be better than the requested one. It is the less precise one of products and
            convolutions. PyTorch begins with ``'high'`` on CUDA, because of its convolutions.

        Raises:
            UnsupportedValueError: if the precision is invalid, or the framework cannot use it.
            ScopeError: if a less precise ``jax.default_matmul_precision`` is in force here.

        >>> with backend.matmul_precision('highest'):
        ...     Y = backend.ones((2, 3)) @ backend.ones((3, 2))
        >>> backend.matmul_precision()
        'highest'
        """
        if precision is None:
            return cast("MatmulPrecisionName", self._framework.state.matmul_switch.precision())
        attempted, fix = "set the precision of products", "backend.matmul_precision('highest')"
        framework = self._framework
        checked = check_precision(framework, precision, attempted, fix)
        return set_precision(framework, checked)

    def memory(self, device: DeviceLike[NativeDeviceT]) -> Memory:
        """Return the memory of a device, in bytes; None where the framework does not know.

        For a GPU it is the memory of the tensors. For the CPU it is the resident memory of this
        process, and ``total`` is the memory of the machine.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Returns:
            A named tuple with ``used``, ``peak`` and ``total``: integers or None.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> memory = backend.memory('cpu')
        >>> memory.used <= memory.peak
        True
        """
        place = devices.resolve(self._framework, device, "ask for the memory")
        return devices.host_memory() if place is CPU else self._framework.devices.memory(place)

    def empty_cache(self, device: DeviceLike[NativeDeviceT] | None = None) -> None:
        """Release the memory that the framework caches on a device (None: on all devices).

        Other processes can then use it. PyTorch and MXNet release their caches. For other
        frameworks this is a no-op.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> backend.empty_cache('gpu:0')
        """
        for each in devices.resolve_or_all(self._framework, device, "empty the cache"):
            self._framework.devices.empty_cache(each)

    def live_tensors(self, device: DeviceLike[NativeDeviceT] | None = None) -> list[LiveTensor]:
        """Return the tensors on a device (None: on every device), the largest first.

        They are the tensors that Python objects hold. In JAX it is JAX's own list of arrays.
        Tensors in native code, such as those kept for a backward pass, are missing. Except in JAX,
        tensors that ``gc.freeze()`` hides are missing too. A view counts its own elements.

        Args:
            device: a ``Device``, a string, or the framework's own device object.

        Returns:
            For each tensor its class, shape, dtype, bytes and device. If Python traces memory
            (``tracemalloc.start(50)``), also the lines that made it, your own line last. Trace deep
            enough: Keras makes a variable thirty calls below ``Dense.build``.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            InvalidDeviceError: if ``device`` is invalid.

        >>> X = backend.ones((1000, 3), device='gpu:1')
        >>> largest = backend.live_tensors('gpu:1')[0]
        >>> largest.shape, largest.dtype, largest.nbytes
        ((1000, 3), 'float32', 12000)
        """
        from d2ldev.operations.live_tensors import live_tensors

        return live_tensors(self._framework, device)

    # -- making tensors ---------------------------------------------------------------------------

    def asarray(
        self,
        obj: npt.ArrayLike | TensorT,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        copy: bool | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make a tensor with the values of ``obj``.

        Integers beyond every integer dtype become floats if you ask for a float dtype.

        Args:
            obj: a number, nested lists, a NumPy array or scalar, an object with ``__array__``, or a
                tensor of this backend. The result never shares memory with NumPy.
            dtype: None keeps the dtype of NumPy's data. Python numbers get the default dtype of
                their kind: bool, the framework's default integer dtype, float32 or complex64. This
                is the rule of the array API standard. The default integer dtype is int32 in
                TensorFlow and in JAX without ``jax_enable_x64``, else int64. Your own defaults of
                the framework count. JAX narrows NumPy's 64 bits, as it does itself.
            device: None is the scope's device, else the CPU. A tensor stays on its device.
            copy: True always makes new memory. False never copies: ``obj`` has to be a tensor with
                the requested dtype and device. None copies if needed.
            like: a tensor that gives the dtype and the device that you leave out.

        Returns:
            A new tensor, or ``obj`` itself if it is a tensor with the requested dtype and device.

        Raises:
            UnsupportedValueError: for object arrays, strings, ragged lists, and dtypes that the
                framework does not have. With ``copy=False``, if a copy is needed. For a value
                outside the dtype, such as 0.25 in ``'int32'``, 2 in ``'bool'``, or 1e39 in
                ``'float32'``. The framework converts tensors by its own rules, because this call
                does not wait for their values. Arrays of floats are rounded to narrower floats as
                in NumPy.
            DeviceUnavailableError, OutOfDeviceMemoryError, InvalidDeviceError: see ``zeros``.

        >>> X = backend.asarray([[1, 2], [3, 4]], dtype='float32', device='gpu:0')
        >>> X.shape, backend.dtype_of(X), backend.device_of(X)
        ((2, 2), 'float32', Device('gpu', 0))
        """
        if copy is not None:
            copy = flag("make a tensor", "copy", copy)
        framework = self._framework
        if framework.state.kinds[type(obj)] is TENSOR:
            return moving.convert(framework, obj, dtype, device, copy, like)
        return creation.asarray(framework, obj, dtype, device, copy, like)

    def zeros(
        self,
        shape: Shape,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make a tensor of zeros on the device.

        Args:
            shape: an integer or a sequence of integers.
            dtype: None is the framework's default, float32.
            device: None is the scope's device, else the CPU.
            like: a tensor that gives the dtype and the device that you leave out.

        Returns:
            A new tensor of shape ``shape``.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if the tensor does not fit into the device's memory.
            InvalidDeviceError: if ``device`` is invalid.
            UnsupportedValueError: if ``dtype`` or ``shape`` is invalid.

        >>> X = backend.zeros((2, 3), device='gpu:0')
        >>> X.shape, backend.dtype_of(X), backend.device_of(X)
        ((2, 3), 'float32', Device('gpu', 0))
        """
        framework = self._framework
        zeros = framework.tensors.zeros
        return creation.make_tensor(framework, zeros, shape, dtype, device, like)

    def ones(
        self,
        shape: Shape,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make a tensor of ones on the device; see ``zeros``.

        Args:
            shape, dtype, device, like: see ``zeros``.

        Returns:
            A new tensor of shape ``shape``.

        >>> X = backend.ones((2, 3), device='gpu:0')
        >>> backend.to_numpy(X)
        array([[1., 1., 1.],
               [1., 1., 1.]], dtype=float32)
        """
        framework = self._framework
        ones = framework.tensors.ones
        return creation.make_tensor(framework, ones, shape, dtype, device, like)

    def full(
        self,
        shape: Shape,
        fill_value: float | complex,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make a tensor filled with a number on the device; see ``zeros``.

        Args:
            shape, device, like: see ``zeros``.
            fill_value: a number of Python, or a scalar of NumPy.
            dtype: None is the default dtype of the fill value, as in ``asarray``.

        Returns:
            A new tensor of shape ``shape``.

        Raises:
            UnsupportedValueError: if the fill value is not a number, or is outside the dtype, such
                as 0.25 in ``'int32'``.

        >>> backend.to_numpy(backend.full(3, 0.5))
        array([0.5, 0.5, 0.5], dtype=float32)
        """
        return creation.full(self._framework, shape, fill_value, dtype, device, like)

    def empty(
        self,
        shape: Shape,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make a tensor with arbitrary values on the device; see ``zeros``.

        JAX and TensorFlow cannot leave memory uninitialised: the values are zeros there.

        Args:
            shape, dtype, device, like: see ``zeros``.

        Returns:
            A new tensor of shape ``shape``.

        >>> backend.empty((2, 3), dtype='float64').shape
        (2, 3)
        """
        framework = self._framework
        return creation.make_tensor(framework, framework.tensors.empty, shape, dtype, device, like)

    def zeros_like(
        self,
        x: TensorT,
        /,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
    ) -> TensorT:
        """Make a tensor of zeros with the shape of ``x``.

        Args:
            x: a tensor.
            dtype: None is the dtype of ``x``.
            device: None is the device of ``x``.

        Returns:
            A new tensor of the shape of ``x``.

        Raises:
            UnsupportedValueError: if ``x`` is not a tensor of this backend.
            DeviceUnavailableError, OutOfDeviceMemoryError: see ``zeros``.

        >>> X = backend.zeros_like(backend.ones((2, 3), device='gpu:0'))
        >>> X.shape, backend.device_of(X)
        ((2, 3), Device('gpu', 0))
        """
        return creation.make_like(self._framework, self._framework.tensors.zeros, x, dtype, device)

    def ones_like(
        self,
        x: TensorT,
        /,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
    ) -> TensorT:
        """Make a tensor of ones with the shape of ``x``; see ``zeros_like``.

        Args:
            x, dtype, device: see ``zeros_like``.

        Returns:
            A new tensor of the shape of ``x``.

        >>> X = backend.zeros(2, dtype='float64')
        >>> backend.to_numpy(backend.ones_like(X))
        array([1., 1.])
        """
        return creation.make_like(self._framework, self._framework.tensors.ones, x, dtype, device)

    def full_like(
        self,
        x: TensorT,
        /,
        fill_value: float | complex,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
    ) -> TensorT:
        """Make a tensor with the shape of ``x``, filled with a number; see ``zeros_like``.

        Args:
            x, dtype, device: see ``zeros_like``.
            fill_value: a number of Python, or a scalar of NumPy.

        Returns:
            A new tensor of the shape of ``x``.

        Raises:
            UnsupportedValueError: if the number is outside the dtype; see ``full``.

        >>> X = backend.zeros(2, dtype='float64')
        >>> backend.to_numpy(backend.full_like(X, 0.5))
        array([0.5, 0.5])
        """
        return creation.full_like(self._framework, x, fill_value, dtype, device)

    def empty_like(
        self,
        x: TensorT,
        /,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
    ) -> TensorT:
        """Make a tensor with the shape of ``x`` and arbitrary values; see ``zeros_like``.

        Args:
            x, dtype, device: see ``zeros_like``.

        Returns:
            A new tensor of the shape of ``x``.

        >>> backend.empty_like(backend.ones((2, 3))).shape
        (2, 3)
        """
        return creation.make_like(self._framework, self._framework.tensors.empty, x, dtype, device)

    def arange(
        self,
        start: float,
        stop: float | None = None,
        step: float = 1,
        *,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make the numbers ``start, start + step, ...`` up to ``stop`` on the device.

        It counts in every real dtype of ``dtype_names``, with exact integers up to the end of
        ``uint64``. An empty range keeps its dtype.

        Args:
            start: the first number. A single number is ``stop``, and ``start`` is 0.
            stop: the end, not included.
            step: the distance between two numbers.
            dtype: None is the default integer dtype if all three numbers are integers. Otherwise it
                is the default float dtype, as in ``asarray``.
            device, like: see ``zeros``.

        Returns:
            A tensor of shape ``(ceil((stop - start) / step),)``.

        Raises:
            UnsupportedValueError: if a number is outside the dtype.

        >>> backend.to_numpy(backend.arange(2, 8, 2))
        array([2, 4, 6])
        """
        return creation.arange(self._framework, start, stop, step, dtype, device, like)

    def rand(
        self,
        shape: Shape,
        *,
        seed: int | None = None,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make random numbers, uniform in [0, 1), on the device; see ``zeros``.

        Args:
            shape, dtype, device, like: see ``zeros``.
            seed: None draws from the framework's own random state. A seed neither reads nor changes
                that state. One seed gives the same numbers on one device, with one version of the
                framework. Other devices may give other numbers, as torch's GPUs do.

        Returns:
            A new tensor of shape ``shape``.

        Raises:
            UnsupportedValueError: if ``dtype`` is not a float dtype, or the seed is invalid.

        >>> X, Y = backend.rand(5, seed=1), backend.rand(5, seed=1)
        >>> np.array_equal(backend.to_numpy(X), backend.to_numpy(Y))
        True
        """
        return creation.random(self._framework, "uniform", shape, seed, dtype, device, like)

    def randn(
        self,
        shape: Shape,
        *,
        seed: int | None = None,
        dtype: DTypeLike | None = None,
        device: DeviceLike[NativeDeviceT] | None = None,
        like: TensorT | None = None,
    ) -> TensorT:
        """Make random numbers, normal with mean 0 and deviation 1; see ``rand``.

        Args:
            shape, seed, dtype, device, like: see ``rand``.

        Returns:
            A new tensor of shape ``shape``.

        >>> backend.randn((2, 3), seed=1, device='gpu:0').shape
        (2, 3)
        """
        return creation.random(self._framework, "normal", shape, seed, dtype, device, like)

    def seed(self, seed: int) -> None:
        """Seed the framework's own global random numbers, on every device.

        Each device then repeats its random numbers: ``rand`` and ``randn`` without a seed, dropout,
        and the values of new layers. In JAX only ``rand`` and ``randn`` repeat, because models have
        keys. The call does not seed Python or NumPy, unless the framework draws from them (Keras
        and the reference backend).

        Args:
            seed: from 0 to ``2**32 - 1``.

        Raises:
            UnsupportedValueError: if the seed is invalid.

        >>> backend.seed(42)
        >>> first = backend.to_numpy(backend.rand(3))
        >>> backend.seed(42)
        >>> np.array_equal(backend.to_numpy(backend.rand(3)), first)
        True
        """
        number = whole_number("seed", "seed", seed, least=0, fix="backend.seed(0)")
        if number >= 2**32:
            raise UnsupportedValueError(
                f"seed with {quote(number)}",
                "not every framework takes it",
                f"backend.seed({2**32 - 1})",
            )
        self._framework.tensors.seed(number)

    def dtype(self, spec: DTypeLike) -> Any:
        """Return the framework's own dtype for a name, its own dtype, or NumPy's.

        Args:
            spec: the name of a dtype, the framework's own dtype, or NumPy's.

        Raises:
            UnsupportedValueError: if the framework does not have it.

        >>> X = backend.ones(2)
        >>> backend.dtype('float32') == backend.dtype(np.float32) == X.dtype
        True
        """
        return creation.dtype(self._framework, spec)

    # -- existing tensors -------------------------------------------------------------------------

    def device_of(self, x: TensorT) -> Device:
        """Return the device that holds the bytes of a tensor.

        Args:
            x: a tensor.

        Raises:
            UnsupportedValueError: if ``x`` is not a tensor of this backend. If it has no single
                device. Examples are tensors that ``jit`` or ``tf.function`` traces, tensors on
                several devices, and torch's ``meta`` tensors.

        >>> backend.device_of(backend.ones(2, device='gpu:1'))
        Device('gpu', 1)
        """
        framework = self._known_framework or self._framework
        try:
            return framework.tensors.device_of(x)
        except UnsupportedValueError:
            attempted = "tell the device of a tensor"
            if foreign := of_another_backend(framework, attempted, x):
                raise foreign from None
            raise

    def dtype_of(self, x: TensorT) -> str:
        """Return the name of a tensor's dtype, such as ``'float32'``.

        Args:
            x: a tensor.

        Raises:
            UnsupportedValueError: if ``x`` is not a tensor of this backend.

        >>> backend.dtype_of(backend.ones(2))
        'float32'
        """
        return creation.dtype_of(self._framework, x)

    def address(self, x: TensorT) -> int:
        """Return the address of a tensor's first byte in its device's memory.

        Two tensors of one device with the same address share their memory.

        Args:
            x: a tensor.

        Raises:
            UnsupportedValueError: if ``x`` is not a tensor of this backend, or has no single
                address.

        >>> X = backend.ones(2)
        >>> backend.address(X) == backend.address(backend.copy(X))
        False
        """
        creation.require_tensor(self._framework, x, "tell the address of a tensor")
        return self._framework.tensors.address(x)

    @overload
    def to(self, x: npt.NDArray[Any], device: DeviceLike[NativeDeviceT]) -> TensorT: ...

    @overload
    def to(self, x: T, device: DeviceLike[NativeDeviceT]) -> T: ...

    def to(self, x: Any, device: DeviceLike[NativeDeviceT]) -> Any:
        """Move a tensor, or every tensor in a nesting, to a device. Models move with ``place``.

        Args:
            x: a tensor, or a nesting of dicts, lists, tuples, namedtuples, dataclasses and
                containers of ``d2ldev.register_container``. None, numbers and strings stay. NumPy
                arrays and other frameworks' tensors become tensors of this backend. Arrays of text,
                and tensors that only the host can hold, stay. On PyTorch, any other object with a
                method ``to`` moves by it, such as a ``TensorDict``.
            device: the target: a ``Device``, a string, or the framework's own device object.

        Returns:
            ``x`` itself if it is already on the device, else a copy there. Containers keep their
            types, and tied leaves stay tied. A container in which nothing moves comes back as
            itself. For an uncommitted JAX array on the device it is another array on the same
            memory, committed to the device. If you donate one of the two, JAX deletes both.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if the copy does not fit into its memory.
            InvalidDeviceError: if ``device`` is invalid.
            UnsupportedValueError: if ``x`` holds anything else, which the message names, or an own
                ``to`` raises. What other objects' own ``to`` moved in place before has moved; of
                all else, nothing has.

        >>> X = backend.ones((2, 3))
        >>> batch = backend.to({'x': X, 'y': np.zeros(2)}, 'gpu:0')
        >>> backend.device_of(batch['y'])
        Device('gpu', 0)
        >>> backend.to(batch, 'gpu:0') is batch
        True
        """
        framework = self._known_framework or self._framework
        try:
            target = framework.state.known_devices[device]
        except Exception:  # unknown so far, or not hashable
            target = devices.resolve(framework, device, "put a tensor")
        if framework.state.kinds[type(x)] is TENSOR:
            # The common call, without a detour.
            if framework.tensors.is_on(x, target):
                return x
            words = moving.moving_a_tensor[target]
            return moving.transfer(framework, [x], target, words, copy=False)[0]
        return moving.to(framework, x, target)

    def copy(self, x: T, device: DeviceLike[NativeDeviceT] | None = None) -> T:
        """Copy a tensor, or every tensor in a nesting, into new memory.

        Args:
            x: as in ``to``, but without NumPy arrays of numbers and other frameworks' tensors.
            device: the target; None leaves each tensor on its device.

        Returns:
            A copy that shares no memory with ``x``, even on the same device. Tied leaves are tied
            again. On PyTorch, what moves by its own ``to`` is copied by its own ``clone``.

        Raises:
            As ``to``.

        >>> X = backend.ones(2, device='gpu:1')
        >>> Y = backend.copy(X)
        >>> Y is X, backend.device_of(Y)
        (False, Device('gpu', 1))
        """
        framework = self._framework
        target = None if device is None else devices.resolve(framework, device, "copy a tensor")
        if framework.state.kinds[type(x)] is TENSOR:  # the common call, without a detour
            place = target or framework.tensors.device_of(x)
            return moving.transfer(framework, [x], place, "copy a tensor", copy=True)[0]
        return moving.copy(framework, x, target)

    @overload
    def split(
        self, batch: npt.NDArray[Any], devices: Sequence[DeviceLike[NativeDeviceT]]
    ) -> list[TensorT]: ...

    @overload
    def split(self, batch: T, devices: Sequence[DeviceLike[NativeDeviceT]]) -> list[T]: ...

    def split(self, batch: Any, devices: Sequence[DeviceLike[NativeDeviceT]]) -> list[Any]:
        """Give each device a shard of a batch: ``split_batch`` of D2L's section 13.5.

        Args:
            batch: a nesting of tensors and NumPy arrays of shape ``(n, ...)``, and of sequences
                with n items. Each device also gets tensors without an axis, plain values, and the
                value of ``d2ldev.Broadcast``. The rule is in docs/guides/split-batches.md.
            devices: one or more.

        Returns:
            A nesting for each device, on that device. If n does not divide evenly, the first shards
            have one example more. If there are fewer examples than devices, the last shards are
            empty. A shard that is already on its device is a view, where the framework has views.

        Raises:
            UnsupportedValueError: if the batch has no single number of examples, or holds a
                sequence of another length.
            InvalidDeviceError: if a device is invalid, or appears twice.
            DeviceUnavailableError: if a device does not exist.

        >>> first, second = backend.split(backend.arange(5), ['gpu:0', 'gpu:1'])
        >>> backend.to_numpy(first), backend.device_of(second)
        (array([0, 1, 2]), Device('gpu', 1))
        """
        from d2ldev.operations.parallel import split

        return split(self._framework, batch, resolve_all(self._framework, devices, "split a batch"))

    def replicate(self, obj: T, devices: Sequence[DeviceLike[NativeDeviceT]]) -> list[T]:
        """Give each device a copy of parameters or of a model: ``get_params`` of section 13.5.

        Args:
            obj: a model, or a nesting of tensors and models. The call does not change it.
            devices: one or more.

        Returns:
            A copy for each device, on that device, without shared memory. Ties in ``obj`` are ties
            in each copy.

        Raises:
            UnsupportedValueError: for an optimizer, and for a model that the framework cannot copy.
            InvalidDeviceError: if a device is invalid, or appears twice.
            DeviceUnavailableError: if a device does not exist.

        >>> net = backend.mlp([2, 1])
        >>> first, second = backend.replicate(net, ['gpu:0', 'gpu:1'])
        >>> set(backend.placement(second).values())
        {Device('gpu', 1)}
        """
        from d2ldev.operations.parallel import replicate

        attempted = f"replicate {type(obj).__name__}"
        return replicate(self._framework, obj, resolve_all(self._framework, devices, attempted))

    def to_numpy(self, x: TensorT) -> npt.NDArray[Any]:
        """Return the values of a tensor in a NumPy array of your own.

        Args:
            x: a tensor on any device.

        Returns:
            A new, writable array of the same shape and dtype. bfloat16 and float8 are dtypes of
            ``ml_dtypes``.

        Raises:
            UnsupportedValueError: if ``x`` is not a tensor of this backend.

        >>> backend.to_numpy(backend.arange(3, device='gpu:0'))
        array([0, 1, 2])
        """
        return moving.to_numpy(self._framework, x)

    def from_dlpack(
        self,
        x: SupportsDLPack | TensorT,
        /,
        *,
        device: DeviceLike[NativeDeviceT] | None = None,
        copy: bool | None = None,
    ) -> TensorT:
        """Return a tensor on the memory of another framework's tensor.

        Source: the Python array API standard, 2024.12.

        Args:
            x: an object with ``__dlpack__`` and ``__dlpack_device__``, or a tensor of a backend.
            device: the device of the result; None is the device of ``x``. Another device needs a
                copy.
            copy: True always makes new memory, and False never copies. None copies only to another
                device. Memory that cannot be shared is then an error, because the standard's copy
                would be silent.

        Returns:
            A tensor of the same shape, dtype and values.

        Raises:
            UnsupportedValueError: if the protocol does not allow it. Examples are a dtype outside
                DLPack, a tensor that needs gradients, and read-only memory. With ``copy=False``, if
                ``x`` is on another device.
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if a copy does not fit there.

        >>> X = np.ones(3)
        >>> Y = backend.from_dlpack(X)
        >>> X[0] = 5
        >>> backend.to_numpy(Y)
        array([5., 1., 1.])
        """
        if copy is not None:
            copy = flag("take over the memory of a tensor", "copy", copy)
        return moving.from_dlpack(self._framework, x, device, copy)

    # -- models -----------------------------------------------------------------------------------

    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: Activation = "relu",
        device: DeviceLike[NativeDeviceT] | None = None,
        seed: int = 0,
    ) -> Any:
        """Make a multilayer perceptron of the framework's own dense layers, called as ``net(x)``.

        Args:
            sizes: the numbers of features of the input, of each hidden layer, and of the output:
                ``[20, 64, 1]``.
            activation: between the layers: ``'relu'``, ``'tanh'`` or ``'sigmoid'``.
            device: the device of its parameters.
            seed: of the initial parameters, which are drawn on the host. One seed gives one model,
                bit for bit, on every device of the framework. The call neither reads nor changes
                the framework's own random state.

        Returns:
            A model in float32; ``net(x)`` maps ``(n, sizes[0])`` to ``(n, sizes[-1])``. Weights are
            uniform in +-1/sqrt(n_in), biases zero.

        Raises:
            UnsupportedValueError: for fewer than two sizes, or another activation.
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if the parameters do not fit there.

        >>> net = backend.mlp([20, 64, 1], device='gpu:0')
        >>> net(backend.ones((8, 20), device='gpu:0')).shape
        (8, 1)
        """
        from d2ldev.operations.mlp import mlp

        return mlp(self._framework, sizes, activation, device, seed)

    def place(self, obj: T, device: DeviceLike[NativeDeviceT]) -> T:
        """Move a model, an optimizer or a parameter pytree to a device: everything or nothing.

        Args:
            obj: a model, an optimizer with its state, or a nesting of them and of tensors. A model
                moves with all that its framework counts, and with the tensors in its plain
                attributes. A list, tuple or dict of it moves if something in it is trained. A
                warning names other tensors. Shared tensors stay shared.
            device: the target.

        Returns:
            The object to use from then on: ``obj`` itself where the framework moves in place.

        Raises:
            DeviceUnavailableError, OutOfDeviceMemoryError, UnsupportedValueError: as ``to``; then
                nothing has moved.

        >>> net = backend.place(backend.mlp([2, 1]), 'gpu:1')
        >>> set(backend.placement(net).values())
        {Device('gpu', 1)}
        """
        return placing.place(self._framework, obj, device)

    def placement(self, obj: Any) -> Mapping[str, Device]:
        """Return the device of everything that ``place`` moves or warns of: name -> device.

        Args:
            obj: as in ``place``.

        Raises:
            UnsupportedValueError: if ``obj`` is not a model, an optimizer, or a nesting of them and
                of tensors.

        >>> backend.placement({'w': backend.ones(2, device='gpu:1')})
        {'w': Device('gpu', 1)}
        """
        return placing.placement(self._framework, obj)

    def summarize(self, obj: Any) -> Summary:
        """Return how large the modules of a model are, and where they are.

        The tensors are those of ``named_tensors``. The call computes nothing, and waits for
        nothing.

        Args:
            obj: as in ``place``.

        Returns:
            A ``Summary``: a table, as text and in a notebook. It has a row for each module and
            one for the total. It has the numbers of parameters and buffers, their bytes, dtypes and
            devices. A tensor in several places counts once.

        Raises:
            UnsupportedValueError: for anything else than a model, an optimizer, or a nesting of
                them and of tensors.

        >>> print(backend.summarize(backend.mlp([2, 4, 1], device='gpu:0')))
        module    class  parameters  trained  buffers       MB  dtype    device
        layers.0                 12       12        0  < 0.001  float32  gpu:0
        layers.1                  5        5        0  < 0.001  float32  gpu:0
                  total          17       17        0  < 0.001  float32  gpu:0
        """
        from d2ldev.operations.summary import summarize

        return summarize(self._framework, obj)

    def named_tensors(self, obj: Any, *, gradients: bool = False) -> Mapping[str, TensorT]:
        """Return the tensors of a model, an optimizer or a nesting of them: name -> tensor.

        Args:
            obj: as in ``place``.
            gradients: True returns everything that ``place`` moves, with the gradients. False
                returns the tensors that ``save`` writes and ``load_into`` reads.

        Raises:
            UnsupportedValueError: as ``placement``.

        >>> net = backend.mlp([2, 1])
        >>> {name: x.shape for name, x in backend.named_tensors(net).items()}
        {'layers.0.weight': (1, 2), 'layers.0.bias': (1,)}
        """
        is_saved = not flag("name tensors", "gradients", gradients)
        attempted = "list the tensors of an object"
        return NamedTensors(Inventory(self._framework, obj, attempted, is_saved=is_saved))

    # -- files ------------------------------------------------------------------------------------

    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """Write a nesting into a file, all of it or nothing.

        Args:
            obj: a tensor, a model, an optimizer, a NumPy array, a number, text, None, bytes, or a
                nesting of these. Keys of dicts are text, bytes, numbers, None, or tuples of them. A
                set is an error.
            path: of the file. An existing file is replaced in one step. If the process dies, the
                path holds the old file or the new one.

        The file is a safetensors file, so other programs can read its tensors. It has no gradients.
        A tensor in two places is written once, and loaded as one tensor. A warning names the
        tensors of an optimizer that its own ``state_dict()`` lacks.

        Raises:
            UnsupportedValueError: if ``obj`` holds anything else; the message names its place.
            CheckpointError: if the file cannot be written.
            OutOfDeviceMemoryError: if the host has no memory for a copy of the tensors.

        >>> backend.save({'w': backend.ones(2), 'epoch': 3}, 'run.safetensors')
        """
        from d2ldev.files.save import save

        save(self._framework, obj, path)

    def load(
        self,
        path: str | os.PathLike[str],
        device: DeviceLike[NativeDeviceT] = "cpu",
    ) -> Any:
        """Read a nesting from a file.

        Args:
            path: of a file that ``save`` of any backend wrote, or of any other safetensors file.
                The latter is a dict from names to tensors.
            device: the device of the new tensors, whatever device they were saved from.

        Returns:
            The saved nesting. Dicts, lists, tuples and deques come back as their type. A namedtuple
            is a tuple, and a dataclass or any other mapping a dict. A model is a dict of its
            tensors, by their names, and an optimizer a dict of its state. Use ``load_into`` to read
            a file into objects of your classes.

        Floats and NumPy arrays keep their dtype. Integers of a dtype that the framework lacks get
        another one if all values fit, with one ``D2LDevWarning``. JAX has int64 only with
        ``jax_enable_x64``, and MXNet has few unsigned dtypes. ``complex64`` and the float8 dtypes
        have safetensors' names. Tensors below a byte (``F4``, ``F6_*``) cannot be read. Then read
        the rest of the file by ``load_into(strict=False)``.

        Raises:
            DeviceUnavailableError: before anything is read.
            CheckpointError: if the file is missing or damaged, or has a dtype that the framework
                lacks. The message names the line that enables the dtype.
            OutOfDeviceMemoryError: if the tensors do not fit into the device's memory.

        >>> backend.save({'w': backend.ones(2), 'epoch': 3}, 'run.safetensors')
        >>> state = backend.load('run.safetensors', 'gpu:0')
        >>> backend.device_of(state['w']), state['epoch']
        (Device('gpu', 0), 3)
        """
        from d2ldev.files.load import load

        return load(self._framework, path, device)

    @overload
    def load_into(
        self,
        obj: T,
        path: str | os.PathLike[str] | Mapping[str, TensorT | npt.NDArray[Any]],
        *,
        strict: Literal[True] = True,
        only: str = "",
    ) -> T: ...

    @overload
    def load_into(
        self,
        obj: object,
        path: str | os.PathLike[str] | Mapping[str, TensorT | npt.NDArray[Any]],
        *,
        strict: Literal[False],
        only: str = "",
    ) -> Loaded: ...

    def load_into(
        self,
        obj: Any,
        path: str | os.PathLike[str] | Mapping[str, TensorT | npt.NDArray[Any]],
        *,
        strict: bool = True,
        only: str = "",
    ) -> Any:
        """Read a file, or tensors by name, into a model, an optimizer, or a nesting of them.

        Args:
            obj: an object with the names, shapes and dtypes of the saved one. Each tensor stays on
                its device. Values go into the memory of a model's tensors, where the framework has
                memory that can be written. Other tensors are replaced.
            path: of a file that ``save`` of any backend wrote, or of any other safetensors file
                with the names of ``named_tensors(obj)``. Or a mapping from these names to tensors
                of this backend and NumPy arrays, which are copied.
            strict: True requires each tensor in the object and in the file. False ignores tensors
                that only one side has. Other shapes and dtypes are errors even then.
            only: the name of the one value in the file to read: ``'components.model'`` is the model
                in a checkpoint of ``Trainer.fit``. The compared names begin after it.

        Returns:
            The object to use from then on, as with ``place``: the model itself. Containers are new
            where a tensor, a number or text was replaced. With ``strict=False`` a tuple with this
            object as its ``value``. ``matched``, ``missing`` and ``unexpected`` are lists of names.

        Frameworks name the same layers differently, and transpose kernels. d2ldev converts layers
        that it knows, as in models of ``mlp``. Otherwise the names and shapes have to be the same.
        The state of an optimizer belongs to the names of its parameters, where these are in the
        model beside it. Without names the order decides.

        Models:

        - A model in shared memory, its views, and a buffer of all weights have the new values.
          Other memory is replaced: of JAX's arrays, NumPy arrays, and tensors in no model. So are
          PyTorch tensors in memory of others (``torch.from_numpy``), inference tensors, and
          expanded ones. Tensors that share memory part if the file has other values for each.
        - Tied weights may be in the file under one of their names, or under all. All values of a
          tensor have to be equal, bit for bit.
        - Lazy modules (PyTorch) and deferred blocks (Gluon) get their shapes from the file. It must
          have every uninitialized parameter of a lazy module. With ``strict=False`` an incomplete
          module stays lazy. An unbuilt Keras model is refused, as ``load_weights`` refuses it: call
          it on a batch first.
        - A buffer that was None at first gets the shape in the file. A tensor that a layer was
          created without, such as a bias, is unexpected.
        - Layers of a Keras model on TensorFlow are named by position, ``layers.1.kernel``. If two
          layers of equal shapes have changed places, each gets the weights of the other. On JAX
          the names of the layers count.
        - Vocabularies of Keras text layers are in no file. ``save`` warns of them.
        - Plain attributes with tensors and PyTorch's non-persistent buffers are what a call leaves.
          So are ``nnx.Intermediate``, ``nnx.Cache`` and bare ``nnx.Variable``. They are read if
          name, dtype and shape fit, and otherwise skipped. Parameters always have to fit.
        - Containers in a model fit if their batch sizes, sparse shapes and static fields are equal.

        Optimizers:

        - Save the optimizer together with its model: then the order of its parameters does not
          matter. Without names the order has to be the same. Groups that are divided in another
          way are an error. PyTorch's named optimizers have names of their own.
        - The state of another optimizer is an error. Adam and AdamW have the same names and count
          as the same one, as do SGD with momentum and Lion.
        - In PyTorch ``load_state_dict()`` is called twice, and the first call is taken back. So a
          failure changes nothing. The settings of a scheduler may be on one side only. The
          optimizer keeps settings that are functions or dtypes.
        - The optimizer of a compiled Keras model is read if the file has its state, with the same
          names. Attributes of your own Keras optimizers are in a file if they are variables. Those
          of Gluon optimizers are if they are arrays, numbers and containers of them.

        Raises:
            CheckpointError: if the file is unreadable or does not fit. The message lists the names
                that are missing, unexpected, or of another shape or dtype. The object is unchanged.
            UnsupportedValueError: if ``obj`` holds an object that no file can hold.
            OutOfDeviceMemoryError: if a second copy does not fit into the device's memory.

        >>> net = backend.mlp([2, 1], device='gpu:1')
        >>> backend.save(backend.mlp([2, 1], seed=7), 'net.safetensors')
        >>> net = backend.load_into(net, 'net.safetensors')
        >>> set(backend.placement(net).values())
        {Device('gpu', 1)}
        """
        from d2ldev.files.load_into import load_into

        strict = flag("load parameters", "strict", strict)
        return load_into(self._framework, obj, path, strict=strict, only=only)

    # -- training ---------------------------------------------------------------------------------

    def learner(
        self,
        model: Any,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        lr: float | None = None,
        gradient_clip_val: float = 0.0,
        accumulate_grad_batches: int = 1,
        precision: Precision = "model",
        methods: tuple[str, str] | None = None,
        is_trained: bool = True,
        devices: Sequence[DeviceLike[NativeDeviceT]] | None = None,
        group: Group | None = None,
        batch_norm: Statistics | None = None,
    ) -> Learner[TensorT]:
        """Return a learner, which trains a model step by step on the model's device.

        ``d2ldev.Trainer`` is the loop around it.

        Args:
            model: a model of the framework, already placed.
            loss: ``'mse'``, ``'cross_entropy'``, ``'bce'``, or a function of ``(prediction, y)``
                that returns a scalar tensor. ``'model'`` is the loss that the model returns itself,
                and ``y`` is None in each step. None is the loss of a compiled Keras model, else
                ``'mse'``.
            optimizer: ``'sgd'``, ``'momentum'``, ``'adam'``, ``'adamw'``, ``'adagrad'``, or an
                optimizer of the framework. None is the optimizer of a compiled Keras model, else
                ``'sgd'``.
            lr: the learning rate of a named optimizer; None is 0.01. With an optimizer object it is
                an error.
            gradient_clip_val: the largest global norm of the gradients; 0 does not clip.
            accumulate_grad_batches: how many calls of ``step`` make one step of the optimizer. It
                uses the mean of their gradients. ``learner.flush()`` makes a step with the
                remaining ones.
            precision: ``'bf16'`` or ``'fp16'`` to compute in, with parameters in float32. See
                ``Trainer`` for other names.
            methods: the names of two methods of the model, for ``step`` and ``evaluate``. Each
                takes a batch and returns its loss. None uses ``loss``.
            is_trained: False for a model that is only evaluated. It needs no optimizer, and
                settings of the training are errors.
            devices: train the model on these devices together, each with a shard of the batch. The
                model, the batches and the results of ``step`` are on the first one. None is the
                device of the model.
            group: the processes that train the model together, each with a shard of the batch. The
                ``Trainer`` passes them, and sets ``learner.portion`` before each step. None is
                this process alone.
            batch_norm: ``'global'`` or ``'local'`` statistics of batch normalization on several
                devices or processes. A model with the other kind is an error.

        Raises:
            UnsupportedValueError: if the framework cannot train with an argument.
            DeviceUnavailableError: if a device does not exist.

        >>> net = backend.mlp([2, 1], device='gpu:0')
        >>> learner = backend.learner(net, optimizer='adam', lr=0.01)
        >>> X = backend.ones((4, 2), device='gpu:0')
        >>> loss, prediction = learner.step((X,), backend.zeros((4, 1), device='gpu:0'))
        >>> prediction.shape
        (4, 1)
        """
        from d2ldev.training.learning import complete, make_learner

        require(self._framework, "train", "train a model")
        given = TrainingSettings(
            optimizer=optimizer,
            gradient_clip_val=gradient_clip_val,
            accumulate_grad_batches=accumulate_grad_batches,
            precision=find_precision(precision),
            methods=methods,
            batch_norm=batch_norm,
        )
        is_trained = flag("train", "is_trained", is_trained)
        settings = complete(self._framework, model, given, loss=loss, lr=lr, is_trained=is_trained)
        them = [] if devices is None else resolve_all(self._framework, devices, "train")
        return make_learner(self._framework, model, settings, them, group)

    def join_group(self) -> Group | None:
        """Join the other processes of a launch, and return them; None without a launch.

        ``Trainer.fit`` does this itself. Call it in all processes, for the number of this process,
        or to wait for the others. Each process joins once, and later calls return the same object.

        Returns:
            The processes, or None.

        Raises:
            PeerLostError: if the other processes do not connect in time.
            UnsupportedValueError: if the framework trains in one process only, or the processes run
                different programs. If only the framework's own launcher knows of other processes.

        >>> backend.join_group() is None
        True
        """
        from d2ldev.distributed.membership import join_group

        return join_group(self._framework)

    def accuracy(self, prediction: TensorT, y: TensorT) -> TensorT:
        """Return the share of labels whose class has the largest logit, on the device.

        Args:
            prediction: logits of shape ``(n, ..., classes)``.
            y: labels of shape ``(n, ...)`` and any integer dtype, on the same device. The label
                -100 does not count.

        Returns:
            The mean over the labels that count, a scalar in float32; 0 if none counts.

        Raises:
            UnsupportedValueError: if an argument is not a tensor of this backend. If the labels are
                not integers, or their number differs from that of the rows of logits.

        >>> logits = backend.asarray([[0.1, 0.9], [0.8, 0.2]])
        >>> float(backend.accuracy(logits, backend.asarray([1, 1])))
        0.5
        """
        from d2ldev.training.learning import accuracy

        share, _ = accuracy(self._framework, prediction, y)
        return share

    def prefetch(
        self, batches: Iterable[T], device: DeviceLike[NativeDeviceT], depth: int = 2
    ) -> Generator[T, None, None]:
        """Copy batches to a device ahead of their use, while it computes with an earlier one.

        Args:
            batches: an iterable of tensors, NumPy arrays, or nestings of them. It must not write
                into a tensor that it has yielded. It may write into a NumPy array.
            device: the target.
            depth: how many batches to copy ahead; 0 copies each when you ask for it.

        Returns:
            A generator of the same batches in the same order. It starts when you ask for the first
            batch. It raises an exception of ``batches`` in place of the batch that failed. If
            ``batches`` is a generator, both close together.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            UnsupportedValueError: if ``batches`` is not iterable, or ``depth`` is invalid.

        >>> batches = [np.ones((2, 3)), np.zeros((2, 3))]
        >>> [backend.device_of(X) for X in backend.prefetch(batches, 'gpu:0')]
        [Device('gpu', 0), Device('gpu', 0)]
        """
        from d2ldev.operations.prefetching import prefetch

        return prefetch(self._framework, batches, device, depth)

    # -- strictness -------------------------------------------------------------------------------

    def strict(self) -> AbstractContextManager[None]:
        """Raise an error, in a block, for operations on tensors of different devices.

        An operation whose operands share a device runs there, also in TensorFlow. Python numbers do
        not count as operands. 0-dim tensors of the host do not count where the framework lets them
        mix (torch). The block is in force in this thread or asyncio task, and in tasks started in
        it. It is not in force in threads started in it. ``D2LDEV_STRICT=1`` makes every thread of
        the process strict. Source: D2L, section 6.7.2.2.

        Returns:
            A context manager.

        Raises:
            DeviceMismatchError: from the operation. The framework's own error, if any, is its
                cause.

        >>> X, Y = backend.ones(2, device='gpu:0'), backend.ones(2, device='gpu:1')
        >>> with backend.strict():
        ...     X + Y
        Traceback (most recent call last):
        d2ldev.errors.DeviceMismatchError: cannot run add: Expected all tensors to be on...
        """
        return self._framework.state.strictness.block()


def _by_name(name: str) -> Backend:
    """Return the backend of a name, when one is unpickled."""
    return backend_for(get_framework(name))


# ``setdefault`` gives two threads the same object.
_backends: dict[Framework, Backend] = {}


def backend_for(framework: Framework) -> Backend:
    """Return the one backend of a framework."""
    if framework not in _backends:
        Backend(framework)
    return _backends[framework]


def framework_of(backend: Backend) -> Framework:
    """Return the framework behind a backend; of the handle, the active one."""
    return backend._framework
