"""Run a program with a mistake, mend it by the line after ``fix:`` of its error, and run it again.

The line says what to do in one of four ways, which read like Python:

- ``loss='mse'`` is an argument by name of the call that failed;
- ``y = y.reshape(-1, 1)`` is a statement before it;
- ``trainer.fit(net, data)`` replaces the arguments by position of the call of this name;
- ``f(x) in the place of x`` replaces text.

Other words follow a comma or a semicolon.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import re
import traceback
from collections.abc import Mapping
from itertools import count
from typing import Any

from d2ldev import D2LDevError

_numbers = count()


def run(program: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Run the text of a program, whose lines its errors can quote; return its names.

    Args:
        program: the text.
        names: the names that it begins with. A module that it lacks is imported.
    """
    file = f"<program {next(_numbers)}>"
    linecache.cache[file] = len(program), None, program.splitlines(keepends=True), file
    namespace = {"__name__": "program", **names}
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name not in namespace and importlib.util.find_spec(name):
                namespace[name] = importlib.import_module(name)
    exec(compile(program, file, "exec"), namespace)  # noqa: S102
    return namespace


def run_and_mend(program: str, names: Mapping[str, Any]) -> tuple[D2LDevError, str]:
    """Run a program that fails; return its error, and the program with the line that fixes it.

    Raises:
        AssertionError: if it does not fail by an error of d2ldev.
    """
    try:
        run(program, names)
    except D2LDevError as error:
        frames = traceback.extract_tb(error.__traceback__)
        number = [each.lineno for each in frames if each.filename.startswith("<program ")][-1]
        assert number is not None
        return error, mend(program, number, error.fix)
    raise AssertionError(f"no error: {program}")


def mend(program: str, number: int, fix: str) -> str:
    """Return a program with a fix applied to the statement at a line.

    Raises:
        AssertionError: if the fix is not one of the four kinds.
    """
    tree = ast.parse(program)
    body, at = _find(tree, number)
    statement = body[at]
    # The longest part that is Python: what comes after it is for the reader.
    ends = [*(m.start() for m in re.finditer(r"[,;:] ", fix)), len(fix)]
    for end in sorted(ends, reverse=True):
        part = fix[:end].removesuffix(" in the place of it")
        if " in the place of " in part:
            new, _, old = part.partition(" in the place of ")
            text = ast.unparse(statement)
            place = re.search(rf"(?<![\w.]){re.escape(old)}(?!\w)", text)
            assert place is not None, f"{old!r} is not in {text!r}"
            changed = text[: place.start()] + new + text[place.end() :]
            body[at : at + 1] = ast.parse(changed).body
        elif re.match(r"\w+=\S", part) and (keyword := _parse(f"f({part})")):
            _set(statement, keyword[0].value.keywords[0])
        elif (lines := _parse(part)) and all(isinstance(x, ast.Assign) for x in lines):
            body[at:at] = lines
        elif lines and isinstance(lines[0], ast.Expr) and isinstance(lines[0].value, ast.Call):
            _replace(statement, lines[0].value)
        else:
            continue
        return ast.unparse(ast.fix_missing_locations(tree))
    raise AssertionError(f"not a line of a program: {fix}")


def _parse(text: str) -> list[Any]:
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def _find(tree: ast.AST, number: int) -> tuple[list[Any], int]:
    """Return the list of statements with the innermost one at a line, and its place there."""
    found: tuple[list[Any], int] | None = None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for i, statement in enumerate(body if isinstance(body, list) else []):
            if statement.lineno <= number <= (statement.end_lineno or number):
                found = body, i  # type: ignore[assignment]
    assert found is not None
    return found


def _calls(statement: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def _set(statement: ast.AST, keyword: ast.keyword) -> None:
    """Set an argument by name: of the call that has it already, or of the outermost one."""
    calls = _calls(statement)
    having = [call for call in calls if any(x.arg == keyword.arg for x in call.keywords)]
    call = (having or calls)[0]
    call.keywords = [*(x for x in call.keywords if x.arg != keyword.arg), keyword]


def _replace(statement: ast.AST, call: ast.Call) -> None:
    """Give the call of the same name the arguments by position of another one."""
    name = ast.unparse(call.func).rpartition(".")[2]
    same = [x for x in _calls(statement) if ast.unparse(x.func).rpartition(".")[2] == name]
    assert same, f"no call of {name}"
    given = {x.arg for x in call.keywords}
    same[0].args = call.args
    same[0].keywords = [*(x for x in same[0].keywords if x.arg not in given), *call.keywords]
