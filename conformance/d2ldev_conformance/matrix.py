"""One matrix of many reports: a row for each requirement, and a column for each run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from d2ldev.errors import UnsupportedValueError
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.page import write_page
from d2ldev_conformance.requirement import ROOMS
from d2ldev_conformance.schema import REPORT, SCHEMA, read_report

_MATRIX = "matrix.json"
_CELL = ("outcome", "tests", "reasons", "errors")


def merge_reports(places: Iterable[Path], folder: Path) -> None:
    """Write ``matrix.json`` and ``matrix.html`` into a folder, from the reports of many runs.

    Args:
        places: files and folders. A folder has a report, or several: every JSON file, and the
            ``conformance.json`` of each folder in it.
        folder: it is made if needed.

    Raises:
        UnsupportedValueError: if a place has no report, or a file is not a report.
        OSError: if the folder cannot be written to.
    """
    paths = {path.resolve(): path for place in places for path in _find_reports(place)}
    documents = [{"source": name_source(path), **read_report(path)} for path in paths.values()]
    matrix = build_matrix(documents)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MATRIX).write_text(format_lines(matrix), encoding="utf-8")
    write_page(matrix, folder / "matrix.html")


def build_matrix(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the matrix of reports.

    ``runs`` has what each report says of its run. Each of ``requirements`` has a cell for each run,
    in the same order: ``outcome``, ``tests``, ``reasons`` and ``errors``. The cell is None if the
    run does not have the requirement.

    Args:
        documents: reports, as ``read_report`` returns them.
    """
    rows: dict[str, dict[str, Any]] = {}
    for number, document in enumerate(documents):
        for row in document["requirements"]:
            name = row["requirement"]
            kept = rows.setdefault(name, {"cells": [None] * len(documents)})
            kept["cells"][number] = {key: row.get(key, []) for key in _CELL}
            kept.update(requirement=name, room=row["room"], section=row["section"])
    keys = ("requirement", "room", "section", "cells")
    ordered = sorted(rows.values(), key=lambda row: (ROOMS.index(row["room"]), row["requirement"]))
    return {
        "schema": SCHEMA,
        "runs": [
            {key: value for key, value in document.items() if key not in ("requirements", "schema")}
            for document in documents
        ],
        "requirements": [{key: row[key] for key in keys} for row in ordered],
    }


def name_source(path: Path) -> str:
    """Return the name that a report has in a matrix: its file's, or its folder's.

    >>> name_source(Path("results/torch-cpu.json")), name_source(Path("cpu/conformance.json"))
    ('torch-cpu', 'cpu')
    """
    return path.resolve().parent.name if path.name == REPORT else path.stem


def _find_reports(place: Path) -> Iterator[Path]:
    found = [place]
    if place.is_dir():
        found = [path for path in sorted(place.glob("*.json")) if path.name != _MATRIX]
        found += sorted(place.glob(f"*/{REPORT}"))
    if not found:
        raise UnsupportedValueError(
            f"merge {place}", "the folder has no report", f"name a folder with a {REPORT}"
        )
    yield from found
