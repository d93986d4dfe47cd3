"""Strict: torch refuses operands on different devices; d2ldev replaces its error.

On virtual GPUs most operators raise d2ldev's error themselves (``virtual``). On hardware torch
raises a ``RuntimeError``. A block puts a ``TorchFunctionMode`` before each function of torch. The
mode calls the function, and inspects the operands only after an error. It does not read torch's
text. The error is a mismatch if operands that need one device are on several.

- torch keeps a stack of modes for each thread. The mode is on the stack of each thread that has
  entered a block and not left it. In a task outside of the block, the mode is a no-op.
- A backward pass runs the user's hooks and functions past all modes, and on torch's own threads.
  It gets a mode of its own there. An optimizer sorts its tensors past all modes, too.
- Some refusals stay torch's own, because no mode sees them. One example is a user's function that
  leaves a gradient on another device. Others are the errors of ``torch.compile`` and TorchScript.

Sources: https://docs.pytorch.org/docs/stable/torch.overrides.html, and
https://github.com/pytorch/pytorch/blob/main/torch/utils/_device.py for the mode of
``torch.set_default_device``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from d2ldev import D2LDevError, Device, DeviceMismatchError, gpu
from d2ldev.framework import (
    Framework,
    Operand,
    Strict,
    locate_tensors,
    mismatch,
    operands_of,
    replace,
)
from d2ldev_torch.devices import MOVE

if TYPE_CHECKING:
    from d2ldev.framework import Watch

# The second argument is copied from any device.
_COPIES = ("copy_", "_foreach_copy_", "data")
# The second argument holds indices, which may be on the host.
_INDEXED = ("__getitem__", "__setitem__", "index_put", "index_put_")
# From this argument on, integers may be on the host: lengths of sequences, and split points.
_COUNTS = {
    **dict.fromkeys(("_pack_padded_sequence", "_pad_packed_sequence"), 1),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", "tensor_split"), 1),
    "ctc_loss": 2,
}
# Their operands are inspected where the backward pass begins.
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class TorchStrict(Strict):
    """torch's own refusal, raised as d2ldev's error at the operation.

    Args:
        framework: the framework of the tensors and devices.
        as_cuda: lets virtual GPUs stand for CUDA devices in a block; on hardware nothing has to.
    """

    def __init__(
        self,
        framework: Framework,
        as_cuda: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._framework = framework
        self._as_cuda = as_cuda
        self._blocks = _Blocks(_Mode(self, lambda: framework.state.strictness.in_force()))

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        # Private, but all backward passes and all steps on lists begin here, and no mode sees them.
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        group = torch.optim.Optimizer._group_tensors_by_device_and_dtype
        # The engine passes its modes on to its threads, which are outside of all blocks.
        mode = _Mode(self, lambda: True)
        run_backward = self._explain(run, in_force, mode, self._mismatch_of_gradients)
        in_a_step = self._explain(group, in_force, nullcontext(), self._mismatch_in_a_step)
        return replace(
            [
                (torch.autograd, run.__name__, run_backward),
                (torch.optim.Optimizer, group.__name__, staticmethod(in_a_step)),
            ]
        )

    def _explain(
        self,
        function: Callable[..., Any],
        in_force: Callable[[], bool],
        context: AbstractContextManager[Any],
        find: Callable[..., DeviceMismatchError | None],
    ) -> Callable[..., Any]:
        """Return a function that runs in a context, and replaces a mismatch error by d2ldev's."""

        @functools.wraps(function)
        def explain(*args: Any, **kwargs: Any) -> Any:
            if not in_force():
                return function(*args, **kwargs)
            try:
                with context:
                    return function(*args, **kwargs)
            except RuntimeError as error:
                found = find(*args) if self._may_be_about_devices(error) else None
                if found is None:
                    raise
                raise found from error

        return explain

    def scope(self, *, everywhere: bool) -> AbstractContextManager[Any]:
        if everywhere:
            self._enter_in_new_threads()
        return _Block(self._blocks)

    def follow(self, watch: Watch) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        from d2ldev_torch.leaks import LeakMode, follow  # only a search for leaks needs it

        devices = self._framework.devices
        native = devices.native(watch.device)
        current = native.index if watch.as_cuda else 0
        mode = LeakMode(
            watch,
            self.mismatch,
            native,
            devices.from_native,
            lambda i: devices.native(gpu(current if i is None else i)),
        )
        return follow(mode, self._stand_for_cuda(native) if watch.as_cuda else nullcontext())

    @contextmanager
    def _stand_for_cuda(self, native: torch.device) -> Iterator[None]:
        """Let virtual GPUs stand for CUDA devices, with this one as the current one."""
        with self._as_cuda(), torch.cuda.device(native.index):
            yield

    def _enter_in_new_threads(self) -> None:
        begin = threading.Thread.start

        def start(thread: Any) -> None:
            run = thread.run

            def run_strictly() -> None:
                del thread.run
                _Block(self._blocks).__enter__()  # it ends with the thread
                run()

            thread.run = run_strictly
            begin(thread)

        replace([(threading.Thread, "start", start)])

    # -- the cause of an error --------------------------------------------------------------------

    def mismatch(
        self, error: RuntimeError, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> DeviceMismatchError | None:
        """Return d2ldev's error for an error that a function of torch has raised.

        Return None if the devices of the operands are not the cause.
        """
        if function in _BACKWARD or not self._may_be_about_devices(error):
            return None
        name = _name_of(function)
        free = {id(x) for x in _free(name, args)}
        found = [
            one for one in locate_tensors(self._framework, args, kwargs) if id(one[1]) not in free
        ]
        operands = [(each, device) for each, _, device in found]
        stray = self._stray_generator(name, operands, kwargs)
        if stray is not None or not _differ(operands):
            return stray
        # Most functions accept a 0-dim tensor on the host as a number. To check this one, it is
        # called on one device. If the call succeeds, only the devices were wrong.
        others = [(each, device) for each, x, device in found if not _is_number(x)]
        if _differ(others) or _succeeds_on_one_device(function, args, kwargs):
            return mismatch(name.removeprefix("__").removesuffix("__"), operands, move=MOVE)
        return None

    def _may_be_about_devices(self, error: RuntimeError) -> bool:
        of_accelerators = getattr(torch, "AcceleratorError", D2LDevError)
        others = D2LDevError, NotImplementedError, RecursionError, of_accelerators
        return not isinstance(error, others) and not self._framework.devices.is_out_of_memory(error)

    def _stray_generator(
        self, name: str, operands: Sequence[Operand], kwargs: Mapping[str, Any]
    ) -> DeviceMismatchError | None:
        """Return the error of an operation whose generator is on another kind of device."""
        generator, native = kwargs.get("generator"), kwargs.get("device")
        if generator is None:
            return None
        from_native = self._framework.devices.from_native
        if native is None and operands:
            place: Device | None = operands[0][1]
        else:
            place = from_native(torch.device(native or torch.get_default_device()))
        other = from_native(generator.device)
        # torch compares only the kinds of device.
        if place is None or other is None or place.kind == other.kind:
            return None
        return generator_mismatch(name, place, other)

    def _mismatch_of_gradients(
        self, outputs: Iterable[Any], gradients: Iterable[Any], *_others: Any
    ) -> DeviceMismatchError | None:
        """Return the error of a backward pass that begins with a gradient on another device."""
        for output, gradient in zip(outputs, gradients, strict=False):
            operands = operands_of(self._framework, (), {"output": output, "gradient": gradient})
            if _differ(operands) and gradient.dim():  # a 0-dim gradient is copied
                return mismatch("backward", operands, move=MOVE)
        return None

    def _mismatch_in_a_step(
        self, lists: Iterable[Sequence[Any]], *_others: Any
    ) -> DeviceMismatchError | None:
        """Return the error of an optimizer whose state or gradients are on another device."""
        # The lists hold parameters, gradients, and each kind of state. Some kinds are empty.
        for together in zip(*filter(None, lists), strict=False):
            operands = operands_of(self._framework, [x for x in together if not _is_number(x)])
            if _differ(operands):
                return mismatch("step", operands, move=MOVE)
        return None


def generator_mismatch(operation: str, place: Device, other: Device) -> DeviceMismatchError:
    """Return the error of an operation that draws on one device by another's generator."""
    return DeviceMismatchError(
        f"run {operation}",
        f"its numbers are drawn on {place}, by a generator on {other}",
        f"generator = torch.Generator(backend.native('{place}')); read a DataLoader outside "
        f"of the block, or by backend.prefetch(loader, '{place}')",
        [place, other],
    )


def _name_of(function: Any) -> str:
    """Return the name of a function of torch: ``add``, ``__setitem__``, ``grad`` for its setter."""
    if getattr(function, "__name__", "") == "__set__":
        function = function.__self__
    return str(getattr(function, "__name__", function))


def _differ(operands: Iterable[Operand]) -> bool:
    return len({device for _, device in operands}) > 1


def _is_number(x: torch.Tensor) -> bool:
    """Return whether a tensor is a 0-dim tensor on the host."""
    return x.is_cpu and x.dim() == 0


def _free(name: str, args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a function that may be on another device than the others."""
    if len(args) < 2:
        return []
    second = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    tensors = [x for x in second if isinstance(x, torch.Tensor)]
    if name in _COPIES:
        return tensors
    if name in _INDEXED:
        found = [x for x in tensors if x.is_cpu]
        # If no tensor is an index, the assigned value is copied.
        is_copy = name == "__setitem__" and not any(x.dim() for x in tensors)
        return [*found, args[2]] if is_copy else found
    if name in _COUNTS:
        others = [x for x in args[_COUNTS[name] :] if isinstance(x, torch.Tensor)]
        return [x for x in others if not x.is_floating_point()]
    return []


def _succeeds_on_one_device(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call succeeds on ``meta``, the device where nothing is computed."""

    def on_meta(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, device="meta", requires_grad=x.requires_grad)

    try:
        args, kwargs = tree_map_only(torch.Tensor, on_meta, (tuple(args), dict(kwargs)))
        function(*args, **kwargs)
    except Exception:
        return False
    return True


# -- modes ----------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Raises d2ldev's error in place of torch's.

    Args:
        strict: finds the cause of an error.
        in_force: tells whether a block is in force for the operation.
    """

    def __init__(self, strict: TorchStrict, in_force: Callable[[], bool]) -> None:
        super().__init__()
        self._strict = strict
        self._in_force = in_force

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only the code up to here makes each operation in a block slower.
        try:
            return function(*args, **kwargs) if kwargs else function(*args)
        except RuntimeError as error:
            found = None
            if self._in_force():
                found = self._strict.mismatch(error, function, args, kwargs or {})
            if found is None:
                raise
            raise found from error


class _Blocks(threading.local):
    """The open blocks of a thread, for which a mode is on its stack.

    Args:
        mode: the mode, the same in all threads.
    """

    def __init__(self, mode: _Mode) -> None:
        self.mode = mode
        self.open: set[_Block] = set()

    def settle(self) -> None:
        """Put the mode on the stack of this thread if a block is open; otherwise remove it.

        Other modes keep their order.
        """
        stack = [
            torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
        ]
        is_there = any(mode is self.mode for mode in stack)
        if is_there and not self.open:
            _arrange([mode for mode in stack if mode is not self.mode])
        elif self.open and not is_there:
            # Below the other modes: each of them removes the top mode when it ends. Only the mode
            # of ``torch.set_default_device`` has to be the lowest.
            default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            first = 1 if stack and stack[0] is default else 0
            _arrange([*stack[:first], self.mode, *stack[first:]])


def _arrange(modes: list[Any]) -> None:
    """Make modes the stack of this thread, the lowest first."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


class _Block(AbstractContextManager[None]):
    """A block that keeps the mode on the stack of the thread that entered it.

    If another thread leaves the block, the mode stays until the next block begins or ends.
    """

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        self._open = blocks.open

    def __enter__(self) -> None:
        self._open = self._blocks.open
        self._open.add(self)
        self._blocks.settle()

    def __exit__(self, *error: object) -> None:
        self._open.discard(self)
        self._blocks.settle()
