"""Let virtual GPUs stand for CUDA devices: ``"cuda:1"`` is ``vgpu:1``, and ``torch.cuda`` answers.

``torch.device`` is a class of C++ that cannot be replaced: torch's functions accept no other. So a
``TorchFunctionMode`` replaces each CUDA device among the arguments of torch's functions. One rule
holds for all functions, also for those that a library has imported before. ``_replace`` replaces
the functions that no mode sees.

- torch has a stack of modes for each thread. New threads get the mode, too, and backward passes.
- ``x.device`` is ``cuda:1`` for programs and libraries. It stays ``vgpu:1`` for d2ldev and torch,
  whose code for CUDA would look for CUDA's own functions. torch's errors name ``cuda:1``.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from d2ldev import D2LDevError
from d2ldev.framework import replace, warn
from d2ldev_torch.virtual import cuda_module, memory, torch_module
from d2ldev_torch.virtual.cuda_module import native_of
from d2ldev_torch.virtual.devices import NAME, count

_is_cuda_name = re.compile(r"cuda(:\d+)?").fullmatch
_NAMES = frozenset((str, torch.device))


def translate(value: Any) -> Any:
    """Return the virtual GPU for a CUDA device or its name, and any other value as it is."""
    kind = type(value)
    is_cuda = value.type == "cuda" if kind is torch.device else kind is str and _is_cuda_name(value)
    return native_of(value) if is_cuda and is_on() else value


def show(device: torch.device, reader: FrameType) -> torch.device:
    """Return a device as a program sees it: the CUDA device for a virtual GPU.

    Args:
        device: the device of a tensor or of a generator.
        reader: the frame that asks.
    """
    while reader.f_code.co_name == "__torch_function__":  # of the modes above
        reader = reader.f_back  # type: ignore[assignment]
    is_shown = device.type == NAME and is_on() and not is_inside(reader)
    return torch.device("cuda", device.index) if is_shown else device


def is_inside(reader: FrameType) -> bool:
    """Return whether a frame is of torch or d2ldev, which see a virtual GPU's own device."""
    return reader.f_globals.get("__name__", "").partition(".")[0] in _INSIDE


_INSIDE = ("torch", "d2ldev", "d2ldev_torch")


class _Mode(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of torch's functions."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.device:  # ``torch.device('cuda')`` stays what it is
            if any(type(value) in _NAMES for value in args):
                args = tuple(map(translate, args))
            if kwargs:
                kwargs = {name: translate(value) for name, value in kwargs.items()}
                if kwargs.get("pin_memory"):  # virtual GPUs read the host's memory directly
                    del kwargs["pin_memory"]
        try:
            result = function(*args, **kwargs) if kwargs else function(*args)
        except Exception as error:
            if not isinstance(error, D2LDevError):
                error.args = tuple(map(_name_cuda, error.args))
            raise
        kind = type(result)
        if kind is torch.device:
            return show(result, sys._getframe(1))
        if kind is tuple and result and type(result[0]) is torch.device:  # of ``_parse_to``
            return show(result[0], sys._getframe(1)), *result[1:]
        return result


def _name_cuda(text: Any) -> Any:
    """Return the text of an error with the names of CUDA devices for those of virtual GPUs."""
    return _name.sub("cuda", text) if isinstance(text, str) else text


_name = re.compile(rf"\b{NAME}\b")
_mode = _Mode()
_number_of_blocks = 0


def is_on() -> bool:
    """Return whether virtual GPUs stand for CUDA devices now."""
    return _number_of_blocks > 0


@contextmanager
def stand_for_cuda() -> Iterator[None]:
    """Let virtual GPUs stand for CUDA devices in a block, in this thread and those it starts."""
    with ExitStack() as entered:
        _enter(entered)
        yield


# Of ``switch_on``. It is never closed.
_forever = ExitStack()


def switch_on() -> None:
    """Let virtual GPUs stand for CUDA devices from now on."""
    if not is_on():
        _enter(_forever)


def _enter(entered: ExitStack) -> None:
    if not is_on():
        entered.callback(torch_module.make_current, torch_module.current_device())
        _replace(entered)
        memory.follow_peaks(count())
        entered.callback(memory.follow_peaks, 0)
    _count_blocks(1)
    entered.callback(_count_blocks, -1)
    entered.enter_context(_mode)


def _count_blocks(change: int) -> None:
    global _number_of_blocks
    _number_of_blocks += change


def mode_of_backward() -> Any:
    """Return the mode for a backward pass, which runs past all modes."""
    return _mode if is_on() else nullcontext()


# -- what no mode sees ----------------------------------------------------------------------------


def _replace(entered: ExitStack) -> None:
    """Replace functions and attributes until the block ends."""
    entered.callback(
        replace(
            [
                *cuda_module.list_replacements(),
                *_list_autocast(),
                *(
                    (module, name, _take_devices(getattr(module, name)))
                    for module, names in _FUNCTIONS.items()
                    for name in names
                ),
                (torch, "compile", wraps(torch.compile)(_leave_as_it_is)),
                (torch, "set_default_tensor_type", _set_default_tensor_type),
                (threading.Thread, "start", _start),
            ]
        )
    )
    if "torch._dynamo" in sys.modules:  # for what was compiled before
        entered.enter_context(torch.compiler.set_stance("force_eager"))
    for owner, name, value in (
        (torch.Tensor, "is_cuda", property(_is_on_cuda)),
        (torch.UntypedStorage, "is_cuda", property(_is_on_cuda)),
        (torch.Tensor, "type", _type),
        (torch.Tensor, "record_stream", lambda _x, _stream: None),
        # Of ``with torch.device('cuda:1'):`` and ``torch.set_default_device``.
        (_device.DeviceContext, "device", property(_device_of_context, _set_device_of_context)),
    ):
        if name in vars(owner):
            entered.callback(setattr, owner, name, vars(owner)[name])
        else:  # it belongs to a base class, or to the objects
            entered.callback(delattr, owner, name)
        setattr(owner, name, value)


def _is_on_cuda(x: Any) -> bool:
    return show(x.device, sys._getframe(1)).type == "cuda"


def _leave_as_it_is(model: Any = None, **_options: Any) -> Any:
    """Return a function that is to be compiled as it is: the compiler cannot trace the mode."""
    warn(
        "torch.compile compiles nothing while virtual GPUs stand for CUDA devices: the function "
        "runs as it is. fix: leave torch.compile out"
    )
    return (lambda function: function) if model is None else model


# Functions in Python that take or return a device.
_FUNCTIONS = {
    torch: ("get_default_device",),
    torch.nested: ("nested_tensor", "as_nested_tensor"),
    torch.accelerator: tuple(
        name
        for name in torch.accelerator.__all__
        if isinstance(getattr(torch.accelerator, name), FunctionType)
    ),
}


def _take_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*map(translate, args), **{k: translate(v) for k, v in kwargs.items()})
        is_device = isinstance(result, torch.device)
        return show(result, sys._getframe(1)) if is_device else result

    return call


def _type(x: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Do what ``x.type(...)`` does, also for ``torch.cuda.FloatTensor`` and its name."""
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        dtype = getattr(torch.cuda, dtype.removeprefix("torch.cuda."), dtype)
    if isinstance(dtype, cuda_module.TensorType):
        return x.to(x.device if x.device.type == NAME else "cuda", dtype.dtype)
    made = _make_type(x, dtype, *args, **kwargs)
    return made.replace(f"torch.{NAME}.", "torch.cuda.") if isinstance(made, str) else made


_make_type = torch.Tensor.type


def _device_of_context(context: Any) -> Any:
    return translate(vars(context)["device"])


def _set_device_of_context(context: Any, device: Any) -> None:
    vars(context)["device"] = device


def _set_default_tensor_type(t: Any) -> None:
    if isinstance(t, str) and t.startswith("torch.cuda."):
        t = getattr(torch.cuda, t.removeprefix("torch.cuda."), t)
    if not isinstance(t, cuda_module.TensorType):
        _set_type(t)
        return
    torch.set_default_dtype(t.dtype)
    torch.set_default_device("cuda")


_set_type = torch.set_default_tensor_type
_start_thread = threading.Thread.start


def _start(thread: threading.Thread) -> None:
    """Start a thread with the mode."""
    run = thread.run

    def run_under_mode() -> None:
        del vars(thread)["run"]
        with mode_of_backward():
            run()

    vars(thread)["run"] = run_under_mode
    _start_thread(thread)


def _list_autocast() -> list[tuple[Any, str, Any]]:
    """Return the functions of autocast, and the same for the autocast of virtual GPUs."""
    cast = autocast_mode.autocast

    def take_type(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(NAME if _is_cuda(value) else value for value in args)
            kwargs = {k: NAME if _is_cuda(value) else value for k, value in kwargs.items()}
            return function(*args, **kwargs)

        return call

    def add_type(function: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return a function whose device type is CUDA if it is left out."""
        taking = take_type(function)

        @wraps(function)
        def call(*args: Any) -> Any:
            return taking(*args) if len(args) > number else taking(NAME, *args)

        return call

    return [
        (cast, "__init__", take_type(cast.__init__)),
        # Of ``custom_fwd(cast_inputs=...)``, which compares the type of a tensor's device.
        (autocast_mode, "_cast", take_type(autocast_mode._cast)),
        (torch, "is_autocast_enabled", add_type(torch.is_autocast_enabled, 0)),
        (torch, "set_autocast_enabled", add_type(torch.set_autocast_enabled, 1)),
        (torch, "get_autocast_dtype", take_type(torch.get_autocast_dtype)),
        (torch, "set_autocast_dtype", take_type(torch.set_autocast_dtype)),
        (torch, "get_autocast_gpu_dtype", partial(torch.get_autocast_dtype, NAME)),
        (torch, "set_autocast_gpu_dtype", partial(torch.set_autocast_dtype, NAME)),
    ]


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str) and value == "cuda"


# -- files ----------------------------------------------------------------------------------------


def _tag(storage: Any) -> str | None:
    """Return the name of a storage's device in a file, which a machine with CUDA can load."""
    device = storage.device
    return f"cuda:{device.index}" if is_on() and device.type == NAME else None


def _restore(storage: Any, location: str) -> Any:
    """Return a storage from a file on the virtual GPU that its location stands for."""
    if not (is_on() and _is_cuda_name(location)):
        return None
    return storage.to(device=native_of(location))


def install() -> None:
    """Prepare ``torch.save`` and ``torch.load``, which then ask ``is_on``."""
    torch.serialization.register_package(15, _tag, _restore)  # before CUDA, after the CPU
