"""The line of the user's program that is running, for errors: its call, and its expressions.

Python notes for each instruction where its text stands (``co_positions``). So an error can name an
operand as the program does. Where the text is unknown, as in ``python -c``, nothing is named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Set
from contextlib import suppress

# Not from ``typing``, and ``ast`` not at the top: see ``d2ldev.errors``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from types import FrameType
    from typing import Any

_FOLDER = os.path.join(os.path.dirname(__file__), "")


class Operation:
    """The operation of a program that is running: an operator, or a call.

    Args:
        node: its syntax.
        text: the source of ``node``.
        frame: the frame that runs it.
    """

    def __init__(self, node: ast.AST, text: str, frame: FrameType) -> None:
        self.node, self._text, self._frame = node, text, frame

    def text_of(self, node: ast.AST) -> str:
        """Return the text of an expression in it, in one line."""
        import ast

        return " ".join((ast.get_source_segment(self._text, node) or "").split())

    def operands(self) -> Iterator[ast.AST]:
        """Yield the expressions of its operands, those in a list, a tuple or a dict included.

        The first one of a call is the function; of a method, it is the object.
        """
        import ast

        match self.node:
            case ast.BinOp(left=left, right=right) | ast.Subscript(value=left, slice=right):
                parts = [left, right]
            case ast.AugAssign(target=left, value=right) if self.can_assign(left):
                parts = [left, right]
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.Call(func=function, args=args, keywords=keywords):
                if isinstance(function, ast.Attribute) and self._is_method(function):
                    function = function.value
                parts = [function, *args, *(keyword.value for keyword in keywords)]
            case _:
                parts = []
        yield from _open_displays(parts)

    def _is_method(self, node: ast.Attribute) -> bool:
        """Return whether an attribute is a method of its owner, and not an object in it."""
        with suppress(Exception):  # whatever a property of the user's raises
            return self.evaluate(node).__self__ is self.evaluate(node.value)
        return False

    def can_assign(self, node: ast.AST) -> bool:
        """Return whether an expression is a name that a line before this one can assign to.

        A function that assigns to a name of an outer one cannot read that any more.
        """
        import ast

        if not isinstance(node, ast.Name):
            return False
        frame = self._frame
        return node.id in frame.f_locals and node.id not in frame.f_code.co_freevars

    def evaluate(self, node: ast.AST) -> Any:
        """Return the value of a literal, a name, an attribute, or an item of them.

        It runs the properties of the user's objects, so call it for an error alone.

        Raises:
            LookupError, ValueError: for an expression that may have another value now.
            Exception: whatever a property raises.
        """
        import ast

        match node:
            case ast.Name(id=name):
                return self._find(name)
            case ast.Attribute(value=owner, attr=name):
                return getattr(self.evaluate(owner), name)
            case ast.Subscript(value=owner, slice=index):
                container = self.evaluate(owner)
                if type(container) in (list, tuple, dict):
                    return container[self.evaluate(index)]
                raise LookupError(ast.dump(node))
        return ast.literal_eval(node)

    def _find(self, name: str) -> Any:
        frame = self._frame
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if name in names:
                return names[name]
        raise LookupError(name)

    def spell(self, value: object) -> str:
        """Return the operand that is this object, as the program spells it; empty without one."""
        for node in self.operands():
            with suppress(Exception):  # whatever a property of the user's raises
                if self.evaluate(node) is value:
                    return self.text_of(node)
        return ""


def _open_displays(parts: list[Any]) -> Iterator[ast.AST]:
    import ast

    for part in parts:
        match part:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Dict(values=items):
                yield from _open_displays(items)
            case ast.Starred(value=value):
                yield value
            case _:
                yield part


def find_operation(packages: Set[str] = frozenset()) -> Operation | None:
    """Return the operation of the user's program that is running; None if its text is unknown.

    Args:
        packages: the packages whose frames are passed over, beside d2ldev and Python's own.
    """
    frame = next(_frames(packages), None)
    return None if frame is None else _find_operation(frame)


def spell(value: object) -> str:
    """Return an operand of a call that is running as the program spells it; empty without one."""
    operations = map(_find_operation, _frames(frozenset()))
    texts = (operation.spell(value) for operation in operations if operation is not None)
    return next(filter(None, texts), "")


def _frames(packages: Set[str]) -> Iterator[FrameType]:
    """Yield the frames of the program, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # By the file: the examples of a docstring run in the module's own namespace.
        is_ours = frame.f_code.co_filename.startswith(_FOLDER)
        # A backend is named ``d2ldev_NAME``. The suite is a program.
        is_ours |= package.startswith("d2ldev_") and package != "d2ldev_conformance"
        if not is_ours and package not in packages | sys.stdlib_module_names:
            yield frame
        frame = frame.f_back


def _find_operation(frame: FrameType) -> Operation | None:
    import ast

    text = _read(frame)
    for source, take in ((f"({text})", _expression_of), (text, _statement_of)):
        with suppress(SyntaxError):
            if text:
                return Operation(take(ast.parse(source)), source, frame)
    return None


def _expression_of(tree: ast.Module) -> ast.AST:
    value: ast.AST = tree.body[0].value  # type: ignore[attr-defined]
    return value


def _statement_of(tree: ast.Module) -> ast.AST:
    return tree.body[0]


def _read(frame: FrameType) -> str:
    """Return the text of the operation that a frame runs."""
    import linecache
    from itertools import islice

    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, begin, end = next(positions, (None,) * 4)
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if len(lines) != last - first + 1:
        return ""
    coded = [line.encode() for line in lines]
    coded[-1] = coded[-1][:end]
    coded[0] = coded[0][begin:]
    return b"".join(coded).decode(errors="replace")
