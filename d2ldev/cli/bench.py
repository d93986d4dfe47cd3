"""``d2ldev bench``: the exercises of D2L's section 6.7.5, measured on every device of a backend.

The document of ``--json``, and of ``results.json``, has these keys:

- ``date``, ``versions`` (``d2ldev``, ``python``, ``platform``, ``numpy``), and ``machine``:
  ``system``, ``processor``, ``cores``, ``cards``, ``load`` (how many processes were ready
  to compute in the last minute, or null) and ``warning`` (of a machine that others use, or empty).
- ``backends``: a list of ``name``, ``versions`` (distribution -> version), ``threads`` (with how
  many the framework computes on the CPU, or null), ``notes`` (the warnings of d2ldev), ``error``
  (why it could not be used, or null) and ``results``.
- A result has the fields of ``d2ldev.bench.results.Result``, with those of ``Row`` and ``Figures``
  in it, and ``best`` (device -> its highest rate: of products, the measured peak).
- ``comparisons``: exercise -> a sentence that compares the backends, where there are several that
  multiplied in the same precision; empty with ``--small``.

The exit status is 0 if all is well, 1 if something failed, 2 if something is misspelt, and 130
after Ctrl-C.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from d2ldev import settings
from d2ldev.active import active_backend, get_backend
from d2ldev.bench import page
from d2ldev.bench.conclusions import OF_SMALL, of_backends
from d2ldev.bench.exercises import EXERCISES, Exercise
from d2ldev.bench.machine import machine
from d2ldev.bench.results import Result, by_exercise, result_from
from d2ldev.cli.examination import find_version, versions
from d2ldev.cli.screen import (
    collect_warnings,
    complain,
    environment,
    exit_status,
    in_words,
    make_console,
    message_of,
    only_for_the_result,
    show_note,
)
from d2ldev.errors import CheckpointError, D2LDevError
from d2ldev.registry import discovery, loading, selection

_INTERRUPTED = 130


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; see the options of ``main.bench``.

    Without ``backends`` it is about the active one.
    """

    exercises: tuple[str, ...]
    backends: tuple[str, ...] = ()
    virtual_gpus: int | None = None
    size: int | None = None
    is_small: bool = False
    matmul_precision: str | None = None
    out: Path | None = None
    as_json: bool = False

    def size_of(self, exercise: Exercise) -> int:
        """Return the size of an exercise."""
        if self.size is not None:
            return self.size
        return exercise.small if self.is_small else exercise.default

    def precision(self) -> str:
        """Return what products are computed in: on all frameworks the same, float32 by default.

        Raises:
            UnsupportedValueError: if ``D2LDEV_MATMUL_PRECISION`` is invalid.
        """
        return self.matmul_precision or settings.matmul_precision() or "highest"

    def command(self, backend: str) -> list[str]:
        """Return the command that measures one backend in a process of its own."""
        argv = [sys.executable, "-P", "-m", "d2ldev", "bench", "--backend", backend, "--json"]
        argv += self.exercises if len(self.exercises) == 1 else ("--all",)
        argv += ["--matmul-precision", self.precision()]
        for option, value in (("--virtual-gpus", self.virtual_gpus), ("--size", self.size)):
            argv += [] if value is None else [option, str(value)]
        return [*argv, "--small"] if self.is_small else argv


def run(request: Request) -> int:
    """Measure, show and write the results, and return the exit status."""
    try:
        for name in request.backends:
            if discovery.canonical_name(name) not in discovery.find_backends():
                raise loading.name_refusal(name, " (from --backend)")
        if request.out is not None:
            page.require_matplotlib()
            with _report_write_errors(request.out):
                request.out.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=request.out).close()
        if request.as_json:
            with only_for_the_result():
                document, status = _measure(request)
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
        else:
            document, status = _measure(request)
            show(make_console(), document)
        if request.out is not None:
            with _report_write_errors(request.out):
                page.write(request.out, document, results_of(document))
    except D2LDevError as error:
        complain(str(error))
        return exit_status(error)
    except KeyboardInterrupt:
        complain("cannot go on measuring: interrupted, and nothing was written")
        return _INTERRUPTED
    return status


@contextmanager
def _report_write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"write the results into {folder}",
            error.strerror or in_words(error),
            "--out DIR, a folder that can be written",
        ) from error


def _measure(request: Request) -> tuple[dict[str, Any], int]:
    """Return the document and the exit status."""
    on = machine()  # its load is that of others, before anything is measured here
    if len(request.backends) > 1:
        found = [_measure_elsewhere(request, name) for name in request.backends]
    else:
        found = [_measure_here(request)]
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "machine": on,
        "backends": [backend for backend, _ in found],
    }
    document["comparisons"] = {
        exercise: said
        for exercise, results in by_exercise(results_of(document)).items()
        if not request.is_small and (said := of_backends(results))
    }
    return document, max(status for _, status in found)


def _measure_here(request: Request) -> tuple[dict[str, Any], int]:
    """Return what one backend's part of the document is, and the exit status."""
    made = _nothing_of("")
    with collect_warnings() as notes:
        made["notes"] = notes
        try:
            if request.virtual_gpus is not None:
                selection.virtual_gpus(request.virtual_gpus)
            backend = get_backend(request.backends[0]) if request.backends else active_backend()
        except Exception as error:  # a third party's ``__init__`` may raise anything
            made["name"] = request.backends[0] if request.backends else "-"
            made["error"] = message_of(error)
            return made, exit_status(error)
        made["name"] = backend.name
        made["versions"] = {name: find_version(name) for name in backend.distributions}
        made["threads"] = backend.framework.devices.threads()
        progress = Console(stderr=True)
        for name in request.exercises:
            exercise = EXERCISES[name]
            with progress.status(f"{backend.name}: {name}"):
                size, precision = request.size_of(exercise), request.precision()
                result = exercise.run(backend, size, precision=precision)
            if request.is_small and result.conclusion:
                result = replace(result, conclusion=OF_SMALL)
            made["results"].append(result.as_json())
    return made, int(any(result["error"] is not None for result in made["results"]))


def _measure_elsewhere(request: Request, name: str) -> tuple[dict[str, Any], int]:
    """Measure a backend in a process of its own: TensorFlow and MXNet cannot share one."""
    done = subprocess.run(  # noqa: S603
        request.command(name), env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        made: dict[str, Any] = json.loads(done.stdout)["backends"][0]
    except ValueError:
        error = f"measuring {name} ended with status {done.returncode}"
        made = _nothing_of(name) | {"error": error}
    return made, done.returncode and 1


def _nothing_of(name: str) -> dict[str, Any]:
    """Return a backend's part of the document before anything was measured."""
    parts: dict[str, Any] = {"notes": [], "error": None, "results": []}
    return {"name": name, "versions": {}, "threads": None, **parts}


def results_of(document: dict[str, Any]) -> list[Result]:
    """Return the results of all backends."""
    return [
        result_from(result) for backend in document["backends"] for result in backend["results"]
    ]


def show(console: Console, document: dict[str, Any]) -> None:
    """Print the tables, each with its conclusion; errors go to the standard error."""
    console.print(Text(page.describe_machine(document), style="dim"))
    for backend in document["backends"]:
        if backend["error"] is None:
            console.print(Text(page.threads(backend), style="dim"))
    if warning := document["machine"]["warning"]:
        show_note(console, warning)
    for result in results_of(document):
        title = f"\n{result.backend}, {result.exercise}: {result.question}"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        heads, *rows = page.cells(result)
        for number, name in enumerate(heads):
            table.add_column(name, justify="left" if number < 3 else "right", overflow="fold")
        for texts in rows:
            table.add_row(*map(Text, texts))
        console.print(table)
        for remark in page.remarks(result):
            console.print(Text(remark, style="dim"))
        console.print(Text(result.conclusion, style="green"))
        if result.error is not None:
            complain(result.error)
    for exercise, comparison in document["comparisons"].items():
        console.print(Text(f"\n{exercise}: {comparison}", style="green"))
    for backend in document["backends"]:
        for note in backend["notes"]:
            show_note(console, note)
        if backend["error"] is not None:
            complain(backend["error"])
