"""``d2ldev bench``: the exercises of D2L's section 6.7.5, measured on every device of a backend.

The document of ``--json`` has these keys:

- ``date``, and ``versions``: ``d2ldev``, ``python``, ``platform``, ``numpy``;
- ``machine``: ``system``, ``processor``, ``cores``, ``cards``;
- also in ``machine``: ``load``, the average number of ready processes in the last minute, or null;
- also in ``machine``: ``warning``, about other programs that use the machine, or empty;
- ``backends``: a list of backends.

A backend has these keys:

- ``name``, ``versions`` (distribution -> version), ``notes`` (d2ldev's warnings);
- ``threads``: the number of the framework's threads on the CPU, or null;
- ``error``: the reason why it could not be used, or null;
- ``results``: a list with the fields of ``d2ldev.bench.results.Result``, ``Row`` and ``Figures``.
  It adds ``best``: device -> its highest rate. For products that is the measured peak.

The exit status is 0, 1 after a failure, 2 after an invalid name, and 130 after Ctrl-C.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from d2ldev import settings
from d2ldev._backend import framework_of
from d2ldev.active import active_backend, get_backend
from d2ldev.bench.exercises import EXERCISES, Exercise
from d2ldev.bench.machine import describe_machine
from d2ldev.bench.plot import Plot
from d2ldev.bench.results import VIRTUAL
from d2ldev.cli.examination import find_version, list_versions
from d2ldev.cli.screen import (
    collect_warnings,
    complain,
    environment,
    exit_status,
    make_console,
    message_of,
    only_for_the_result,
    show_note,
)
from d2ldev.display import format_number
from d2ldev.errors import D2LDevError
from d2ldev.registry import loading, selection

_INTERRUPTED = 130
_TIMES = ((1, "s"), (1e3, "ms"), (1e6, "us"))


@dataclass(frozen=True)
class Request:
    """The options of the command; see ``main.bench``. Without ``backends`` it is the active one."""

    exercises: tuple[str, ...]
    backends: tuple[str, ...] = ()
    virtual_gpus: int | None = None
    size: int | None = None
    is_small: bool = False
    matmul_precision: str | None = None
    as_json: bool = False
    plot: Path | None = None

    def size_of(self, exercise: Exercise) -> int:
        """Return the size of an exercise."""
        if self.size is not None:
            return self.size
        return exercise.small if self.is_small else exercise.default

    def precision(self) -> str:
        """Return the precision of products: the same on all frameworks, float32 by default.

        Raises:
            UnsupportedValueError: if ``D2LDEV_MATMUL_PRECISION`` is invalid.
        """
        return self.matmul_precision or settings.matmul_precision() or "highest"

    def command(self, backend: str) -> list[str]:
        """Return the command that measures one backend in its own process."""
        argv = [sys.executable, "-P", "-m", "d2ldev", "bench", "--backend", backend, "--json"]
        argv += self.exercises if len(self.exercises) == 1 else ("--all",)
        argv += ["--matmul-precision", self.precision()]
        for option, value in (("--virtual-gpus", self.virtual_gpus), ("--size", self.size)):
            argv += [] if value is None else [option, str(value)]
        return [*argv, "--small"] if self.is_small else argv


def run(request: Request) -> int:
    """Measure, print the results, and return the exit status."""
    try:
        for name in request.backends:
            loading.find_name(name, " (from --backend)")
        plot = Plot(request.plot) if request.plot is not None else None
        if request.as_json:
            with only_for_the_result():
                document, status = _measure(request)
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
        else:
            document, status = _measure(request)
            show(make_console(), document)
        if plot is not None:
            plot.write([each for backend in document["backends"] for each in backend["results"]])
            sys.stderr.write(f"wrote {request.plot}\n")  # the standard output is the result
    except D2LDevError as error:
        complain(str(error))
        return exit_status(error)
    except KeyboardInterrupt:
        complain("the measurement was interrupted")
        return _INTERRUPTED
    return status


def _measure(request: Request) -> tuple[dict[str, Any], int]:
    """Return the document and the exit status."""
    on = describe_machine()  # before any measurement, so that the load is other programs'
    if len(request.backends) > 1:
        found = [_measure_elsewhere(request, name) for name in request.backends]
    else:
        found = [_measure_here(request)]
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": list_versions(),
        "machine": on,
        "backends": [backend for backend, _ in found],
    }
    return document, max(status for _, status in found)


def _measure_here(request: Request) -> tuple[dict[str, Any], int]:
    """Return one backend's entry in the document, and the exit status."""
    made = _make_entry("")
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
        framework = framework_of(backend)
        made["versions"] = {name: find_version(name) for name in framework.distributions}
        progress = Console(stderr=True)
        for name in request.exercises:
            exercise = EXERCISES[name]
            with progress.status(f"{backend.name}: {name}"):
                size, precision = request.size_of(exercise), request.precision()
                result = exercise.run(backend, size, precision=precision)
            made["results"].append(result.as_json())
    return made, int(any(result["error"] is not None for result in made["results"]))


def _measure_elsewhere(request: Request, name: str) -> tuple[dict[str, Any], int]:
    """Measure a backend in its own process: TensorFlow and MXNet cannot share one."""
    done = subprocess.run(  # noqa: S603
        request.command(name), env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        made: dict[str, Any] = json.loads(done.stdout)["backends"][0]
    except ValueError:
        error = f"measuring {name} ended with status {done.returncode}"
        made = _make_entry(name) | {"error": error}
    return made, done.returncode and 1


def _make_entry(name: str) -> dict[str, Any]:
    """Return a backend's entry in the document before the first measurement."""
    fields: dict[str, Any] = {"notes": [], "error": None, "results": []}
    return {"name": name, "versions": {}, **fields}


def show(console: Console, document: Mapping[str, Any]) -> None:
    """Print a table of each exercise, with all backends; errors go to the standard error."""
    backends = document["backends"]
    console.print(Text(_format_machine(document["machine"]), style="dim"))
    if warning := document["machine"]["warning"]:
        show_note(console, warning)
    results = [result for backend in backends for result in backend["results"]]
    for exercise in dict.fromkeys(result["exercise"] for result in results):
        _show_exercise(console, [each for each in results if each["exercise"] == exercise])
    for backend in backends:
        for note in backend["notes"]:
            show_note(console, note)
        if backend["error"] is not None:
            complain(backend["error"])


def _show_exercise(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of one exercise, and below it the reasons for missing figures."""
    first = results[0]
    title = f"\n{first['exercise']}: {first['question']}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("device", "what"):
        table.add_column(name, no_wrap=name == "device", overflow="fold")
    for name in ("time (quartiles)", first["unit"], "of best"):
        table.add_column(name, justify="right", no_wrap=True)
    notes: dict[str, None] = {}  # in order, each once
    for result in results:
        for row in result["rows"]:
            place = f"{result['backend']} {row['device']}"
            notes[f"{result['backend']} computes products in {row['precision']}"] = None
            if row["platform"] == VIRTUAL:
                notes[f"{place} is virtual: the CPU computes for it"] = None
            figures = ["-", "-", "-"]
            if found := row["figures"]:
                fraction = found["rate"] / result["best"][row["device"]]
                figures = [_format_time(found), format_number(found["rate"]), f"{fraction:.0%}"]
            texts = [place, row["way"], *figures]
            table.add_row(*map(Text, texts))
            if row["note"]:
                notes[f"{place}, {row['way']}: {row['note']}"] = None
    console.print(table)
    for note in notes:
        console.print(Text(note, style="dim"))
    for result in results:
        if result["error"] is not None:
            complain(f"{result['backend']}, {first['exercise']}: {result['error']}")


def _format_time(figures: Mapping[str, float]) -> str:
    factor, unit = next((each for each in _TIMES if figures["seconds"] * each[0] >= 1), _TIMES[-1])
    median, low, high = (
        format_number(figures[name] * factor) for name in ("seconds", "low", "high")
    )
    return f"{median} {unit} ({low} to {high})"


def _format_machine(found: Mapping[str, Any]) -> str:
    """Return a line about the machine, and its load before the measurement."""
    hardware = [f"{found['cores']} cores of {found['processor'] or found['system']}"]
    load = "" if found["load"] is None else f" Its load was {found['load']:g} before."
    return f"Measured on {', '.join([*hardware, *found['cards']])}.{load}"
