"""Follow the tensors that functions of torch create, move and read, to find leaks of devices.

A ``TorchFunctionMode`` sees every function of torch and every attribute of a tensor. It puts the
inputs that a test creates on the tried device, and notes what a library creates elsewhere. Where an
operation on several devices raises an error, the mode reports the tensors that are elsewhere. Then
it moves them and calls the operation again: one run finds all leaks.

- Modules are made on the CPU. ``module.to(device)`` moves them when their constructor is done. It
  leaves second names of buffers behind, and tensors that are neither parameters nor buffers.
- The framework's own code may move tensors to the host and back. That counts for nobody.
- No mode sees ``torch.from_numpy`` and ``torch.Tensor(...)``: they are replaced. A backward pass
  runs past all modes, and gets this one.
- Modes are those of a thread. TorchScript and compiled functions run without them.

Sources: https://docs.pytorch.org/docs/stable/torch.overrides.html, and ``_device_constructors`` in
https://github.com/pytorch/pytorch/blob/main/torch/utils/_device.py
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

from d2ldev import Device, DeviceMismatchError, UnsupportedValueError
from d2ldev.framework import Stray, Watch, replace

_Tensor = torch.Tensor
_MOVES = (_Tensor.to, _Tensor.cpu, _Tensor.cuda)
_TO_NUMPY = (_Tensor.numpy, _Tensor.__array__)
_READS = (
    *_TO_NUMPY,
    *(_Tensor.item, _Tensor.tolist, _Tensor.__repr__, _Tensor.__format__),
    *(_Tensor.__bool__, _Tensor.__int__, _Tensor.__float__, _Tensor.__complex__),
    _Tensor.__index__,
)
# Modules of torch whose constructors and functions make inputs, if a test calls them.
_INPUT_MODULES = ("torch.nn.modules.", "torch.nn.parameter", "torch.distributions.")
# Functions that create on the device of an operand, unless a call names another one.
_LIKE = (
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(_Tensor.new_tensor, _Tensor.new_empty, _Tensor.new_zeros, _Tensor.new_ones),
    *(_Tensor.new_full, _Tensor.new_empty_strided),
)
# From this argument on, CUDA wants integers on the host.
_HOST_ARGUMENTS = {
    torch._VF._pack_padded_sequence: 1,
    **dict.fromkeys((torch.tensor_split, _Tensor.tensor_split), 1),
}
_COLLATE = "torch.utils.data._utils.collate"
# Functions that look at a tensor, or copy it, and compute nothing.
_LOOKS = frozenset(
    (
        *("__get__", "__len__", "size", "dim", "numel", "stride", "data_ptr", "element_size"),
        *("detach", "clone", "contiguous", "to", "cpu", "cuda", "type", "is_contiguous"),
        *("is_floating_point", "is_complex", "resolve_conj", "resolve_neg", "requires_grad_"),
    )
)
# Functions by which a test asks for no values.
_SIZES = frozenset(
    (
        *(_Tensor.shape.__get__, _Tensor.ndim.__get__, _Tensor.dtype.__get__),  # type: ignore[attr-defined]
        *(_Tensor.__len__, _Tensor.size, _Tensor.dim, _Tensor.numel),
    )
)
_IN_PLACE = frozenset(("__setitem__", "__set__"))


class LeakMode(TorchFunctionMode):
    """Shows a watch the tensors that functions of torch create, move and read.

    Args:
        watch: what is known of the tensors.
        mismatch: returns d2ldev's error for one of torch's: ``TorchStrict.mismatch``.
        native: the device of the inputs.
        from_native: what d2ldev calls a device.
        gpu: the GPU of an index, or the current one, for code that names CUDA.
    """

    def __init__(
        self,
        watch: Watch,
        mismatch: Callable[..., DeviceMismatchError | None],
        native: torch.device,
        from_native: Callable[[torch.device], Device | None],
        gpu: Callable[[int | None], torch.device],
    ) -> None:
        super().__init__()
        self._watch, self._mismatch = watch, mismatch
        self._frames = watch.frames
        self._native, self._from_native, self._gpu = native, from_native, gpu
        self._building: dict[FrameType, torch.nn.Module] = {}
        self._moved = 0
        self._special: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(_device_constructors(), self._create),
            **dict.fromkeys(_LIKE, self._create_like),
            # ``x.vgpu()``, which ``x.cuda()`` calls where GPUs are virtual.
            getattr(_Tensor, native.type, _Tensor.to): self._move,
            **dict.fromkeys(_MOVES, self._move),
            **dict.fromkeys(_READS, self._read),
            **dict.fromkeys(_HOST_ARGUMENTS, self._count),
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        watch = self._watch
        if not watch.has_inputs:
            watch.has_inputs = any(x.device == self._native for x in _tensors_in(args))
        call = self._special.get(function)
        if call is not None:
            return call(function, args, kwargs or {}, sys._getframe(1))
        if watch.strays:
            return self._call(function, args, kwargs or {}, sys._getframe(1))
        try:  # most calls
            return function(*args, **kwargs) if kwargs else function(*args)
        except RuntimeError as error:
            return self._repair(error, function, args, kwargs or {}, sys._getframe(1))

    # -- create -----------------------------------------------------------------------------------

    def _create(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType
    ) -> Any:
        frame = self._frames.nearest(caller)
        given = kwargs.get("device")
        native = torch.device(given) if isinstance(given, (str, int)) else given
        self._take_given(frame)
        if frame is None or kwargs.get("out") is not None:
            return self._call(function, args, kwargs, caller)
        if native is not None and native.type == "cuda":
            native = self._gpu(native.index)
            kwargs = {**kwargs, "device": native}
        is_elsewhere = native is not None and native.type != "cpu"
        if not is_elsewhere and (
            self._makes_input(frame, caller) or self._frames.is_given(frame, given)
        ):
            return self._make_on_device(function, args, kwargs)
        made = self._call(function, args, kwargs, caller)
        self._note(made, frame)
        return made

    def _create_like(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType
    ) -> Any:
        call = self._call if kwargs.get("device") is None else self._create
        return call(function, args, kwargs, caller)

    def _makes_input(self, frame: FrameType, caller: FrameType) -> bool:
        """Return whether a tensor that is created without a device is an input of the test."""
        if self._frames.is_test(frame):
            name = str(caller.f_globals.get("__name__", ""))
            is_torch = name.partition(".")[0] == "torch" or _is_of_kernels(caller)
            return not is_torch or name.startswith(_INPUT_MODULES) or name == _COLLATE
        is_input = not self._is_constructed(frame) and self._watch.is_input(frame)
        return is_input and not self._watch.is_kept(frame)

    def _make_on_device(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            plain = {name: value for name, value in kwargs.items() if name != "device"}
            has_gradient = plain.pop("requires_grad", False)
            return self._to_device(function(*args, **plain)).requires_grad_(has_gradient)
        return function(*args, **{**kwargs, "device": self._native})  # type: ignore[no-any-return]

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x.to(self._native)
        except UnsupportedValueError:  # a layout that virtual GPUs do not hold
            return x

    def _note(self, made: Any, frame: FrameType) -> None:
        """Remember a tensor that a library has created on another device."""
        if not isinstance(made, _Tensor) or made.device == self._native:
            return
        if self._frames.is_test(frame):
            return
        is_suspect = self._is_constructed(frame) or self._watch.is_kept(frame)
        if is_suspect or self._watch.is_own(frame):
            self._watch.note_stray(made, frame, "creates", is_suspect=is_suspect)

    def take(self, made: torch.Tensor, caller: FrameType) -> torch.Tensor:
        """Return a tensor that was made past all modes, on the device if it is an input."""
        frame = self._frames.nearest(caller)
        self._take_given(frame)
        if frame is None or not made.is_cpu:
            return made
        if self._makes_input(frame, caller):
            return self._to_device(made)
        self._note(made, frame)
        return made

    def _take_given(self, frame: FrameType | None) -> None:
        """Move the suspects that a test has given to the library, which are inputs."""
        if self._watch.strays and frame is not None and not self._frames.is_test(frame):
            self._take(self._watch.find_given(frame))

    def _take(self, suspects: Iterable[torch.Tensor]) -> None:
        for x in suspects:
            self._move_in_place(x)
            self._watch.strays.pop(id(x), None)

    # -- modules ----------------------------------------------------------------------------------

    def begin(self, module: torch.nn.Module, caller: FrameType) -> None:
        """Move a new module of the test by ``module.to(device)``, when its constructor is done.

        Of modules inside of others, the outermost is moved, as only that one is the test's to move.
        """
        frame = self._frames.nearest(caller)
        if frame is None:
            return
        is_test = self._frames.is_test(frame)
        if not (is_test or self._is_constructed(frame) or self._watch.is_input(frame)):
            return
        outermost: tuple[FrameType, torch.nn.Module] | None = None
        outer: FrameType | None = caller
        while outer is not None:
            built = _find_new_module(outer)
            if built is not module and self._frames.is_test(outer):
                break
            outermost = outermost if built is None else (outer, built)
            outer = outer.f_back
        if outermost is not None:
            self._building.update([outermost])
            sys.setprofile(self._end)  # which Python calls when a function returns

    def _end(self, frame: FrameType, event: str, _value: object) -> None:
        if event == "return" and frame in self._building:
            self._move_module(self._building.pop(frame))
            if not self._building:
                sys.setprofile(None)

    def _move_module(self, module: torch.nn.Module) -> None:
        with torch._C.DisableTorchFunction(), suppress(Exception):  # what cannot be moved stays
            module.to(self._native)

    def register(self, _module: torch.nn.Module, _name: str, value: Any) -> None:
        """Remember a parameter or buffer that a library has created on another device."""
        with torch._C.DisableTorchFunction():
            frame = self._frames.nearest(sys._getframe(1))
            if frame is None or not isinstance(value, _Tensor) or not value.is_cpu:
                return
            if not self._is_constructed(frame):
                self._note(value, frame)

    def _is_constructed(self, frame: FrameType) -> bool:
        """Return whether the test calls a constructor of a module, which runs the frame."""
        inside = outermost = False
        for outer in self._frames.library(frame):
            outermost = _find_new_module(outer) is not None
            inside = inside or outermost
        return outermost or (inside and self._watch.is_input(frame))

    def place(self, values: dict[str, Any]) -> None:
        """Move the tensors and modules among the values of a dict, which stay the same objects.

        So are tensors in lists, tuples and dicts, and in attributes of objects. A tensor that a
        library has left elsewhere stays there.
        """
        with torch._C.DisableTorchFunction():
            for value in list(values.values()):
                self._place_value(value)
                is_object = type(value).__module__ not in sys.builtin_module_names
                if is_object and not isinstance(value, (type, _Tensor, torch.nn.Module)):
                    before = self._moved
                    for each in list(getattr(value, "__dict__", {}).values()):
                        self._place_value(each)
                    if self._moved > before:
                        self._frames.toolboxes[id(value)] = value

    def _place_value(self, value: Any) -> None:
        if isinstance(value, _Tensor):
            if self._watch.find_stray(value) is None:
                self._move_in_place(value)
        elif isinstance(value, torch.nn.Module):
            self._move_module(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._place_value(each)
        elif isinstance(value, dict) and "__builtins__" not in value:
            self._place_value(list(value.values()))

    def _move_in_place(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cpu:
            self._moved += 1
            with suppress(UnsupportedValueError):
                moved = x.data.to(self._native)
                if x.layout is torch.strided:
                    x.data = moved
                else:  # ``data`` takes no sparse tensor of another device
                    with suppress(RuntimeError):  # one that C++ code refers to stays
                        torch._C._swap_tensor_impl(x, moved.requires_grad_(x.requires_grad))
        return x

    # -- move and read ----------------------------------------------------------------------------

    def _move(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType
    ) -> Any:
        frame = self._frames.nearest(caller)
        is_test = frame is not None and self._frames.is_test(frame)
        if function is _Tensor.to:
            args = [self._translate(value, frame, caller) for value in args]
            kwargs = {
                name: self._translate(value, frame, caller) if name == "device" else value
                for name, value in kwargs.items()
            }
        x = args[0]
        was_there = x.device == self._native
        moved = self._call(function, args, kwargs, caller)
        leaves = was_there and moved.device != self._native and not _is_of_torch(caller)
        if leaves and frame is not None and not is_test:
            self._watch.note_stray(moved, frame, "moves")
        return moved

    def _translate(self, value: Any, frame: FrameType | None, caller: FrameType) -> Any:
        """Return the device that an argument of ``to`` stands for."""
        native = torch.device(value) if isinstance(value, str) else value
        if not isinstance(native, torch.device):
            return value
        if native.type == "cuda":
            return self._gpu(native.index)
        if frame is None or native.type != "cpu":
            return native
        is_given = self._frames.is_given
        is_of_test = self._frames.is_test(frame) or is_given(frame, value)
        # ``module.to("cpu")`` makes an object of the name.
        is_of_test = is_of_test or (_is_of_torch(caller) and is_given(frame, native.type))
        return self._native if is_of_test else native

    def _read(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType
    ) -> Any:
        x = args[0]
        frame = self._frames.nearest(caller)
        is_test = frame is None or self._frames.is_test(frame)
        name = _name(function).strip("_")
        if x.device != self._native:
            stray = self._watch.find_stray(x)
            if stray is not None and stray.action == "moves" and not is_test:
                self._watch.report_line("read", stray.line, "reads", self._watch.device, name)
                return function(*args, **kwargs)
            return self._call(function, args, kwargs, caller)
        if not is_test and frame is not None:
            kind = "refusal" if function in _TO_NUMPY else "read"
            line = self._frames.line(frame)
            self._watch.report_line(kind, line, "reads", self._watch.device, name)
        # The framework converts no tensor of a GPU to NumPy, and the tests are to go on.
        source = x.cpu() if function in _TO_NUMPY else x
        return function(source, *args[1:], **kwargs)

    def _count(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType
    ) -> Any:
        """Call a function that CUDA refuses where its counts are not on the host."""
        first = _HOST_ARGUMENTS[function]
        counts = (*args[first:], *kwargs.values())
        ids = {id(x) for x in counts if isinstance(x, _Tensor) and not x.is_floating_point()}
        frame = self._frames.nearest(caller)
        if ids and frame is not None:
            is_refused = any(id(x) in ids and x.device == self._native for x in counts)
            if is_refused and not self._frames.is_test(frame):
                line, name = self._frames.line(frame), _name(function).strip("_")
                self._watch.report_line("refusal", line, "reads", self._watch.device, name)
            args, kwargs = _replace_tensors(lambda x: x.cpu() if id(x) in ids else x, args, kwargs)
        return self._call(function, args, kwargs, caller)

    # -- meet -------------------------------------------------------------------------------------

    def _call(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType
    ) -> Any:
        if self._watch.strays and (found := self._find_strays(args, kwargs)):
            return self._call_on_strays(function, args, kwargs, found, caller)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            return self._repair(error, function, args, kwargs, caller)

    def _find_strays(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, Stray]]:
        strays = self._watch.strays
        found = []
        for value in (*args, *kwargs.values()):
            if id(value) in strays:
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [each for each in value if id(each) in strays]
        known = ((x, self._watch.find_stray(x)) for x in found)
        return [(x, stray) for x, stray in known if stray is not None and x.device != self._native]

    def _call_on_strays(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        found: list[tuple[torch.Tensor, Stray]],
        caller: FrameType,
    ) -> Any:
        if _is_of_kernels(caller):  # in a backward pass, which keeps an index of the library
            return function(*args, **kwargs)
        frame = self._frames.nearest(caller)
        name = _name(function)
        is_test = frame is not None and self._frames.is_test(frame)
        if not is_test:
            self._take_given(frame)
        elif function not in _SIZES:
            self._take(x for x, stray in found if stray.is_suspect)
        if any(x.device == self._native for x, _ in found):
            return self._call(function, args, kwargs, caller)
        if is_test:
            self._watch.report_results((stray for _, stray in found), name)
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            return self._repair(error, function, args, kwargs, caller)
        if is_test:
            return result
        made = [*_tensors_in(result), *_tensors_in(args[: _is_in_place(function)])]
        is_back = any(x.device == self._native for x in made)
        if is_back and function not in _HOST_ARGUMENTS and not _is_of_torch(caller):
            for x, stray in found:
                if stray.operation:
                    device = self._from_native(x.device)
                    self._watch.report("move", stray, device, stray.operation, None)
        self._watch.pass_on(
            [stray for _, stray in found],
            (x for x in made if x.device != self._native),
            name.strip("_"),
            frame,
            computes=name not in _LOOKS,
        )
        return result

    def _repair(
        self,
        error: RuntimeError,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        caller: FrameType,
    ) -> Any:
        """Report the tensors of an operation that are elsewhere, and run it without them."""
        is_ours = isinstance(error, DeviceMismatchError)
        if not is_ours and self._mismatch(error, function, args, kwargs) is None:
            raise error
        operands = list(_tensors_in((args, kwargs)))
        elsewhere = [x for x in operands if x.device != self._native]
        # Numbers of the host seldom matter.
        elsewhere = [x for x in elsewhere if x.dim()] or elsewhere
        generator = kwargs.get("generator")
        if not generator and len(elsewhere) in (0, len(operands)):
            raise error
        frame = self._frames.nearest(caller)
        is_test = frame is None or self._frames.is_test(frame)
        name = _name(function).removeprefix("__").removesuffix("__")
        for x in elsewhere:
            stray, device = self._watch.find_stray(x), self._from_native(x.device)
            if not is_test:
                self._watch.report("mix", stray, device, name, frame)
            elif stray is not None and not stray.is_suspect:
                self._watch.report("result", stray, device, name, None)
        if generator:
            if not is_test and frame is not None:
                line, device = self._frames.line(frame), self._from_native(generator.device)
                self._watch.report_line("mix", line, "draws", device, name)
            return self._draw_elsewhere(function, args, kwargs)
        first = operands[0] if operands else None
        if _is_in_place(function) and any(x is first for x in elsewhere):
            self._move_in_place(first)  # type: ignore[arg-type]
        ids = {id(x) for x in elsewhere}
        args, kwargs = _replace_tensors(
            lambda x: x.to(self._native) if id(x) in ids else x, args, kwargs
        )
        return function(*args, **kwargs)

    def take_gradients(
        self, outputs: Iterable[Any], gradients: Iterable[Any], caller: FrameType
    ) -> tuple[Any, ...]:
        """Return the gradients that a backward pass begins with, on the devices of its outputs."""
        with torch._C.DisableTorchFunction():
            frame = self._frames.nearest(caller)
            return tuple(
                self._take_gradient(output, gradient, frame)
                for output, gradient in zip(outputs, gradients, strict=True)
            )

    def _take_gradient(self, output: Any, gradient: Any, frame: FrameType | None) -> Any:
        if not isinstance(output, _Tensor) or not isinstance(gradient, _Tensor):
            return gradient
        if output.device != self._native or gradient.device == self._native or not gradient.dim():
            return gradient  # PyTorch moves one without dimensions
        stray, device = self._watch.find_stray(gradient), self._from_native(gradient.device)
        if frame is not None and not self._frames.is_test(frame):
            self._watch.report("mix", stray, device, "backward", frame)
        elif stray is not None and not stray.is_suspect:
            self._watch.report("result", stray, device, "backward", None)
        return self._to_device(gradient)

    def _draw_elsewhere(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Draw random numbers where their generator is, and move them to the inputs' device."""
        if "device" in kwargs:
            has_gradient = kwargs.get("requires_grad", False)
            device = kwargs["generator"].device
            made = function(*args, **{**kwargs, "device": device, "requires_grad": False})
            return self._to_device(made).requires_grad_(has_gradient)
        named = {name: value for name, value in kwargs.items() if name != "generator"}
        return function(*args, **named)  # type: ignore[no-any-return]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _is_in_place(function: Any) -> bool:
    name = _name(function)
    is_operator = name.startswith("__i") and name.endswith("__")
    return is_operator or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _find_new_module(frame: FrameType) -> torch.nn.Module | None:
    """Return the module whose ``__init__`` a frame runs."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    return module if isinstance(module, torch.nn.Module) else None


def _is_of_kernels(caller: FrameType) -> bool:
    """Return whether the kernels of virtual GPUs call a function."""
    return str(caller.f_globals.get("__name__", "")).startswith("d2ldev_torch.virtual")


def _is_of_torch(caller: FrameType) -> bool:
    """Return whether the framework itself calls a function."""
    frame: FrameType | None = caller
    if caller.f_globals.get("__name__") == "torch.overrides" and caller.f_back is not None:
        frame = caller.f_back.f_back  # past a function in Python, which asks for the mode
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "torch"


def _replace_tensors(
    find: Callable[[torch.Tensor], torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    return tree_map_only(_Tensor, find, (list(args), dict(kwargs)))  # type: ignore[no-any-return]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, _Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


@contextmanager
def follow(
    mode: LeakMode, context: AbstractContextManager[None]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Follow what this thread does with tensors, in a context.

    Give what moves inputs that were made before.
    """
    with ExitStack() as entered:
        entered.enter_context(context)
        for register in (
            modules.register_module_parameter_registration_hook,
            modules.register_module_buffer_registration_hook,
        ):
            entered.callback(register(mode.register).remove)
        entered.callback(replace(_replacements(mode)))
        torch.Tensor.__init__ = _initialize(mode)  # type: ignore[method-assign]
        entered.callback(delattr, torch.Tensor, "__init__")
        if "torch._dynamo" in sys.modules:  # what was compiled before would not call the mode
            entered.enter_context(torch.compiler.set_stance("force_eager"))
        entered.enter_context(mode)
        yield mode.place


def _replacements(mode: LeakMode) -> list[tuple[Any, str, Any]]:
    """Return the functions that no mode sees, and their replacements."""

    def take_result(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def take(*args: Any, **kwargs: Any) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return mode.take(function(*args, **kwargs), sys._getframe(1))

        return take

    initialize = torch.nn.Module.__init__

    @functools.wraps(initialize)
    def begin(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            mode.begin(module, sys._getframe(1))
        initialize(module, *args, **kwargs)

    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(run)
    def run_backward(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = mode.take_gradients(outputs, gradients, sys._getframe(1))
        with mode:
            return run(outputs, gradients, *args, **kwargs)

    iterate = torch.utils.data.DataLoader.__iter__

    @functools.wraps(iterate)
    def iterate_here(loader: Any) -> Any:
        workers, seconds = loader.num_workers, loader.timeout
        loader.num_workers = loader.timeout = 0
        try:
            return iterate(loader)
        finally:
            loader.num_workers, loader.timeout = workers, seconds

    def leave_as_it_is(model: Any = None, **_options: Any) -> Any:
        return (lambda function: function) if model is None else model

    def leave_untraced(model: Any, *_args: Any, **_options: Any) -> Any:
        return model

    names = ("from_numpy", "frombuffer")
    return [
        *((torch, name, take_result(getattr(torch, name))) for name in names),
        (torch.nn.Module, "__init__", begin),
        # A tensor on a virtual GPU goes to no other process.
        (torch.utils.data.DataLoader, "__iter__", iterate_here),
        (torch, "compile", functools.wraps(torch.compile)(leave_as_it_is)),
        # The tracer crashes where a mode calls functions of its own.
        (torch.jit, "trace", functools.wraps(torch.jit.trace)(leave_untraced)),
        (torch.autograd, run.__name__, run_backward),
    ]


def _initialize(mode: LeakMode) -> Callable[..., None]:
    """Return what follows the making of a tensor by ``torch.Tensor(...)``."""

    def initialize(x: torch.Tensor, *_args: Any, **_options: Any) -> None:
        if type(x) is not torch.Tensor:
            return
        with torch._C.DisableTorchFunction():
            moved = mode.take(x, sys._getframe(1))
            if moved is not x:
                x.data = moved

    return initialize
