"""``d2ldev tour``: the chapter "GPUs" on the active backend, code beside what it prints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from d2ldev import settings
from d2ldev.active import active_backend
from d2ldev.backend_class import Backend
from d2ldev.cli.cells import Cell, Outcome, read_cells, run_cell
from d2ldev.cli.screen import (
    collect_warnings,
    complain,
    exit_status,
    make_console,
    message_of,
    show_note,
)
from d2ldev.registry import discovery, loading, selection

CHAPTER = Path(__file__).with_name("chapter.py")
# With less, neither code nor output has room beside the other.
_BESIDE = 80
# Text in longer lines is hard to read.
_WIDEST = 120
# The chapter's longest line of code.
CODE_WIDTH = 48


def run(*, virtual_gpus: int | None) -> int:
    """Show the chapter and run its cells; return 1 if one of them failed.

    Args:
        virtual_gpus: as for ``d2ldev.virtual_gpus``; None leaves it to the environment; if that
            does not say, a machine without GPUs gets two virtual ones.
    """
    console = make_console()
    console.width = min(console.width, _WIDEST)
    with collect_warnings() as notes:
        try:
            if virtual_gpus is None and settings.virtual_gpus() is None:
                virtual_gpus = _stand_ins()
            if virtual_gpus is not None:
                selection.virtual_gpus(virtual_gpus)
            backend = active_backend()
        except Exception as error:  # a third party's ``__init__`` may raise anything
            complain(message_of(error))
            return exit_status(error)
        return Tour(console, backend, notes).walk(read_cells(CHAPTER.read_text("utf-8")))


def _stand_ins() -> int | None:
    """Return the number of virtual GPUs that the tour needs; None where there are real ones."""
    name = discovery.canonical_name(selection.choice().name)
    if name not in discovery.find_backends() or selection.is_loaded(name):
        return None
    can_make_them = loading.framework_class(name).max_virtual_gpus >= 2
    return 2 if can_make_them and not loading.count_real_gpus(name) else None


class Tour:
    """One walk through a notebook.

    Args:
        console: where it is shown.
        backend: the active one.
        notes: where d2ldev's warnings arrive while cells run.
    """

    def __init__(self, console: Console, backend: Backend, notes: list[str]) -> None:
        self._console = console
        self._backend = backend
        self._notes = notes
        self._noted = 0
        self._gpus = backend.num_gpus()
        self._counts: Counter[str] = Counter()

    def walk(self, cells: list[Cell]) -> int:
        """Show every cell, and return the exit status."""
        namespace: dict[str, Any] = {"__name__": "__main__"}
        self._show_notes()
        for cell in cells:
            if cell.markdown:
                self._console.print(Padding(Markdown(cell.source), (1, 0, 0, 0)))
            elif cell.gpus > self._gpus:
                self._counts["left out"] += 1
                words = f"needs {cell.gpus} GPUs: {self._has()}"
                self._show(cell, Text(words, style="yellow"))
            else:
                outcome = run_cell(cell, namespace)
                self._counts["failed" if outcome.failed else "ran"] += 1
                self._show(cell, _output(cell, outcome))
            self._show_notes()
        self._show_end()
        return 1 if self._counts["failed"] else 0

    def _has(self) -> str:
        return f"{self._backend.name} has {self._gpus} here"

    def _show(self, cell: Cell, output: Text) -> None:
        code = Syntax(
            # The two blank lines around functions are for files, not for a narrow column.
            cell.source.replace("\n\n\n", "\n\n"),
            "python",
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
        )
        framed = _beside if self._console.width >= _BESIDE else _below
        self._console.print(Padding(framed(code, output), (1, 0, 0, 0)))

    def _show_notes(self) -> None:
        for note in self._notes[self._noted :]:
            show_note(self._console, note)
        self._noted = len(self._notes)

    def _show_end(self) -> None:
        self._console.print()
        self._console.print(Rule(style="dim"))
        ran, failed, left_out = (self._counts[key] for key in ("ran", "failed", "left out"))
        self._console.print(f"{_cells(ran)} ran on {self._backend.name}.", style="green")
        if left_out:
            can_make_them = self._backend.max_virtual_gpus >= 2
            variable = "" if can_make_them else f"{settings.BACKEND}={discovery.FALLBACK} "
            self._console.print(
                f"{_cells(left_out)} left out, for want of GPUs: {self._has()}. With two "
                f"virtual ones they run:\n{variable}d2ldev tour --virtual-gpus 2",
                style="yellow",
            )
        if failed:
            self._console.print(f"{_cells(failed)} failed.", style="bold red")


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _output(cell: Cell, outcome: Outcome) -> Text:
    if outcome.failed:
        return Text(f"FAILED {outcome.output}", style="bold red")
    return Text(outcome.output, style="red" if cell.raises else "")


def _beside(code: Syntax, output: Text) -> Table:
    table = Table(
        box=box.MINIMAL, show_header=False, show_edge=False, expand=True, border_style="dim"
    )
    table.add_column(width=CODE_WIDTH)
    table.add_column(ratio=1, overflow="fold")
    table.add_row(code, output)
    return table


def _below(code: Syntax, output: Text) -> Table:
    table = Table(
        box=box.ROUNDED, show_header=False, show_lines=True, expand=True, border_style="dim"
    )
    table.add_column(overflow="fold")
    table.add_row(code)
    if output.plain:
        table.add_row(output)
    return table
