"""Find tensors that a library creates on, or moves to, another device than its inputs'.

Two sets of frames tell who does it. Tests, and the block itself, create inputs, which belong on the
tried device. All other code is the library's. Frames of the framework, of Python's own modules and
of NumPy are of neither set: their caller counts.

A framework shows what its functions create, move and read to a ``Watch``, which keeps the lines.

Held by ``tests/backends/torch_backend/test_torch_leaks.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, Kinds

KINDS = {
    "mix": "meets a tensor of another device",
    "result": "comes back to the caller on another device than the inputs'",
    "move": "leaves the device of the inputs, is computed with elsewhere, and comes back",
    "refusal": "is read in a way that the framework refuses on that device",
    "read": "is read by the host",
}
"""The kinds of leaks. A ``'read'`` is slow on a GPU and right, so that it fails no test."""
FAILING = ("mix", "result", "move", "refusal")


class Line(NamedTuple):
    """A line of a library.

    Args:
        file: its path below the folder that Python imports it from, such as ``'ot/backend.py'``.
        number: the number of the line, from 1.
        function: the function around it, such as ``'ot.backend.TorchBackend.zeros'``.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class Leak(NamedTuple):
    """One tensor on another device than the inputs'.

    Args:
        kind: one of ``KINDS``.
        line: the line that created, moved or read it; None if it was made before the block.
        action: ``'creates'``, ``'moves'``, ``'draws'`` (random numbers) or ``'reads'``.
        device: where the tensor is; of a read, where it was.
        expected: the device of the inputs.
        operation: the operation that met the tensor.
        met_at: the line of that operation; None in a test.
        caller: the line that called the function of ``line``, if that function gave the tensor on.
            So does a module that has the functions of several frameworks.

    >>> line = Line('library.py', 12, 'library.f')
    >>> gpu = Device('gpu', 1)
    >>> print(Leak('mix', line, 'creates', Device('cpu'), gpu, 'add', None))
    library.py:12 creates on the CPU a tensor that meets one on gpu:1 in add
    """

    kind: str
    line: Line | None
    action: str
    device: Device | None
    expected: Device
    operation: str
    met_at: Line | None
    caller: Line | None = None

    def __str__(self) -> str:
        device = "an unknown device" if self.device is None else _in_words(self.device)
        at = f" at {self.met_at}" if self.met_at is not None and self.met_at != self.line else ""
        where = f"{self.operation}{at}"
        if self.kind == "read":
            return f"{self.line} reads a tensor of {self.expected} by {self.operation}"
        if self.kind == "refusal":
            return f"{self.line} reads a tensor of {self.expected} by {self.operation}, which fails"
        if self.line is None:
            made = f"a tensor of unknown origin on {device}"
            return f"{made} meets one on {self.expected} in {where}"
        if self.action == "draws":
            return f"{self.line} draws on {self.expected} by a generator on {device}, in {where}"
        called = "" if self.caller is None else f", called at {self.caller},"
        made = f"{self.line}{called} {self.action} "
        made += f"on {device} a tensor" if self.action == "creates" else f"to {device} a tensor"
        if self.kind == "mix":
            return f"{made} that meets one on {self.expected} in {where}"
        if self.kind == "result":
            return f"{made} that comes back, while the inputs are on {self.expected}"
        return f"{made} of {self.expected}, computes with it there in {where}, and takes it back"


def place_of(leak: Leak) -> Line | None:
    """Return the line to look at: the leak's own, or that of the operation if it is unknown."""
    return leak.line or leak.met_at


def _in_words(device: Device) -> str:
    return "the CPU" if device.kind == "cpu" else str(device)


# -- frames -----------------------------------------------------------------------------------

NEITHER, LIBRARY, TEST = range(3)
# Beside Python's own modules and the framework's: who is called by them is not who decides.
_NEITHER = frozenset(
    (
        *("d2ldev", "numpy", "scipy", "pandas", "sklearn", "matplotlib"),
        *("pytest", "_pytest", "pluggy", "hypothesis", "xdist", "importlib_metadata"),
    )
)


class Frames:
    """Tells the frames of tests from the frames of a library.

    Args:
        tests: files and folders of the tests.
        namespace: the global names of further test code, such as a notebook's.

    Attributes:
        toolboxes: objects of the tests from before all blocks that keep tensors of their own, by
            their identity. What they keep tells nothing of a call's inputs.
        strays: those of the blocks that have ended, such as a fixture's.
    """

    def __init__(
        self, tests: Iterable[str] = (), namespace: Mapping[str, Any] | None = None
    ) -> None:
        self._folders: set[str] = set()
        self._files: set[str] = set()
        self._namespace = namespace
        self.toolboxes: dict[int, object] = {}
        self.strays: list[Stray] = []
        self._neither = set(_NEITHER)
        self._kinds: dict[str, int] = {}
        self._names: dict[str, str] = {}
        # By the identity of the code, which is kept: its hash reads all of its instructions.
        self._lines: dict[tuple[int, int], tuple[Line, CodeType]] = {}
        for path in tests:
            self.add_tests(path)

    def add_modules(self, modules: Iterable[str]) -> None:
        """Count the frames of top-level modules as of neither set."""
        self._neither.update(modules)
        self._kinds.clear()

    def add_tests(self, path: str) -> None:
        """Count a file, or all files below a folder, as tests."""
        path = os.path.realpath(path)
        known = self._folders if os.path.isdir(path) else self._files
        if path not in known:
            known.add(path)
            self._kinds.clear()

    def kind(self, frame: FrameType) -> int:
        """Return ``NEITHER``, ``LIBRARY`` or ``TEST``."""
        name = frame.f_code.co_filename
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._find_kind(name, frame)
            if not name.startswith("<"):  # a name that several pieces of code share
                self._kinds[name] = kind
        return kind

    def is_test(self, frame: FrameType) -> bool:
        """Return whether a frame is of a test."""
        return self.kind(frame) == TEST

    def is_given(self, frame: FrameType, device: object) -> bool:
        """Return whether a test has given a device to the library that it called.

        It gives the framework's own object, or a name. A name is an argument of the call, or an
        option of an object. No function on the way has that name as a constant of its own.

        Args:
            frame: a frame of the library.
            device: the framework's own object, or a name; None if the library names no device.
        """
        if device is None or self.is_test(frame):
            return False
        entry = self.entry(frame)
        if isinstance(device, str):
            codes = [outer.f_code for outer in (frame, *self.library(frame))]
            return _has_option(entry, device) and not any(
                device in code.co_consts for code in codes
            )
        outer = entry.f_back
        while outer is not None and self.kind(outer) != TEST:
            outer = outer.f_back
        if outer is None:
            return False
        known = (*outer.f_locals.values(), *outer.f_globals.values())
        return any(value is device for value in known)

    def _find_kind(self, name: str, frame: FrameType) -> int:
        if frame.f_globals is self._namespace:
            return TEST
        path = os.path.realpath(name)
        if os.path.basename(path) == "conftest.py" or path in self._files:
            return TEST
        if any(path.startswith(folder + os.sep) for folder in self._folders):
            return TEST
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_made_up = name.startswith("<")  # by exec, as a dataclass is
        if is_made_up or top in sys.stdlib_module_names or top in self._neither:
            return NEITHER
        return NEITHER if top.startswith("d2ldev_") else LIBRARY

    def nearest(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of a test or a library, from a frame outwards."""
        kinds = self._kinds
        while frame is not None:
            kind = kinds.get(frame.f_code.co_filename)
            if (self.kind(frame) if kind is None else kind) != NEITHER:
                return frame
            frame = frame.f_back
        return None

    def library(self, frame: FrameType) -> Iterator[FrameType]:
        """Return the frames of the library from a frame outwards, up to the test that called it."""
        outer: FrameType | None = frame
        while outer is not None:
            kind = self.kind(outer)
            if kind == TEST:
                return
            if kind == LIBRARY:
                yield outer
            outer = outer.f_back

    def entry(self, frame: FrameType) -> FrameType:
        """Return the frame that the test called; the given one if none is of the library."""
        return [frame, *self.library(frame)][-1]

    def line(self, frame: FrameType) -> Line:
        """Return the line that a frame runs."""
        code, number = frame.f_code, frame.f_lineno
        known = self._lines.get((id(code), number))
        if known is None:
            module = frame.f_globals.get("__name__", "")
            function = f"{module}.{code.co_qualname.replace('<locals>.', '')}"
            known = Line(self._name(code), number, function), code
            self._lines[id(code), number] = known
        return known[0]

    def _name(self, code: CodeType) -> str:
        name = self._names.get(code.co_filename)
        if name is None:
            name = self._names[code.co_filename] = _below_path(code.co_filename)
        return name


def _below_path(name: str) -> str:
    """Return a file's path below the longest entry of ``sys.path`` that holds it."""
    path = os.path.realpath(name)
    roots = {os.path.realpath(entry or os.getcwd()) + os.sep for entry in sys.path}
    holding = [root for root in roots if path.startswith(root)]
    return path.removeprefix(max(holding, key=len)) if holding else path


# -- tensors ----------------------------------------------------------------------------------


class Stray(NamedTuple):
    """What is known of a tensor on another device than the inputs'.

    Args:
        tensor: a weak reference to it.
        line: the line that created or moved it.
        action: ``'creates'`` or ``'moves'``.
        caller: the line of the library that called the function of ``line``, if it is another's.
        operation: the first computation with it after it was moved; empty before that.
        met_at: the line of that computation.
        is_suspect: whether the test called the library without a tensor. Such a tensor is a leak
            where it meets an input, and an input where the test takes it.
    """

    tensor: ref[Any]
    line: Line
    action: str
    caller: Line | None = None
    operation: str = ""
    met_at: Line | None = None
    is_suspect: bool = False


_INPUT, _OWN, _ELSEWHERE, _KEPT = "input", "own", "elsewhere", "kept"
# Objects whose attributes are not what a call was given.
_CODE = (FunctionType, BuiltinFunctionType, ModuleType, property, staticmethod, classmethod)


class Watch:
    """What is known of the tensors of a block, and the leaks found so far.

    ``Strict.follow`` sets ``has_inputs`` at the first operation on a tensor of the device. Without
    it, the search says that nothing ran there. A line belongs to the innermost frame of a test or a
    library: ``frames.nearest(sys._getframe())``. That skips the frames of d2ldev, of the backend,
    and of the framework's modules, which ``requires`` of the backend names.

    Args:
        kinds: tells tensors of the framework from other objects.
        device_of: returns the device of a tensor.
        be_strict: returns a block ``strict()`` of the framework, for a search that needs its
            errors.
        device: the device of the inputs.
        frames: tells tests from libraries.
        report: takes each leak.
        as_cuda: whether virtual GPUs are to stand for CUDA devices in the block.

    Attributes:
        has_inputs: whether an operation had a tensor on the device; ``follow`` sets it.
        strays: what is known of tensors on other devices, by their identity.
    """

    # Objects that are looked at for the devices of a call's arguments.
    _MOST = 200

    def __init__(
        self,
        kinds: Kinds,
        device_of: Callable[[Any], Device],
        be_strict: Callable[[], AbstractContextManager[None]],
        device: Device,
        frames: Frames,
        report: Callable[[Leak], None],
        *,
        as_cuda: bool = False,
    ) -> None:
        self.be_strict = be_strict
        self.as_cuda = as_cuda
        self.device = device
        self.frames = frames
        self.has_inputs = False
        self.strays: dict[int, Stray] = {}
        self._kinds = kinds
        self._device_of = device_of
        self._report = report
        self._moved: tuple[Any, ...] = ()
        self._mixed: set[Line | None] = set()
        # A loop reads one tensor after another: the leak is the same.
        self._of_lines: dict[tuple[Any, ...], Leak] = {}
        for stray in frames.strays:
            if (x := stray.tensor()) is not None:
                self.inherit(x, stray)

    def end(self) -> None:
        """Keep the strays for the next block."""
        self.frames.strays = list(self.strays.values())

    def note_toolboxes(self, values: Iterable[Any]) -> None:
        """Remember the objects among the values of a test that keep tensors of their own."""
        for value in values:
            if isinstance(value, (type, *_CODE)) or self._kinds[type(value)] in (TENSOR, OBJECT):
                continue
            for each in list(getattr(value, "__dict__", {}).values()):
                inside = each if isinstance(each, (list, tuple)) else (each,)
                if any(self._kinds[type(x)] is TENSOR for x in inside):
                    self.frames.toolboxes[id(value)] = value

    def is_input(self, frame: FrameType) -> bool:
        """Return whether a tensor that a line of a library creates is an input of the test.

        It is if the test has called a function without tensors, such as one that converts arrays.
        """
        return self._owner(frame) in (_INPUT, _KEPT)

    def is_kept(self, frame: FrameType) -> bool:
        """Return whether a tensor that a line of a library creates stays in an object of it.

        It does if the test has called a constructor without tensors, or a method of such an object.
        The test can place some objects: their class has a method ``to``, or their constructor takes
        ``device``. Their tensors are inputs.
        """
        return self._owner(frame) == _KEPT

    def is_own(self, frame: FrameType) -> bool:
        """Return whether a tensor that a line of a library creates belongs to the library.

        It does if the test has called a function with a tensor on the inputs' device. The tensor
        may be in an object.
        """
        return self._owner(frame) == _OWN

    def _owner(self, frame: FrameType) -> str:
        entry = self.frames.entry(frame)
        if self._moved and self._moved == _call_of(entry):
            return _OWN
        is_elsewhere = is_kept = False
        for x, is_attribute, _ in self._tensors_of(entry):
            if self._is_there(x):
                return _OWN
            # An object may keep tensors of any device, such as one of each type.
            is_elsewhere = is_elsewhere or not is_attribute
            is_kept = is_kept or self.is_suspect(x)
        if is_elsewhere:
            return _ELSEWHERE
        return _KEPT if is_kept or _constructs_in_place(entry) else _INPUT

    def find_given(self, frame: FrameType) -> list[Any]:
        """Return the suspects that the test has given to the function that it called.

        They are arguments, or in an object that the test can place: its class has a method ``to``.
        A call without inputs on the device leaves them beside the suspects that its object keeps.
        """
        given: list[Any] = []
        stays = is_there = False
        for x, _, is_given in self._tensors_of(self.frames.entry(frame)):
            if self.is_suspect(x):
                given += [x] * is_given
                stays = stays or not is_given
            else:
                is_there = is_there or self._is_there(x)
        return [] if stays and not is_there else given

    def _is_there(self, x: Any) -> bool:
        """Return whether a tensor is on the inputs' device."""
        with suppress(UnsupportedValueError):  # it is on several, or traced
            return self._device_of(x) is self.device
        return False

    def _tensors_of(self, frame: FrameType) -> Iterator[tuple[Any, bool, bool]]:
        """Yield the tensors of a call's arguments.

        With each comes whether it is of an object's attribute, and whether the test can place it. A
        variable that the function closes over counts as an argument.
        """
        code = frame.f_code
        known = frame.f_locals
        names = (*_arguments_of(code), *code.co_freevars)
        waiting = [(known[name], False, True) for name in names if name in known]
        seen: set[int] = set()
        for value, is_attribute, is_given in waiting:  # which grows meanwhile
            if id(value) in seen:
                continue
            if len(seen) == self._MOST:
                return
            seen.add(id(value))
            kind = self._kinds[type(value)]
            if kind is TENSOR:
                yield value, is_attribute, is_given
                continue
            inside: Iterable[Any] = ()
            if isinstance(value, (list, tuple, set, frozenset)):
                inside = value
            elif isinstance(value, dict):
                inside = value.values()
            elif id(value) in self.frames.toolboxes or kind is PLAIN:
                continue
            elif not isinstance(value, (type, *_CODE)):
                inside, is_attribute = getattr(value, "__dict__", {}).values(), True
                # Models move their own tensors alone, and have moved them.
                is_given = is_given and kind is not OBJECT and hasattr(type(value), "to")
            waiting += [(each, is_attribute, is_given) for each in islice(inside, self._MOST)]

    def note_stray(
        self, x: Any, frame: FrameType, action: str, *, is_suspect: bool = False
    ) -> None:
        """Remember the line that created a tensor on, or moved it to, another device."""
        line = self.frames.line(frame)
        # A comprehension has a frame of its own, which belongs to the function around it.
        outer = (each for each in self.frames.library(frame) if each.f_code.co_name[0] != "<")
        code = next((each.f_code for each in outer), None)
        caller = next((self.frames.line(each) for each in outer if each.f_code is not code), None)
        self.inherit(x, Stray(ref(x), line, action, caller, is_suspect=is_suspect))
        if action == "moves":
            self._moved = _call_of(self.frames.entry(frame))

    def inherit(self, x: Any, stray: Stray) -> None:
        """Remember that a tensor was computed from a stray one."""
        key = id(x)
        strays = self.strays

        def forget(dead: ref[Any]) -> None:
            if key in strays and strays[key].tensor is dead:
                del strays[key]

        strays[key] = stray._replace(tensor=ref(x, forget))

    def is_suspect(self, x: Any) -> bool:
        """Return whether a tensor is a suspect."""
        stray = self.find_stray(x)
        return stray is not None and stray.is_suspect

    def is_left(self, x: Any) -> bool:
        """Return whether a call with an input has left a tensor on another device."""
        stray = self.find_stray(x)
        return stray is not None and not stray.is_suspect

    def find_stray(self, x: Any) -> Stray | None:
        """Return what is known of a tensor."""
        found = self.strays.get(id(x))
        return found if found is not None and found.tensor() is x else None

    def report(
        self,
        kind: str,
        stray: Stray | None,
        device: Device | None,
        operation: str,
        frame: FrameType | None,
    ) -> None:
        """Report a tensor on another device.

        The line of a mix is not reported for a result as well.

        Args:
            kind: ``'mix'``, ``'result'`` or ``'move'``.
            stray: what is known of the tensor.
            device: where the tensor is.
            operation: the operation that met it.
            frame: the innermost frame of a test or a library.
        """
        line, action = (None, "creates") if stray is None else (stray.line, stray.action)
        met_at = None if stray is None else stray.met_at
        if frame is not None and self.frames.kind(frame) == LIBRARY:
            met_at = self.frames.line(frame)
        caller = None
        if stray is not None and (met_at is None or met_at.function != stray.line.function):
            caller = stray.caller
        if kind == "mix":
            self._mixed.add(line)
        elif kind == "result" and line in self._mixed:
            return  # the results of its tensor are elsewhere, too
        self._report(Leak(kind, line, action, device, self.device, operation, met_at, caller))

    def report_results(self, strays: Iterable[Stray], operation: str) -> None:
        """Report tensors of the library that the test computes with, each of them once."""
        for stray in strays:
            x = stray.tensor()
            if x is not None and not stray.is_suspect:
                self.report("result", stray, self._device_of(x), operation, None)
                self.strays.pop(id(x), None)

    def report_operands(
        self, elsewhere: Iterable[Any], operation: str, frame: FrameType | None
    ) -> None:
        """Report the tensors that the framework refuses as operands beside the inputs.

        Suspects that the test has given to the library are inputs.
        """
        if frame is None or self.frames.is_test(frame):
            return
        given = {id(x) for x in self.find_given(frame)} if self.strays else set()
        for x in elsewhere:
            if id(x) not in given:
                self.report("mix", self.find_stray(x), self._device_of(x), operation, frame)

    def pass_on(
        self,
        strays: Sequence[Stray],
        made: Iterable[Any],
        operation: str,
        frame: FrameType | None,
        *,
        computes: bool,
    ) -> None:
        """Remember what an operation has made elsewhere from tensors of the library.

        Args:
            strays: what is known of these tensors.
            made: what was made.
            operation: the operation.
            frame: the innermost frame of a test or a library.
            computes: whether the operation computes. Otherwise it looks at a tensor, or copies it.
        """
        stray = next((stray for stray in strays if stray.operation), strays[0])
        if computes and stray.action == "moves" and not stray.operation:
            line = None if frame is None else self.frames.line(frame)
            stray = stray._replace(operation=operation, met_at=line)
        for x in made:
            self.inherit(x, stray)

    def note_read(self, x: Any, operation: str, frame: FrameType | None) -> None:
        """Report that the host reads a tensor, or that the test takes one of the library."""
        stray = self.find_stray(x)
        if frame is None:
            return
        if self.frames.is_test(frame):
            self.report_results([] if stray is None else [stray], operation)
            return
        line: Line | None = None
        if stray is not None and stray.action == "moves":
            line = stray.line
        elif self._is_there(x):
            line = self.frames.line(frame)
        if line is not None:
            self.report_line("read", line, "reads", self.device, operation)

    def report_line(
        self, kind: str, line: Line, action: str, device: Device | None, operation: str
    ) -> None:
        """Report what a line does with a tensor of the inputs' device: it reads it, or draws it."""
        key = kind, line, action, device, operation
        leak = self._of_lines.get(key)
        if leak is None:
            leak = Leak(kind, line, action, device, self.device, operation, line)
            self._of_lines[key] = leak
        self._report(leak)


def _arguments_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's arguments."""
    number = code.co_argcount + code.co_kwonlyargcount
    number += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    return code.co_varnames[:number]


def _has_option(entry: FrameType, name: str) -> bool:
    """Return whether a call has a name among its arguments, or among their attributes."""
    known = entry.f_locals
    values = [known[each] for each in _arguments_of(entry.f_code) if each in known]
    for value in tuple(values):
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        values += [] if isinstance(value, (type, *_CODE)) else inside.values()
    return any(isinstance(value, str) and value == name for value in values)


def _constructs_in_place(entry: FrameType) -> bool:
    """Return whether a call makes an object that its caller cannot place on a device."""
    code = entry.f_code
    names = _arguments_of(code)
    if code.co_name != "__init__" or not names or "device" in names:
        return False
    return not hasattr(type(entry.f_locals.get(names[0])), "to")


def _call_of(frame: FrameType) -> tuple[Any, ...]:
    """Return what tells one call of a function from others, without keeping its frame."""
    caller = frame.f_back
    return (id(frame), id(caller), frame.f_code, caller.f_lasti if caller is not None else -1)
