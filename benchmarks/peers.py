"""What d2ldev costs against the framework's own calls, and against other libraries.

    python benchmarks/peers.py [--framework NAME] [--only TEXT] [--json FILE]

A row is one piece of work, and one other way to do it. All ways of a piece of work are timed in
turn in one process, on the CPU and two virtual GPUs; what is shown is the median of the rounds'
ratios, and the quartiles between which half of them lie. Rows that miss their aim come first, with
the reason. A library that is not installed is named; one that cannot do the work has no row. The
exit status is 0 also where an aim is not met.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from rich.console import Console
from rich.table import Table

_FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=_FRAMEWORKS, default="torch")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure only rows with TEXT in their name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    # Before anything imports them: Keras reads it once, and so does the backend.
    os.environ["KERAS_BACKEND"] = arguments.framework
    os.environ["D2LDEV_VIRTUAL_GPUS"] = "2"
    found = results(arguments.framework, arguments.only)
    Console().print(table(f"d2ldev and its peers on {arguments.framework}, on the CPU", found))
    if arguments.json is not None:
        from against.work import PEERS
        from overhead import document

        compared = {result.against.partition(",")[0] for result in found}
        installs = tuple(peer.install for name, peer in PEERS.items() if name in compared)
        text = format_lines(document(found, arguments.framework, installs))
        arguments.json.write_text(text, encoding="utf-8")


def results(framework: str, only: str = "") -> list:
    """Return every comparison for one framework, those that miss their aim first."""
    from against import epochs
    from against.work import measure, sort_missed_first

    import d2ldev

    backend = d2ldev.set_backend(framework)
    works = importlib.import_module(f"against.{framework}_works").works
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for work in works(backend, Path(folder)):
            if only in work.name:
                found += measure(work)
        found += (row for row in epochs.results(backend, only))
    return sort_missed_first(found)


def table(title: str, found: list) -> Table:
    """Return the results for a person to read."""
    from overhead import time_text

    made = Table(title=title)
    for column in ("what", "against", "with d2ldev", "theirs"):
        made.add_column(column, overflow="fold")
    for column in ("time", "theirs", "ratio", "half of the rounds", "aim"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("why", overflow="fold")
    for result in found:
        times = time_text(result.ours), time_text(result.theirs)
        figures = ("-", "-")
        if result.spread is not None:
            low, high = result.spread
            figures = f"{result.value:.3g}", f"{low:.3g} to {high:.3g}"
        aim = f"<= {result.aim:g}" + (" [bold red]missed" if result.met is False else "")
        statements = result.ours_statement, result.theirs_statement
        made.add_row(result.name, result.against, *statements, *times, *figures, aim, result.note)
    return made


if __name__ == "__main__":
    main()
