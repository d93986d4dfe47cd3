"""``TorchBackend``: the contract on PyTorch.

What torch does differently and is put right here: ``torch.device('cuda')`` is not equal to
``torch.device('cuda:0')``, nor ``'cpu:0'`` to ``'cpu'`` (devices are made canonical first);
``Module.to`` forgets plain tensor attributes, and optimizers (``parts.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

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
from d2ldev.operations.prefetching import moved_ahead
from d2ldev.training.learner import Learner, Settings
from d2ldev_torch import numpy_exchange
from d2ldev_torch.accelerator import find_accelerator
from d2ldev_torch.dlpack import from_dlpack
from d2ldev_torch.layouts import layers_of
from d2ldev_torch.loader_state import checked_loader_state, loader_state
from d2ldev_torch.mlp import make_mlp
from d2ldev_torch.optimizer_state import state_of, state_put
from d2ldev_torch.parts import (
    OBJECT_TYPES,
    attached_to,
    finish,
    is_parameter,
    parts_of,
    refill,
    register_containers,
)
from d2ldev_torch.prefetching import SideStream
from d2ldev_torch.samples import make_samples
from d2ldev_torch.strict import mismatch_in

if TYPE_CHECKING:
    import numpy as np

_CPU = torch.device("cpu")


class TorchBackend(Backend):
    """PyTorch on the CPU and on CUDA or ROCm, else XPU, else MPS; or on virtual GPUs."""

    name: ClassVar[str] = "torch"
    distributions: ClassVar[tuple[str, ...]] = ("torch", "numpy")
    tensor_types: ClassVar[tuple[type, ...]] = (torch.Tensor,)
    max_virtual_gpus: ClassVar[int] = 8
    object_types: ClassVar[tuple[type, ...]] = OBJECT_TYPES
    loader_types: ClassVar[tuple[type, ...]] = (torch.utils.data.DataLoader,)
    plain_types: ClassVar[tuple[type, ...]] = (torch.dtype, torch.device)
    dtype_names: ClassVar[tuple[str, ...]] = tuple(
        name
        for name in (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
            *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        )
        if hasattr(torch, name)
    )

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        self._accelerator = find_accelerator(virtual_gpus)
        # The devices of tensors, which say which GPU they are: what they stand for.
        self._places: dict[torch.device, Device] = {}
        register_containers()

    # -- devices --------------------------------------------------------------------------

    def num_gpus(self) -> int:
        if self.virtual_gpus == 0:
            return 0
        try:
            return self._accelerator.count()
        except Exception as error:
            warnings.warn(
                f"torch found {self._accelerator.platform} hardware and cannot use it: {error}",
                DeviceInitializationWarning,
                stacklevel=3,
            )
            return 0

    def _native(self, device: Device) -> torch.device:
        return _CPU if device is CPU else torch.device(self._accelerator.type, device.index)

    def _from_native(self, native: Any) -> Device | None:
        if not isinstance(native, torch.device):
            return None
        if native.type == "cpu":
            return CPU
        if native.type != self._accelerator.type:
            return None
        # Without an index it is torch's current device, as in torch itself.
        return gpu(self._accelerator.current() if native.index is None else native.index)

    def _platform(self, device: Device) -> str:
        return "cpu" if device is CPU else self._accelerator.platform

    def default_device(self) -> Device:
        return self.device(torch.get_default_device())

    def _native_scope(self, device: Device) -> AbstractContextManager[Any]:
        return self._native(device)  # torch.device is a context

    # -- tensors --------------------------------------------------------------------------

    def device_of(self, x: Tensor) -> Device:
        try:
            if x.is_cpu:
                return CPU
            native = x.device
            if native in self._places:
                return self._places[native]
        except AttributeError:
            native = None
        device = self._from_native(native)
        if device is not None:
            self._places[native] = device
        else:
            raise UnsupportedValueError(
                "tell the device of a tensor",
                f"{describe(x)} is no torch tensor"
                if native is None
                else f"the tensor is on {native}, which is no place with bytes for d2ldev",
                "x = backend.asarray(x) makes a tensor; module.to_empty(device=...) leaves 'meta'",
            )
        return device

    def _native_dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)  # type: ignore[no-any-return]

    def dtype_of(self, x: Tensor) -> str:
        self._require_tensor(x, "tell the dtype of a tensor")
        return str(x.dtype).removeprefix("torch.")

    def _from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        return numpy_exchange.from_data(obj, dtype, native)

    def _full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=native)

    # Sizes one by one: torch takes a third longer to read them from a tuple.

    def _zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if not shape:
            return torch.zeros((), dtype=dtype, device=native)
        return torch.zeros(*shape, dtype=dtype, device=native)

    def _ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if not shape:
            return torch.ones((), dtype=dtype, device=native)
        return torch.ones(*shape, dtype=dtype, device=native)

    def _arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        return torch.arange(start, stop, step, dtype=dtype, device=native)

    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        generator = None if seed is None else self._accelerator.generator(native).manual_seed(seed)
        draw = torch.rand if distribution == "uniform" else torch.randn
        return draw(shape, generator=generator, dtype=dtype, device=native)

    def _astype(self, x: Tensor, dtype: Any) -> Tensor:
        return x.to(dtype)

    def _copy(self, x: Tensor, native: Any) -> Tensor:
        return self._copy_all([x], native)[0]

    def _copy_all(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        return self._accelerator.copies(xs, native)

    def _to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        self.device_of(x)  # a tensor without bytes is refused, by name
        return numpy_exchange.to_numpy(x)

    def address(self, x: Tensor) -> int:
        self._require_tensor(x, "tell the address of a tensor")
        try:
            return int(x.data_ptr())
        except RuntimeError as error:  # a sparse one has several, a nested one none
            raise UnsupportedValueError(
                "tell the address of a tensor",
                f"a tensor of layout {x.layout} has no one address",
                "backend.address(x.to_dense()), or of one of the tensors that it consists of",
            ) from error

    def _from_dlpack(self, x: Any) -> Tensor:
        return from_dlpack(x)

    # -- strictness -----------------------------------------------------------------------

    def _mismatch(self, error: BaseException) -> DeviceMismatchError | None:
        return mismatch_in(error)

    # -- the machine ----------------------------------------------------------------------

    def _synchronize(self, device: Device) -> None:
        if device is not CPU:
            self._accelerator.synchronize(device.index)

    def is_idle(self, device: DeviceLike = None) -> bool:
        attempted = "ask whether there is work"
        asked = self.devices() if device is None else [self._existing(device, attempted)[0]]
        return all(self._accelerator.is_idle(d.index) for d in asked if d is not CPU)

    def _memory(self, device: Device) -> Memory:
        return Memory(None, None, None) if device is CPU else self._accelerator.memory(device.index)

    def _is_out_of_memory(self, error: Exception) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # The CPU's allocator has no exception of its own, only these words, nor have sizes that
        # no address reaches: https://github.com/pytorch/pytorch/pull/20618
        words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
        return isinstance(error, RuntimeError) and any(text in str(error) for text in words)

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
        if not torch.is_inference_mode_enabled():
            return super().place(obj, device)
        # Tensors made in inference mode are for inference for good, and a model is to outlive it.
        with torch.inference_mode(False), torch.no_grad():
            return super().place(obj, device)

    def _parts(self, obj: Any) -> Iterator[Part]:
        return parts_of(obj)

    def _attached(self, x: Tensor) -> Iterable[Part]:
        return attached_to(x)

    def _is_refilled(self, x: Tensor) -> bool:
        return is_parameter(x)

    def _refill(self, x: Tensor, new: Tensor) -> None:
        refill(x, new)

    def _finish(self, obj: Any) -> None:
        finish(obj)

    def samples(self) -> Mapping[str, Callable[[Device], Any]]:
        return {**super().samples(), **make_samples(self)}

    # -- files ----------------------------------------------------------------------------

    def _layouts(self, obj: Any) -> Mapping[str, Layout] | None:
        layers = layers_of(obj)
        return layouts_in(self, obj, layers) if layers else None

    def _borrow(self, x: Tensor) -> np.ndarray[Any, Any]:
        return numpy_exchange.lent(x)

    def _adopt(self, array: np.ndarray[Any, Any], dtype: Any, native: Any) -> Tensor:
        if native != _CPU:
            return self._from_data(array, dtype, native)
        return numpy_exchange.adopted(array)

    def _state(self, optimizer: Any) -> Mapping[Any, Any] | None:
        return state_of(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None

    def _state_put(self, optimizer: Any, state: Any) -> Callable[[], None]:
        return state_put(optimizer, state)

    # -- training -------------------------------------------------------------------------

    def _learner(self, model: Any, settings: Settings) -> Learner:
        from d2ldev_torch.learner import TorchLearner

        return TorchLearner(self, model, settings)

    def _accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        return (prediction.argmax(-1) == y.long()).float().mean()

    def _prefetch(
        self, batches: Iterable[Any], device: Device, depth: int
    ) -> Generator[Any, None, None]:
        streams = None if device is CPU else self._accelerator.streams()
        if streams is None or not depth:
            return super()._prefetch(batches, device, depth)
        side = SideStream(self, streams, device)
        return moved_ahead(batches, depth, side.start, side.finish)

    def _loader_state(self, loader: Any) -> Any:
        return loader_state(loader)

    def _checked_loader_state(self, loader: Any, state: Any) -> Callable[[], None]:
        return checked_loader_state(loader, state)

    def _detached(self, x: Tensor) -> Tensor:
        x = x.detach()
        return x.clone() if x.untyped_storage().nbytes() > x.element_size() else x

    def _stack(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(xs))
