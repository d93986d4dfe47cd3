"""``d2ldev tour``: the tutorials, run on the active backend, or written as notebooks.

A tutorial is a MyST notebook, which Jupytext and MyST-NB read, too: text, and code in blocks of
``{code-cell}``. ``+++`` separates two cells of text. The line ``:tags:`` of a cell is a list in
JSON. A cell with ``gpus=2`` needs two GPUs, and a cell with ``raises-exception`` has to raise an
error. ``X@d2l.gpu(1)`` asserts that ``X`` is on that device; both sides are expressions without
white space.

A notebook is a short JSON document. To write one needs no package, so ``--notebook`` needs no
extra beside ``cli``. A test compares the cells with those that Jupytext reads.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from d2ldev import settings
from d2ldev._backend import Backend
from d2ldev.active import active_backend
from d2ldev.cli import screen
from d2ldev.registry import discovery, loading, selection

TUTORIALS = tuple(
    Path(__file__).parent / "tutorials" / f"{name}.md"
    for name in ("gpus", "several-gpus-from-scratch", "several-gpus-concise")
)
Cell = dict[str, Any]  # as a notebook has it, in nbformat 4

_FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_CODE = re.compile(
    r"^```\{code-cell\}[^\n]*\n((?::\w+:[^\n]*\n)*)(.*?)^```$", re.MULTILINE | re.DOTALL
)
_BREAK = re.compile(r"^\+\+\+.*$", re.MULTILINE)

_CHOICE = """\
# This notebook runs on "torch", "jax", "tensorflow" and "mxnet". Choose one here.
# To change it later, restart the kernel, and run all cells.
import d2ldev

{virtual}d2ldev.set_backend("{name}")"""
# Before the backend: a framework in use cannot get other GPUs.
_VIRTUAL = """\
d2ldev.virtual_gpus({number})  # remove this line on a machine with GPUs
"""


def run(*, virtual_gpus: int | None, notebook: Path | None = None) -> int:
    """Run the cells of the tutorials, or write them; return the exit status: 1 if a cell failed.

    Args:
        virtual_gpus: as for ``d2ldev.virtual_gpus``; None uses the environment's number. Without
            either, a machine without GPUs gets two virtual ones.
        notebook: the folder for the notebooks; None runs the cells.
    """
    console = screen.make_console()
    tutorials = {path.stem: read_cells(path.read_text("utf-8")) for path in TUTORIALS}
    with screen.collect_warnings() as notes:
        try:
            if virtual_gpus is None and settings.virtual_gpus() is None:
                virtual_gpus = _choose_virtual_gpus()
            if virtual_gpus is not None:
                selection.virtual_gpus(virtual_gpus)
            backend = active_backend()
        except Exception as error:  # a third party's ``__init__`` may raise anything
            screen.complain(screen.message_of(error))
            return screen.exit_status(error)
        if notebook is not None:
            number = settings.virtual_gpus() if virtual_gpus is None else virtual_gpus
            try:
                write_notebooks(notebook, tutorials, backend.name, number)
            except FileExistsError as error:
                problem = f"{Path(error.filename).name} is there already; fix: name another folder"
                screen.complain(f"cannot write notebooks into {notebook}: {problem}")
                return 1
            except OSError as error:
                screen.complain(f"cannot write notebooks into {notebook}: {error.strerror}")
                return 1
            return 0
        return walk([*tutorials.values()], backend, console, notes)


def _choose_virtual_gpus() -> int | None:
    """Return the number of virtual GPUs that the tour needs; None with real GPUs."""
    name = discovery.canonical_name(selection.choice().name)
    if name not in discovery.find_backends() or selection.is_loaded(name):
        return None
    can_make_them = loading.framework_class(name).max_virtual_gpus >= 2
    return 2 if can_make_them and not loading.count_real_gpus(name) else None


def read_cells(text: str) -> list[Cell]:
    """Return the cells of a MyST notebook."""
    cells = []
    # The pattern's groups stand between the texts: a text, options, code, a text, ...
    pieces = _CODE.split(_FRONT_MATTER.sub("", text))
    for words, options, code in zip(
        pieces[::3], [*pieces[1::3], ""], [*pieces[2::3], ""], strict=True
    ):
        cells += [_make_text(part) for part in _BREAK.split(words) if part.strip()]
        if code:
            found = re.search("^:tags: (.*)$", options, re.MULTILINE)
            cells.append(_make_code(code, json.loads(found[1]) if found else []))
    return cells


def _make_text(source: str) -> Cell:
    r"""Return a cell of text.

    >>> _make_text("# Title\n")
    {'cell_type': 'markdown', 'metadata': {}, 'source': '# Title'}
    """
    return {"cell_type": "markdown", "metadata": {}, "source": source.strip()}


def _make_code(source: str, tags: list[str]) -> Cell:
    metadata = {"tags": tags} if tags else {}
    code: Cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    return {**code, "metadata": metadata, "source": source.strip()}


def tags_of(cell: Cell) -> list[str]:
    """Return the tags of a cell."""
    tags: list[str] = cell["metadata"].get("tags", [])
    return tags


def make_notebook(cells: list[Cell]) -> dict[str, Any]:
    """Return a notebook of these cells, in nbformat 4.5."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    named = [{**cell, "id": f"cell-{i}"} for i, cell in enumerate(cells)]
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": named}


def write_notebooks(
    folder: Path, tutorials: dict[str, list[Cell]], name: str, virtual_gpus: int | None
) -> None:
    """Write a notebook of each tutorial, whose first cell chooses a backend and virtual GPUs.

    Args:
        folder: is created if it is missing.
        tutorials: names and cells.
        name: of the backend.
        virtual_gpus: their number, if the notebook makes them.

    Raises:
        OSError: if a file cannot be written, or has the name of a notebook. Then no file is new.
    """
    virtual = _VIRTUAL.format(number=virtual_gpus) if virtual_gpus else ""
    choice = _CHOICE.format(virtual=virtual, name=name)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for stem, cells in tutorials.items():
            document = json.dumps(make_notebook([_make_code(choice, []), *cells]), indent=1)
            path = folder / f"{stem}.ipynb"
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(f"{document}\n")
    except OSError:
        for path in written:
            path.unlink()
        raise


def walk(tutorials: list[list[Cell]], backend: Backend, console: Console, notes: list[str]) -> int:
    """Show every cell with its output, then the notes, and return the exit status."""
    counts: Counter[str] = Counter()
    for cells in tutorials:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for cell in cells:
            console.print()
            if cell["cell_type"] == "markdown":
                console.print(Markdown(cell["source"]))
            else:
                counts[show_code(cell, namespace, backend, console)] += 1
    console.print()
    for note in notes:
        screen.show_note(console, note)
    console.print(f"{counts['ran']} cells ran on {backend.name}.", style="green")
    if counts["left out"]:
        words = (
            f"{counts['left out']} cells were left out, which need more GPUs: "
            f"{backend.name} has {backend.num_gpus()} here. Virtual GPUs:"
        )
        console.print(f"{words}\nd2ldev tour --virtual-gpus 2", style="yellow")
    if counts["failed"]:
        console.print(f"{counts['failed']} cells failed.", style="bold red")
    return min(counts["failed"], 1)


def show_code(cell: Cell, namespace: dict[str, Any], backend: Backend, console: Console) -> str:
    """Show a cell of code and its output; return ``'ran'``, ``'failed'`` or ``'left out'``."""
    console.print(Text(indent(cell["source"], "    "), style="cyan"))
    gpus = max(int(tag[5:]) for tag in ("gpus=0", *tags_of(cell)) if "gpus=" in tag)
    if gpus > backend.num_gpus():
        has = f"{backend.name} has {backend.num_gpus()} here"
        console.print(f"needs {gpus} GPUs: {has}", style="yellow")
        return "left out"
    return "ran" if run_cell(cell, namespace, backend) else "failed"


def run_cell(cell: Cell, namespace: dict[str, Any], backend: Backend) -> bool:
    """Run a cell of code, print its output, and return whether its tags hold."""
    tags = tags_of(cell)
    has_to_raise = "raises-exception" in tags
    failure = "no error was raised, but one should have been" if has_to_raise else ""
    try:
        with np.printoptions(precision=4, suppress=True):
            *statements, last = ast.parse(cell["source"]).body
            exec(compile(ast.Module(statements, []), "<cell>", "exec"), namespace)  # noqa: S102
            # Show the value of the last line, as a notebook does.
            exec(compile(ast.Interactive([last]), "<cell>", "single"), namespace)  # noqa: S102
        for what, where in (tag.split("@") for tag in tags if "@" in tag):
            device = eval(where, namespace)  # noqa: S307
            found = {*backend.placement(eval(what, namespace)).values()}  # noqa: S307
            if found != {device}:
                places = ", ".join(map(str, found)) or "no device"
                failure = f"{what} should be on {device}, and is on {places}"
    except Exception as error:
        failure = "" if has_to_raise else screen.in_words(error)
        sys.stdout.write(f"{screen.in_words(error)}\n" if has_to_raise else "")
    sys.stdout.write(f"FAILED {failure}\n" if failure else "")
    return not failure
