"""What ``torch.cuda`` answers while virtual GPUs stand for CUDA devices.

Every function in ``torch.cuda.__all__`` answers here, or raises an error that names it. One random
generator draws for the CPU and all virtual GPUs: to seed one device seeds all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from d2ldev import UnsupportedValueError
from d2ldev.framework import memory_of_the_machine
from d2ldev_torch.virtual import memory, torch_module
from d2ldev_torch.virtual.devices import NAME, count, refuse_missing

_CAPABILITY = (8, 0)  # the first with bfloat16


def native_of(device: Any) -> torch.device:
    """Return the virtual GPU that a CUDA device, a name, an index or None stands for.

    Without an index it is the current device.

    Raises:
        DeviceUnavailableError: if there is no such virtual GPU.
    """
    if isinstance(device, int):
        device = torch.device(NAME, device)
    elif device is None:
        device = torch.device(NAME, torch_module.current_device())
    else:
        device = torch.device(device)
    if device.type not in (NAME, "cuda"):
        raise UnsupportedValueError(
            f"use {device} as a CUDA device", "it is another kind of device", "device='cuda:0'"
        )
    index = torch_module.current_device() if device.index is None else device.index
    if index >= count():
        raise refuse_missing(f"cuda:{index}", "cuda:0")
    return torch.device(NAME, index)


def _index(device: Any) -> int:
    return int(native_of(device).index)


class Stream(torch_module.Stream):
    """A stream whose work is done when a call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_options: Any) -> None:
        super().__init__(priority)
        self.device = torch.device("cuda", _index(device))
        self.priority, self.cuda_stream = priority, 0

    def query(self) -> bool:
        """Return True: nothing is queued."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one without an argument, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class Event(torch_module.Event):
    """An event, which keeps the time at which it is recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Keep the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds of the CPU's clock from this event to another."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000


class Device:
    """A block whose current device is another one; None and a negative index change nothing."""

    def __init__(self, device: Any) -> None:
        is_none = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if is_none else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch_module.current_device()
        _set_index(self.idx)

    def __exit__(self, *_error: object) -> None:
        _set_index(self.prev_idx)


class DeviceOf(Device):
    """A block whose current device is a tensor's."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device())


def _set_index(index: int) -> None:
    if index >= 0:
        torch_module.make_current(index)


def _exchange(index: int) -> int:
    """Make another device current, and return the index of the one before."""
    before = torch_module.current_device()
    _set_index(-1 if index < 0 else _index(index))
    return before


class StreamContext(nullcontext[None]):
    """A block whose work is done when a call returns, on any stream."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream


def _get_properties(device: Any = None) -> Any:
    index = _index(device)
    return SimpleNamespace(
        name=_get_name(index),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=memory_of_the_machine() or 0,
        multi_processor_count=os.cpu_count() or 1,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        warp_size=32,
        L2_cache_size=0,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid=f"00000000-0000-0000-0000-{index:012}",
        pci_bus_id=index,
    )


def _get_name(device: Any = None) -> str:
    return f"d2ldev virtual GPU {_index(device)}"


def _get_free_memory(device: Any = None) -> tuple[int, int]:
    total = memory_of_the_machine() or 0
    return max(0, total - memory.count_used_bytes(_index(device))), total


def _count_bytes(device: Any = None) -> int:
    return memory.count_used_bytes(_index(device))


def _get_memory_stats(device: Any = None) -> dict[str, int]:
    return {
        f"{name}_bytes.all.{when}": number
        for name in ("allocated", "reserved", "active", "requested")
        for when, number in (("current", _count_bytes(device)), ("peak", _count_peak(device)))
    }


def _count_peak(device: Any = None) -> int:
    return memory.peak_of(_index(device))


def _reset_peak(device: Any = None) -> None:
    memory.reset_peak(_index(device))


def _summarize_memory(device: Any = None, _abbreviated: bool = False) -> str:
    used, peak = _count_bytes(device), _count_peak(device)
    return f"{_get_name(device)}: {used} bytes in use, {peak} at most"


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_state(device: Any = None) -> torch.Tensor:
    _index(device)
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: Any = None) -> None:
    _index(device)
    torch.set_rng_state(new_state)


def _set_states(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        _set_state(state, index)


class TensorType(type):
    """The type of ``torch.cuda.FloatTensor`` and its like: a dtype on the current CUDA device."""

    dtype: torch.dtype
    layout: torch.layout

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        made: torch.Tensor = getattr(torch, cls.__name__)(*args).to(native_of(device))
        return made

    def __instancecheck__(cls, x: object) -> bool:
        if not isinstance(x, torch.Tensor) or x.device.type != NAME:
            return False
        return x.layout is cls.layout and x.dtype is cls.dtype


class SparseType(TensorType):
    """The type of ``torch.cuda.sparse.FloatTensor`` and its like, which is COO."""

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        if not args or not isinstance(args[0], torch.Tensor):
            made: torch.Tensor = getattr(torch.sparse, cls.__name__)(*args).to(native_of(device))
            return made
        native = None if device is None else native_of(device)
        return torch.sparse_coo_tensor(*args, dtype=cls.dtype, device=native)


def _make_type(name: str) -> TensorType:
    return _make(TensorType, getattr(torch, name), "torch.cuda")


def _make(kind: type[TensorType], like: Any, module: str) -> TensorType:
    names = {"dtype": like.dtype, "layout": like.layout, "is_cuda": True, "__module__": module}
    return kind(like.__name__, (), names)


_current_streams: dict[int, Any] = {}


def _get_stream(device: Any = None) -> Stream:
    index = _index(device)
    if index not in _current_streams:
        _current_streams[index] = Stream(index)
    return _current_streams[index]  # type: ignore[no-any-return]


def _set_stream(stream: Any) -> None:
    if stream is not None:
        _current_streams[_index(stream.device)] = stream


_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "device_count": count,
    "current_device": torch_module.current_device,
    "set_device": lambda device: _set_index(-1 if device == -1 else _index(device)),
    "device": Device,
    "device_of": DeviceOf,
    "synchronize": lambda device=None: _index(device) and None,
    "can_device_access_peer": lambda device, peer_device: _index(device) != _index(peer_device),
    "get_device_properties": _get_properties,
    "get_device_name": _get_name,
    "get_device_capability": lambda device=None: _index(device) * 0 or _CAPABILITY,
    "is_bf16_supported": lambda _including_emulation=True: True,
    "is_tf32_supported": lambda: False,
    "get_arch_list": list,
    # Streams and events.
    "Stream": Stream,
    "Event": Event,
    "stream": StreamContext,
    "StreamContext": StreamContext,
    "current_stream": _get_stream,
    "default_stream": _get_stream,
    "set_stream": _set_stream,
    "is_current_stream_capturing": lambda: False,
    # Memory.
    "mem_get_info": _get_free_memory,
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _count_bytes),
    "memory_stats": _get_memory_stats,
    "memory_summary": _summarize_memory,
    **dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _count_peak
    ),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_accumulated_memory_stats"), _reset_peak),
    **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), _reset_peak),
    "empty_cache": torch_module.empty_cache,
    "ipc_collect": torch_module.empty_cache,
    # Random numbers.
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "seed": lambda: _seed(torch.seed()),
    "seed_all": lambda: _seed(torch.seed()),
    "initial_seed": torch.initial_seed,
    "get_rng_state": _get_state,
    "get_rng_state_all": lambda: [_get_state(i) for i in range(count())],
    "set_rng_state": _set_state,
    "set_rng_state_all": _set_states,
}
_MODULES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)


def list_replacements() -> list[tuple[Any, str, Any]]:
    """Return the functions of ``torch.cuda``, and what replaces them."""
    replacements = []
    for name in torch.cuda.__all__:
        function = getattr(torch.cuda, name)
        answer = _ANSWERS.get(name)
        if answer is None:
            if name.endswith("Tensor"):
                answer = _make_type(name)
            elif isinstance(function, FunctionType):
                answer = _refuse(name, function)
            else:
                continue
        replacements += [
            (module, name, answer) for module in _MODULES if vars(module).get(name) is function
        ]
    replacements += [
        (torch.cuda.sparse, name, _make(SparseType, vars(torch.sparse)[name], "torch.cuda.sparse"))
        for name in vars(torch.cuda.sparse)
        if name.endswith("Tensor") and name in vars(torch.sparse)
    ]
    generators = tuple(torch.default_generator for _ in range(count()))
    return [
        *replacements,
        (torch.cuda, "default_generators", generators),
        (torch.cuda, "_lazy_init", refuse_hardware),
        (torch._C, "_accelerator_getDeviceIndex", torch_module.current_device),
        *(
            (torch._C, f"_accelerator_{name}", _exchange)
            for name in ("setDeviceIndex", "exchangeDevice", "maybeExchangeDevice")
        ),
    ]


def _refuse(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedValueError(
            f"call torch.cuda.{name}",
            "only a real CUDA device can answer",
            "leave the call out where torch.cuda.get_device_name() begins with 'd2ldev virtual'",
        )

    return refuse


def refuse_hardware() -> None:
    """Refuse a call that names CUDA, and that no mode of torch sees.

    C++ calls ``torch.cuda._lazy_init`` before it uses a CUDA device.

    Raises:
        UnsupportedValueError: always.
    """
    raise UnsupportedValueError(
        "use a CUDA device",
        "this call reaches torch's C++ code past d2ldev, which makes virtual GPUs of CUDA devices",
        f"name the device as torch does: device='{NAME}:0', or x.device of a tensor there",
    )
