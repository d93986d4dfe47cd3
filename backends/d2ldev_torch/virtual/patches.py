"""Replace functions of torch that need more than torch's hooks for backends in Python offer.

- Storages: torch makes one with the allocator of its device. A backend in Python has none, and
  the process would end. ``copy.deepcopy``, ``torch.load`` and pickling make storages. FSDP frees
  their memory, and allocates it again.
- ``x.new_tensor`` and ``x.new``: torch makes ``x``'s device the current device, and a tensor on
  it. For virtual GPUs that would always be the first device.
  https://github.com/pytorch/pytorch/blob/main/torch/csrc/utils/tensor_new.cpp
- Memory of other processes: if a worker puts a batch on a virtual GPU, a ``DataLoader`` would wait
  forever.
- ``x.cuda(1)``, which books use to move a tensor, and ``module.cuda(1)``, which calls it. They
  mean the virtual GPUs, because these replace the hardware's.
- ``torch.cuda.manual_seed`` and ``autocast('cuda')``, which would do nothing without a word.
- ``torch.accelerator``: it would silently ignore another current device, and waiting is an error.
  Emptying the cache of pinned memory ends the process. Functions about an allocator's memory raise
  an internal error of torch.
  https://github.com/pytorch/pytorch/blob/main/torch/csrc/DeviceAccelerator.cpp
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch

from d2ldev import UnsupportedValueError
from d2ldev.framework import warn
from d2ldev_torch.virtual import as_cuda, torch_module
from d2ldev_torch.virtual.cuda_module import native_of
from d2ldev_torch.virtual.devices import NAME, device_of, index_of
from d2ldev_torch.virtual.memory import as_virtual, bytes_of, forget_origin

_CAN_RESIZE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def install(aten: Any) -> None:
    """Replace the functions for the whole process.

    Args:
        aten: a ``torch.library.Library``.
    """
    _make_storages()
    _share_no_memory()
    _make_new_tensors()
    _move_to_gpus()
    _answer_accelerator()
    as_cuda.install()
    _explain_cuda()
    # Virtual GPUs read the host's memory directly, pageable or not.
    aten.impl("_pin_memory", lambda x, *_: x.clone(), "CPU")


def _make_storages() -> None:
    storage_type: Any = torch.UntypedStorage
    make = storage_type.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:  # PyTorch makes it on the CPU, whatever its default device is
            return make(cls, *args, **kwargs)
        native = torch.device(as_cuda.translate(device))
        if native.type != NAME:
            return make(cls, *args, device=device, **kwargs)
        index = index_of(native)
        storage = make(cls, *args, device="cpu", **kwargs)
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return as_virtual(whole, index).untyped_storage()

    change_size = storage_type.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != NAME:
            return change_size(self, size)
        old, new = (storage_type(length, device=self.device) for length in (0, size))
        self._swap_data_ptr_(old)  # for two storages with memory, it requires equal sizes
        kept = min(size, old.nbytes())
        bytes_of(new)[:kept] = bytes_of(old)[:kept]
        self._swap_data_ptr_(new)
        forget_origin(self)  # it would keep alive the memory that FSDP frees
        return self

    storage_type.__new__ = new
    if _CAN_RESIZE:
        storage_type.resize_ = resize_


def _share_no_memory() -> None:
    storage_type: Any = torch.UntypedStorage
    make_shared = storage_type._new_shared.__func__

    def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return make_shared(cls, size, device=device)
        gpu = device_of(torch.device(device))
        raise UnsupportedValueError(
            "share memory with other processes",
            f"the memory of {gpu} belongs to this process",
            "leave data on the CPU until it has arrived: x = backend.to(x, device) in this process",
            [gpu],
        )

    storage_type._new_shared = classmethod(new_shared)


def _make_new_tensors() -> None:
    tensor_type: Any = torch.Tensor
    make_new, make_new_tensor = tensor_type.new, tensor_type.new_tensor

    @wraps(make_new)
    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = make_new(self, *args, **kwargs)
        return made if self.device.type != NAME or "device" in kwargs else made.to(self.device)

    @wraps(make_new_tensor)
    def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == NAME and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return make_new_tensor(self, *args, **kwargs)

    tensor_type.new, tensor_type.new_tensor = new, new_tensor


def _move_to_gpus() -> None:
    tensor_type: Any = torch.Tensor

    @wraps(tensor_type.cuda)
    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if as_cuda.is_on():
            native = native_of(device)
        else:
            is_index = device is None or isinstance(device, int)
            native = torch.device("cuda", device or 0) if is_index else torch.device(device)
            if native.type == "cuda":
                native = torch.device(NAME, native.index or 0)
        # torch's own method for the device, which corresponds to ``cuda``.
        return getattr(self, NAME)(native, *args, **kwargs)  # type: ignore[no-any-return]

    tensor_type.cuda = cuda


_AS_CUDA = "or begin the program with d2ldev.virtual_gpus(2, as_cuda=True)"


def _explain_cuda() -> None:
    """Warn of calls for CUDA that change nothing on virtual GPUs."""

    def explain(function: Any, fix: str) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not as_cuda.is_inside(sys._getframe(1)):  # ``torch.manual_seed`` calls it, too
                name = function.__name__
                warn(f"torch.cuda.{name} seeds no virtual GPU. fix: {fix}, {_AS_CUDA}")
            return function(*args, **kwargs)

        return call

    for name, fix in (
        *((name, "torch.manual_seed(seed)") for name in ("manual_seed", "manual_seed_all")),
        *((name, "torch.seed()") for name in ("seed", "seed_all")),
    ):
        call = explain(getattr(torch.cuda, name), fix)
        setattr(torch.cuda, name, call)
        setattr(torch.cuda.random, name, call)

    cast: Any = torch.autocast
    make = cast.__init__

    @wraps(make)
    def make_autocast(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        *cache: Any,
        **options: Any,
    ) -> None:
        make(self, device_type, dtype, enabled, *cache, **options)
        if device_type == "cuda" and enabled:
            fix = f"torch.autocast('{NAME}', ...), {_AS_CUDA}"
            warn(f"autocast('cuda') changes nothing on a virtual GPU. fix: {fix}")

    cast.__init__ = make_autocast


def _answer_accelerator() -> None:
    def set_device(index: int) -> int:
        if index >= 0:  # torch ignores a negative index
            torch_module.set_device(index)
        return 0

    answers = {
        "setDeviceIndex": set_device,
        "exchangeDevice": set_device,
        "maybeExchangeDevice": lambda _index: 0,
        "synchronizeDevice": torch_module.synchronize,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": torch_module.empty_cache,
        "emptyHostCache": torch_module.empty_cache,
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_accelerator_{name}", answer)
