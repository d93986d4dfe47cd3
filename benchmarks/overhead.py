"""What d2ldev costs over the framework's own calls, and over its import.

    python benchmarks/overhead.py [--framework NAME] [--runs N] [--json FILE]

Every row is a comparison in the same process with the call that one would write without
d2ldev, and has an aim. The exit status is 0 also where an aim is not met: this is a
measurement, and how fast a machine is is no property of the code. Where things lie in memory
differs from process to process, and with it the time of a short call: of several ``--runs``, each a
process of its own, a row is that of the median ratio.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from d2ldev_conformance.lines import format_lines

from d2ldev._backend import framework_of

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from measure import Result, measure
from rich.console import Console
from rich.table import Table
from rows import FRAMEWORKS, import_rows

import d2ldev
from d2ldev.bench.machine import describe_machine

_TIMES = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (float("inf"), 1e3, "ms"))


def time_text(seconds: float | None) -> str:
    """Return a time in the unit that suits it."""
    if seconds is None:
        return "-"
    factor, unit = next((factor, unit) for limit, factor, unit in _TIMES if seconds < limit)
    return f"{seconds * factor:.4g} {unit}"


def _aim(result: Result) -> str:
    if result.aim is None:
        return "-"
    return f"<= {result.aim:g}" if result.unit == "ratio" else f"<= {result.aim:g} {result.unit}"


def table(title: str, results: list[Result]) -> Table:
    """Return the results for a person to read."""
    made = Table(title=title)
    for column in ("what", "with d2ldev", "without"):
        made.add_column(column, overflow="fold")
    for column in ("time", "without", "value", "aim"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("met")
    for result in results:
        value = "-" if result.value is None else f"{result.value:.3g}"
        met = {True: "yes", False: "[bold red]no", None: "-"}[result.met]
        made.add_row(
            f"{result.name} ({result.note})" if result.note else result.name,
            result.ours_statement,
            result.theirs_statement,
            time_text(result.ours),
            time_text(result.theirs),
            value,
            _aim(result),
            met,
        )
    return made


def document(
    results: Sequence[Result],
    framework: str,
    others: tuple[str, ...] = ("accelerate", "lightning-fabric"),
) -> dict[str, Any]:
    """Return the results with what they were measured on, and with which others, for a file."""
    backend = d2ldev.get_backend(framework.removesuffix("-virtual"))
    distributions = ("d2ldev", *framework_of(backend).distributions, *others)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": _machine(),
        "versions": {name: _version(name) for name in distributions},
        "results": [{**asdict(result), "met": result.met} for result in results],
    }


def _machine() -> str:
    found = describe_machine()
    on = f" of {found['processor']}" if found["processor"] else ""
    return ", ".join([found["system"], f"{found['cores']} cores{on}", *found["cards"]])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--runs``."""
    parser.add_argument(
        "--runs",
        type=_odd,
        default=1,
        metavar="N",
        help="the number of processes to measure in (odd)",
    )


def _odd(text: str) -> int:
    number = int(text)
    if number < 1 or number % 2 == 0:
        raise argparse.ArgumentTypeError("it is an odd number, of which one is the median")
    return number


def medians(runs: Sequence[Sequence[Result]]) -> list[Result]:
    """Return, of each row, the result of the run whose figure is the median of an odd number."""
    return [
        sorted(row, key=lambda each: each.value or 0.0)[len(row) // 2]
        for row in zip(*runs, strict=True)
    ]


def measure_in_processes(script: str, framework: str, runs: int) -> list[Result]:
    """Return the medians of what a script measures in so many processes."""
    return medians([_measure_elsewhere(script, framework) for _ in range(runs)])


def _measure_elsewhere(script: str, framework: str) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        command = [sys.executable, script, "--framework", framework, "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    names = [each.name for each in fields(Result)]
    return [Result(**{name: row[name] for name in names}) for row in rows]


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    add_runs(parser)
    arguments = parser.parse_args()
    if arguments.runs > 1:
        results = measure_in_processes(__file__, arguments.framework, arguments.runs)
    else:
        rows = [*import_rows()] if arguments.framework != "torch-virtual" else []  # torch has them
        rows += FRAMEWORKS[arguments.framework]()
        results = [measure(row) for row in rows]
    title = f"d2ldev's overhead over {arguments.framework} on the CPU"
    Console().print(table(title, results))
    if arguments.json is not None:
        found = document(results, arguments.framework)
        arguments.json.write_text(format_lines(found), encoding="utf-8")


if __name__ == "__main__":
    main()
