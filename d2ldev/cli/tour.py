"""``d2ldev tour``: the chapter "GPUs", run on the active backend, or written as a notebook.

The chapter is in the percent format: ``# %%`` starts a cell of code, ``# %% [markdown]`` a cell of
text. Tags follow it. A cell with ``gpus=2`` needs two GPUs, and a cell with
``raises-exception`` has to raise an error. ``X@d2l.gpu(1)`` asserts that ``X`` is on that device;
both sides are expressions without white space.
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

CHAPTER = Path(__file__).with_name("chapter.py")
Cell = dict[str, Any]  # as a notebook has it, in nbformat 4


def run(*, virtual_gpus: int | None, notebook: Path | None = None) -> int:
    """Run the chapter's cells, or write them, and return the exit status: 1 if a cell failed.

    Args:
        virtual_gpus: as for ``d2ldev.virtual_gpus``; None uses the environment's number. Without
            either, a machine without GPUs gets two virtual ones.
        notebook: the folder for the notebook; None runs the cells.
    """
    console, cells = screen.make_console(), read_cells(CHAPTER.read_text("utf-8"))
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
            try:
                write_notebook(notebook, cells, virtual_gpus)
            except OSError as error:
                screen.complain(f"cannot write a notebook into {notebook}: {error.strerror}")
                return 1
            return 0
        return walk(cells, backend, console, notes)


def _choose_virtual_gpus() -> int | None:
    """Return the number of virtual GPUs that the tour needs; None with real GPUs."""
    name = discovery.canonical_name(selection.choice().name)
    if name not in discovery.find_backends() or selection.is_loaded(name):
        return None
    can_make_them = loading.framework_class(name).max_virtual_gpus >= 2
    return 2 if can_make_them and not loading.count_real_gpus(name) else None


def read_cells(text: str) -> list[Cell]:
    """Return the cells of a text, without the lines above the first cell."""
    _, *pieces = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    return [_make_cell(*each) for each in zip(pieces[1::2], pieces[::2], strict=True)]


def _make_cell(source: str, marks: str = "") -> Cell:
    r"""Return a cell.

    >>> _make_cell("# # Title\n", " [markdown]")
    {'cell_type': 'markdown', 'metadata': {}, 'source': '# Title'}
    """
    if marks.strip() == "[markdown]":
        text = re.sub("^# ?", "", source.strip(), flags=re.MULTILINE)
        return {"cell_type": "markdown", "metadata": {}, "source": text}
    code: Cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    return {**code, "metadata": {"tags": marks.split()}, "source": source.strip()}


def write_notebook(folder: Path, cells: list[Cell], virtual_gpus: int | None) -> None:
    """Write ``tour.ipynb``, which makes the given number of virtual GPUs, if any."""
    if virtual_gpus is not None:
        make_them = _make_cell(f"import d2ldev\n\nd2ldev.virtual_gpus({virtual_gpus})")
        cells = [*cells[:1], make_them, *cells[1:]]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    version = {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}}
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps({**version, "cells": cells}, indent=1)
    (folder / "tour.ipynb").write_text(f"{document}\n", "utf-8")


def walk(cells: list[Cell], backend: Backend, console: Console, notes: list[str]) -> int:
    """Show every cell with its output, then the notes, and return the exit status."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    counts: Counter[str] = Counter()
    has = f"{backend.name} has {backend.num_gpus()} here"
    for cell in cells:
        console.print()
        if cell["cell_type"] == "markdown":
            console.print(Markdown(cell["source"]))
            continue
        console.print(Text(indent(cell["source"], "    "), style="cyan"))
        gpus = max(int(tag[5:]) for tag in ("gpus=0", *cell["metadata"]["tags"]) if "gpus=" in tag)
        if gpus > backend.num_gpus():
            counts["left out"] += 1
            console.print(f"needs {gpus} GPUs: {has}", style="yellow")
        else:
            counts["ran" if run_cell(cell, namespace, backend) else "failed"] += 1
    console.print()
    for note in notes:
        screen.show_note(console, note)
    console.print(f"{counts['ran']} cells ran on {backend.name}.", style="green")
    if counts["left out"]:
        words = (
            f"{counts['left out']} cells were left out, which need more GPUs: {has}. Virtual GPUs:"
        )
        console.print(f"{words}\nd2ldev tour --virtual-gpus 2", style="yellow")
    if counts["failed"]:
        console.print(f"{counts['failed']} cells failed.", style="bold red")
    return min(counts["failed"], 1)


def run_cell(cell: Cell, namespace: dict[str, Any], backend: Backend) -> bool:
    """Run a cell of code, print its output, and return whether its tags hold."""
    tags = cell["metadata"]["tags"]
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
