"""``MXNetBackend``: the contract on MXNet 1.9.1, the last release, with its NumPy arrays.

What MXNet does differently and is put right here:

- ``numpy.bool`` is gone, and MXNet reads it (``framework.py``).
- Shapes with a 0, and ``()``, are unknown shapes to MXNet until ``npx.set_np()`` is called, in
  each thread. Everything here works without it and leaves it as it was; for what you write
  yourself on top, call it, as MXNet asks.
- Memory is taken when an operator runs, not when it is called (``numpy_exchange.empty``).
- ``reset_ctx`` forgets gradients, plain arrays and trainers, and refuses parameters that are not
  initialised (``parts.py``).
- Each CPU context has memory of its own: with virtual GPUs ``gpu(i)`` is ``mx.cpu(i + 1)``.

Random numbers with a seed are NumPy's, and copied: a generator of MXNet cannot be put back
(``numpy_exchange.seeded``). MXNet does not say whether anything is queued: ``is_idle`` waits.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import (
    DeviceInitializationWarning,
    DeviceMismatchError,
    UnsupportedValueError,
    describe,
)
from d2ldev.files.layers import layouts_in
from d2ldev.files.layouts import Layout
from d2ldev.interface import Backend, DeviceLike, Memory, Tensor
from d2ldev.operations.placing import Part
from d2ldev.training.learner import Learner, Settings
from d2ldev_mxnet import accelerator, numpy_exchange
from d2ldev_mxnet.dlpack import Exported, from_dlpack
from d2ldev_mxnet.framework import NumPySemantics, NumPyShapes, mx
from d2ldev_mxnet.layouts import layers_of
from d2ldev_mxnet.loader_state import loader_state
from d2ldev_mxnet.memory import is_out_of_memory
from d2ldev_mxnet.mlp import make_mlp
from d2ldev_mxnet.numpy_exchange import empty, is_exact, number_dtype
from d2ldev_mxnet.optimizer_state import state_of, state_put
from d2ldev_mxnet.parts import OBJECT_TYPES, Placing, attached_to, parts_of, refill
from d2ldev_mxnet.samples import make_samples
from d2ldev_mxnet.strict import refuse_mixing
from d2ldev_mxnet.strict_backward import refused
from d2ldev_mxnet.strict_errors import translated

_NDArray = mx.nd.NDArray
_check = mx.base.check_call
_get_context = mx.base._LIB.MXNDArrayGetContext
_CPU_TYPES = {mx.Context.devstr2type[name] for name in ("cpu", "cpu_pinned", "cpu_shared")}
# For more, 8 us are less than a fiftieth of the time that writing them takes.
_FEW = 2**20


class MXNetBackend(Backend):
    """MXNet on the CPU and on CUDA, or on virtual GPUs."""

    name: ClassVar[str] = "mxnet"
    distributions: ClassVar[tuple[str, ...]] = ("mxnet", "numpy")
    max_virtual_gpus: ClassVar[int] = 8
    # With ``mx.np.ndarray``, which is a subclass.
    tensor_types: ClassVar[tuple[type, ...]] = (_NDArray,)
    object_types: ClassVar[tuple[type, ...]] = OBJECT_TYPES
    loader_types: ClassVar[tuple[type, ...]] = (mx.gluon.data.DataLoader,)
    plain_types: ClassVar[tuple[type, ...]] = (mx.Context, np.dtype)
    dtype_names: ClassVar[tuple[str, ...]] = (
        *("bool", "int8", "int32", "int64", "uint8"),
        *("float16", "float32", "float64"),
    )

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        # The device of each context that a tensor was seen in: its type and id in 64 bits.
        self._contexts: dict[int, Device] = {}

    # -- devices --------------------------------------------------------------------------

    def num_gpus(self) -> int:
        if self.virtual_gpus is not None:
            return self.virtual_gpus
        try:
            return len(accelerator.capabilities()) if accelerator.has_cuda() else 0
        except Exception as error:
            warnings.warn(
                f"mxnet found cuda hardware and cannot use it: {error}",
                DeviceInitializationWarning,
                stacklevel=3,
            )
            return 0

    def _native(self, device: Device) -> mx.Context:
        if device is CPU:
            return mx.cpu()
        if self.virtual_gpus:
            return mx.cpu(device.index + 1)
        accelerator.check_card(device)
        return mx.gpu(device.index)

    def _from_native(self, native: Any) -> Device | None:
        if not isinstance(native, mx.Context):
            return None
        index: int = native.device_id
        if native.device_type == "cpu" and 0 < index <= (self.virtual_gpus or 0):
            return gpu(index - 1)
        if native.device_typeid in _CPU_TYPES:
            return CPU
        return None if self.virtual_gpus or index < 0 else gpu(index)

    def _platform(self, device: Device) -> str:
        if device is CPU:
            return "cpu"
        return "virtual" if self.virtual_gpus else "cuda"

    def default_device(self) -> Device:
        return self.device(mx.context.current_context())

    def _native_scope(self, device: Device) -> AbstractContextManager[Any]:
        # A context keeps what was before it in itself: one object cannot be entered twice.
        return mx.Context(self._native(device))  # type: ignore[no-any-return]

    # -- tensors --------------------------------------------------------------------------

    def device_of(self, x: Tensor) -> Device:
        if isinstance(x, _NDArray):
            # ``x.ctx`` costs twice as much, most of it for an object that is thrown away.
            context = ctypes.c_int64()
            _get_context(x.handle, ctypes.byref(context), ctypes.byref(context, 4))
            device = self._contexts.get(context.value)
            if device is not None:
                return device
            device = self._from_native(x.ctx)
            if device is not None:
                self._contexts[context.value] = device
                return device
        raise UnsupportedValueError(
            "tell the device of a tensor",
            f"{describe(x)} is no mxnet array on a device of d2ldev",
            "x = backend.asarray(x) makes a tensor; a Symbol has no device until it is bound",
        )

    def _native_dtype(self, name: str) -> type:
        return getattr(mx.np, name)  # type: ignore[no-any-return]

    def dtype_of(self, x: Tensor) -> str:
        self._require_tensor(x, "tell the dtype of a tensor")
        return str(np.dtype(x.dtype).name)

    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        return numpy_exchange.from_data(obj, dtype, native)

    def _full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        dtype = dtype or number_dtype(value)
        if not is_exact(value):
            return numpy_exchange.full(shape, value, dtype, native)
        with NumPyShapes():
            return mx.np.full(shape, value, dtype=dtype, out=empty(shape, dtype, native))

    # Few numbers without a detour: taking their memory first would cost a third of the call.

    def _zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if 0 < math.prod(shape) < _FEW and shape:
            return mx.np.zeros(shape, dtype, ctx=native)
        return self._full(shape, 0.0, dtype, native)

    def _ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if 0 < math.prod(shape) < _FEW and shape:
            return mx.np.ones(shape, dtype, ctx=native)
        return self._full(shape, 1.0, dtype, native)

    def _arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        dtype = dtype or number_dtype(start, stop, step)
        if not is_exact(start, stop, step):
            return numpy_exchange.arange(start, stop, step, dtype, native)
        x = empty((math.ceil((stop - start) / step),), dtype, native)
        with NumPyShapes():
            # What ``mx.np.arange`` calls, which does not take memory that is there.
            return mx.nd.numpy._internal.arange(
                start=start, stop=stop, step=step, dtype=np.dtype(dtype).name, ctx=native, out=x
            )

    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        dtype = dtype or "float32"
        if seed is not None:
            return self._from_data(
                numpy_exchange.seeded(distribution, shape, seed, dtype), dtype, native
            )
        draw = mx.np.random.uniform if distribution == "uniform" else mx.np.random.normal
        with NumPyShapes():
            x = draw(0.0, 1.0, shape, dtype=dtype, ctx=native, out=empty(shape, dtype, native))
            if draw is mx.np.random.uniform and x.dtype == np.float16:
                # MXNet rounds numbers just below 1 to 1, which is not in the interval.
                x = mx.np.minimum(x, 1 - 2**-11, out=x)
        return x

    def _astype(self, x: Tensor, dtype: Any) -> Tensor:
        with NumPyShapes():
            return x.astype(dtype)

    def _copy(self, x: Tensor, native: Any) -> Tensor:
        return self._copy_all([x], native)[0]

    def _copy_all(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        with NumPyShapes():
            return [
                x.copyto(empty(x.shape, x.dtype, native) if type(x) is mx.np.ndarray else native)
                for x in xs
            ]

    def _to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        return numpy_exchange.to_numpy(x)

    def address(self, x: Tensor) -> int:
        self._require_tensor(x, "tell the address of a tensor")
        x.wait_to_read()
        pointer = ctypes.c_void_p()
        _check(mx.base._LIB.MXNDArrayGetData(x.handle, ctypes.byref(pointer)))
        return pointer.value or 0

    def _from_dlpack(self, x: Any) -> Tensor:
        return from_dlpack(x, 0 if self.virtual_gpus else self.num_gpus())

    def _dlpack_of(self, x: Tensor) -> Any:
        return Exported(x)

    # -- strictness -----------------------------------------------------------------------

    def _refuse_mixing(self) -> Callable[[], None]:
        return refuse_mixing(self)

    def _mismatch(self, error: BaseException) -> DeviceMismatchError | None:
        return refused(error) or translated(self, error)

    # -- the machine ----------------------------------------------------------------------

    def _synchronize(self, device: Device) -> None:
        # MXNet waits for all devices or for none. What failed after its call is raised here.
        mx.nd.waitall()

    def is_idle(self, device: DeviceLike = None) -> bool:
        # MXNet's engine does not say what is queued, on the CPU or elsewhere. The one true answer
        # that can be given is the one after waiting.
        mx.nd.waitall()
        return super().is_idle(device)

    def _memory(self, device: Device) -> Memory:
        if device is CPU or self.virtual_gpus:
            return Memory(None, None, None)
        # MXNet says what is free on the card, whoever holds the rest, and not what it holds.
        return Memory(None, None, int(mx.context.gpu_memory_info(device.index)[1]))

    def _is_out_of_memory(self, error: Exception) -> bool:
        return is_out_of_memory(error)

    # -- models ---------------------------------------------------------------------------

    def mlp(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        device: DeviceLike = None,
        seed: int = 0,
    ) -> Any:
        return make_mlp(self, sizes, activation, device, seed)

    def place(self, obj: Any, device: DeviceLike) -> Any:
        # Moving parameters is no part of what is being recorded.
        with mx.autograd.pause(), Placing() as placing:
            placed = super().place(obj, device)
            placing.settle(self.native(device))
        return placed

    def _parts(self, obj: Any) -> Iterator[Part]:
        return parts_of(obj)

    def _attached(self, x: Tensor) -> Iterator[Part]:
        return attached_to(x)

    def _is_refilled(self, x: Tensor) -> bool:
        return x.grad is not None

    def _refill(self, x: Tensor, new: Tensor) -> None:
        refill(x, new)

    def samples(self) -> Mapping[str, Callable[[Device], Any]]:
        return {**super().samples(), **make_samples(self)}

    # -- files ----------------------------------------------------------------------------

    def _layouts(self, obj: Any) -> Mapping[str, Layout] | None:
        layers = layers_of(obj)
        return layouts_in(self, obj, layers) if layers else None

    def _is_gradient(self, obj: Any, part: Part) -> bool:
        return isinstance(obj, mx.gluon.Parameter) and part.name.startswith("grad")

    def _state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        return state_of(optimizer) if isinstance(optimizer, mx.gluon.Trainer) else None

    def _state_put(self, optimizer: Any, state: Any) -> Callable[[], None]:
        return state_put(optimizer, state)

    def _write(self, x: Tensor, new: Tensor) -> None:
        # Its memory is marked as what has a gradient, and stays.
        if new.size:
            with NumPyShapes(), mx.autograd.pause():
                new.as_nd_ndarray().copyto(x.as_nd_ndarray())

    # -- training -------------------------------------------------------------------------

    def _learner(self, model: Any, settings: Settings) -> Learner:
        from d2ldev_mxnet.learner import MXNetLearner

        return MXNetLearner(self, model, settings)

    def _accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        with NumPySemantics():
            found = mx.np.argmax(prediction, axis=-1)
            labels = y.as_np_ndarray().astype("int64")
            return (found.astype("int64") == labels).astype("float32").mean()

    def _loader_state(self, loader: Any) -> Any:
        return loader_state(loader)

    def _detached(self, x: Tensor) -> Tensor:
        return x.detach()

    def _stack(self, xs: Sequence[Tensor]) -> Tensor:
        with NumPySemantics():
            return mx.np.stack(xs)
