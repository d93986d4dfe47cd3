"""A notebook in the percent format: reading its cells, and running them in one namespace.

A cell starts with ``# %%`` and is code, or with ``# %% [markdown]`` and is text in comments.
A code cell may be marked: ``gpus=2`` needs so many GPUs, and ``raises=1`` has to raise. With
``X@d2l.gpu(1)`` it claims that ``X`` is on a device, and fails if it is elsewhere; both sides are
expressions without white space.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from d2ldev.active import backend
from d2ldev.cli.screen import in_words
from d2ldev.errors import DeviceMismatchError

_MARKER = re.compile(
    r"# %%(?P<markdown> \[markdown\])?(?P<marks>(?: (?:gpus|raises)=\d+)*)"
    r"(?P<claims>(?: [^\s@]+@[^\s@]+)*)\s*"
)


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook.

    Args:
        source: code; of a markdown cell the text, without the comment signs.
        markdown: whether it is text.
        gpus: how many GPUs it needs.
        raises: whether it has to raise.
        claims: what is on which device when it has run: two expressions each.
    """

    source: str
    markdown: bool = False
    gpus: int = 0
    raises: bool = False
    claims: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of running a cell.

    Args:
        output: what it printed, the repr of its last expression, and the error that it raised.
        failed: whether it raised although it should not, or did not although it should, or
            claimed what is not so.
    """

    output: str
    failed: bool = False


def read_cells(text: str) -> list[Cell]:
    r"""Return the cells of a notebook; the lines before the first one are for the editor.

    Raises:
        ValueError: for a marker that is misspelt.

    >>> [cell.source for cell in read_cells("# %% [markdown]\n# # Title\n\n# %% gpus=2\n1 + 1\n")]
    ['# Title', '1 + 1']
    """
    _, *pieces = re.split(r"^(?=# %%)", text, flags=re.MULTILINE)
    return [_read_cell(piece) for piece in pieces]


def _read_cell(piece: str) -> Cell:
    first, _, rest = piece.partition("\n")
    match = _MARKER.fullmatch(first)
    if match is None:
        raise ValueError(f"no marker of a cell, with gpus=2, raises=1, x@place or none: {first!r}")
    marks = {name: int(value) for name, value in (m.split("=") for m in match["marks"].split())}
    if match["markdown"]:
        lines = [line.removeprefix("#").removeprefix(" ") for line in rest.strip().split("\n")]
        return Cell("\n".join(lines), markdown=True)
    claims = [
        (what, where) for what, _, where in (m.partition("@") for m in match["claims"].split())
    ]
    return Cell(
        rest.strip(),
        gpus=marks.get("gpus", 0),
        raises=bool(marks.get("raises")),
        claims=tuple(claims),
    )


def run_cell(cell: Cell, namespace: dict[str, Any]) -> Outcome:
    """Run a code cell as a notebook does, and say what it printed and whether it failed."""
    printed = io.StringIO()
    error = None
    # Lines are long, because the caller wraps them to its own width.
    short_numbers = np.printoptions(precision=4, suppress=True, linewidth=160)
    with contextlib.redirect_stdout(printed), short_numbers:
        try:
            _execute(cell.source, namespace)
            for what, where in cell.claims:
                _check(what, where, namespace)
        except Exception as problem:
            error = in_words(problem)
    output = printed.getvalue() + (error or "")
    if cell.raises and error is None:
        return Outcome(f"{output}no error was raised, but one should have been", failed=True)
    return Outcome(output.rstrip("\n"), failed=error is not None and not cell.raises)


def _execute(source: str, namespace: dict[str, Any]) -> None:
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "<cell>", "exec"), namespace)  # noqa: S102 - it is our own chapter
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)  # noqa: S307
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _check(what: str, where: str, namespace: dict[str, Any]) -> None:
    """Raise a ``DeviceMismatchError`` if something is not on the device that the cell claims."""
    value, claimed = (eval(expression, namespace) for expression in (what, where))  # noqa: S307
    found = set(backend.placement(value).values())
    if found != {claimed}:
        raise DeviceMismatchError(
            f"show {what} as on {claimed}",
            f"it is on {', '.join(map(str, sorted(found))) or 'no device'}",
            f"compute it in a block of the device: with {where}:",
            [claimed, *sorted(found)],
        )
