"""What torch says of operands on different devices, read for ``strict()``.

torch refuses them by itself, in many words: kernels, iterators and layers each have a sentence of
their own. A sentence is one about mixed devices if it says that devices should agree, and names
two that do not. The operation is the one that it names, else the expression that failed.

Sources: ``c10/core`` and ``aten/src/ATen`` of https://github.com/pytorch/pytorch, in which there
is one sentence for all generated kernels
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/core/adaption.cpp) and one for all
element-wise ones
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/TensorIterator.cpp).
"""

from __future__ import annotations

import ast
import linecache
import re
from itertools import islice
from types import TracebackType

from d2ldev.device import CPU, Device, gpu
from d2ldev.errors import DeviceMismatchError
from d2ldev.operations.strictness import Operand, mismatch

_SHOULD_AGREE = re.compile(
    r"same (?:type of )?device|different device|expected device|device type|should be the same|"
    r"expected (?:it|them) to be on GPU",
    re.IGNORECASE,
)
_DEVICE = r"['\"]?(cpu|cuda|hip|xpu|mps|vgpu)\b(?::(\d+))?['\"]?"
_IS_ON = r"(?:\.device)? (?:tensor )?(?:device type|(?:is )?on|at|=|:)"
# An operand and its device: ``mat2 is on cpu``, ``got mask on cpu``, ``x.device = cuda:0``.
_NAMED = re.compile(
    rf"(?:'(\w+)'|\b([a-z_]\w*)){_IS_ON} {_DEVICE}|\b([a-z_]\w*)\.device: {_DEVICE}",
    re.IGNORECASE,
)
_ANY = re.compile(rf"(?<![\w.]){_DEVICE}(?!\w|\.\w)", re.IGNORECASE)
# An operand and its type, which tells the kind of device: ``Input type (torch.cuda.FloatTensor)``
_TYPED = re.compile(
    r"(\w+) type \((?:torch\.)?(?:(cuda|hip|xpu|mps|vgpu)\.?|cpu)?[A-Z]\w*\)", re.IGNORECASE
)
_ARGUMENT = re.compile(r"checking argument for argument (\w+) in method")
_METHOD = re.compile(r"in method (?:wrapper_)?(?:[A-Z]\w*?_)?_*(\w+?)\)|arguments for (\w+)\)")
_PREFIX = re.compile(r"^_*(?:torch\.)?([\w.]+)(?:\(\))?: ")
# Words that stand before a device and name no operand.
_NO_NAMES = frozenset(
    (
        *("a", "and", "are", "but", "device", "devices", "either", "expected", "found", "got"),
        *("gradient", "is", "one", "received", "storage", "tensor", "tensors", "with"),
    )
)
_INDEXED = re.compile(rf"on the same device as the indexed tensor \({_DEVICE}\)")
# It goes on with the kind of a device and not its index, or with its index and not the kind.
_ASSIGNED = "attempting to assign a gradient"
# That devices differ, and not which.
_UNNAMED = re.compile(
    r"all tensors to have the same device|must be on the same device as the|" + _ASSIGNED
)
_GRADIENT = re.compile(
    rf"(?:Function (\w+) returned an )?invalid gradient at index (\d+) - expected device {_DEVICE} "
    rf"but got {_DEVICE}"
)
# A hook that returns a gradient of another type: of another kind of device, or only of a dtype.
_HOOK = re.compile(r"has changed the type of value \(was (.+) got (.+)\)")
_KIND = re.compile(r"cuda|hip|xpu|mps|vgpu", re.IGNORECASE)
_GENERATOR = re.compile(rf"Expected a {_DEVICE} device type for generator but found {_DEVICE}")


def mismatch_in(error: BaseException) -> DeviceMismatchError | None:
    """What an error of torch says about mixed devices; None if it is about something else."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    unnamed = _UNNAMED.search(text) or _changed_by_hook(text)
    if unnamed is None and not _SHOULD_AGREE.search(text):
        return None
    operation = _operation_in(text) or _failed(error.__traceback__)
    gradient = _GRADIENT.search(text)
    if gradient is not None:
        return _of_gradient(operation, gradient)
    indexed, generator = _INDEXED.search(text), _GENERATOR.search(text)
    if indexed is not None:
        return _of_indices(operation, _device(indexed[1], indexed[2]))
    if generator is not None:
        place, other = _device(*generator.group(1, 2)), _device(*generator.group(3, 4))
        return generator_mismatch(operation, place, other, generator[0])
    operands = [] if _ASSIGNED in text else _operands_in(text)
    if len({device for _, device in operands}) < 2:
        return None if unnamed is None else _of_unnamed(operation, text)
    # What is on the CPU is to be moved, rather than what is on a GPU.
    return mismatch(operation, sorted(operands, key=lambda operand: operand[1] is CPU))


def _changed_by_hook(text: str) -> re.Match[str] | None:
    found = _HOOK.search(text)
    if found is None or bool(_KIND.search(found[1])) == bool(_KIND.search(found[2])):
        return None
    return found


def _of_gradient(operation: str, found: re.Match[str]) -> DeviceMismatchError:
    function, index, *devices = found.groups()
    place, other = _device(*devices[:2]), _device(*devices[2:])
    returned = (
        f"that {function} returned for its input {index}" if function else f"at index {index}"
    )
    return DeviceMismatchError(
        f"run {operation}",
        f"the gradient {returned} is on {other}, and what it is the gradient of is on {place}",
        f"gradient = backend.to(gradient, '{place}')",
        [place, other],
    )


def _of_indices(operation: str, place: Device) -> DeviceMismatchError:
    return DeviceMismatchError(
        f"run {operation}",
        f"the indexed tensor is on {place}, and its indices are on another device",
        f"indices = backend.to(indices, '{place}')",
        [place],
    )


def _of_unnamed(operation: str, text: str) -> DeviceMismatchError:
    return DeviceMismatchError(
        f"run {operation}",
        f"its operands are on different devices, and torch does not say on which: {text}",
        "x = backend.to(x, device) for each of them; backend.device_of(x) tells where one is",
    )


def generator_mismatch(
    operation: str, place: Device, other: Device, words: str
) -> DeviceMismatchError:
    """The error of an operation whose generator is on another device.

    Args:
        operation: its name.
        place: where its numbers are drawn.
        other: where the generator is.
        words: torch's own.
    """
    return DeviceMismatchError(
        f"run {operation}",
        f"its numbers are drawn on {place}, by a generator on {other}: {words}",
        f"generator = torch.Generator(backend.native('{place}'))",
        [place, other],
    )


def _operands_in(text: str) -> list[Operand]:
    typed = [(name.lower(), _device(kind or "cpu", None)) for name, kind in _TYPED.findall(text)]
    if typed:
        return typed
    named = [
        (name, _device(kind, index))
        for name, kind, index in map(_named, _NAMED.finditer(text))
        if name.lower() not in _NO_NAMES
    ]
    if "to be on GPU" in text:
        named.append(("operand_0", gpu()))
    if len({device for _, device in named}) > 1:
        return named
    found = list(dict.fromkeys(_device(kind, index) for kind, index in _ANY.findall(text)))
    names = {device: name for name, device in named}
    argument = _ARGUMENT.search(text)
    if argument is not None and len(found) > 1:
        names[found[1]] = argument[1]  # torch names the first operand that is elsewhere
    operands = [(names.get(device, f"operand_{i}"), device) for i, device in enumerate(found)]
    # What is to be moved comes last: a name that is known, to where the others are.
    return sorted(operands, key=lambda operand: operand[1] in names)


def _named(found: re.Match[str]) -> tuple[str, str, str]:
    """The name, the kind of device and the index, of whichever of the two forms it has."""
    quoted, plain, kind, index, dotted, its_kind, its_index = found.groups()
    return quoted or plain or dotted, kind or its_kind, index or its_index


def _device(kind: str, index: str | None = None) -> Device:
    """The device by one of torch's names; without an index it is the first one."""
    return CPU if kind.lower() == "cpu" else gpu(int(index or 0))


def _operation_in(text: str) -> str | None:
    found = _METHOD.search(text) or _PREFIX.search(text)
    return None if found is None else next(name for name in found.groups() if name)


def _failed(traceback: TracebackType | None) -> str:
    """The expression that failed, as the innermost frame of a traceback that is the user's has it.

    A backward pass fails in torch's own frames, or d2ldev's; where there are no others, in those.
    """
    if traceback is None:
        return "an operation"
    frames = [traceback]
    while frames[-1].tb_next is not None:
        frames.append(frames[-1].tb_next)
    traceback = next((one for one in reversed(frames) if not _is_inside(one)), frames[-1])
    code = traceback.tb_frame.f_code
    where = next(islice(code.co_positions(), traceback.tb_lasti // 2, None))
    line, last, start, end = where
    if None in where or line != last:
        number = traceback.tb_lineno
        return linecache.getline(code.co_filename, number).strip() or "an operation"
    source = linecache.getline(code.co_filename, line or 0).encode()[start:end].decode().strip()
    try:
        expression = ast.parse(source, mode="eval").body
    except SyntaxError:
        return source or "an operation"
    if isinstance(expression, ast.BinOp):
        return _OPERATORS.get(type(expression.op), source)
    return source or "an operation"


def _is_inside(traceback: TracebackType) -> bool:
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("torch", "d2ldev", "d2ldev_torch")


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
