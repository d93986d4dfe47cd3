"""One matrix of many reports: a row for each requirement, and a column for each run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from d2ldev.errors import UnsupportedValueError
from d2ldev.framework.testing import MODULES
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.page import write_page
from d2ldev_conformance.runs import compare_runs
from d2ldev_conformance.schema import MATRIX, REPORT, SCHEMA, read_reports

_CELL = ("outcome", "tests", "reasons", "errors")
_NOT_OF_RUNS = ("requirements", "schema", "source")


def merge_reports(places: Iterable[Path], folder: Path) -> list[str]:
    """Write ``matrix.json`` and ``matrix.html`` into a folder, from the reports of many runs.

    Args:
        places: see ``read_reports``.
        folder: it is made if needed.

    Returns:
        The notes of the matrix.

    Raises:
        UnsupportedValueError: if a place has no report, a file is not a report, or the folder
            cannot be written to. Nothing is written then.
    """
    documents = read_reports(places)
    names = name_sources([*documents])
    matrix = build_matrix(dict(zip(names, documents.values(), strict=True)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MATRIX).write_text(format_lines(matrix), encoding="utf-8")
        write_page(matrix, folder / "matrix.html")
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
        raise UnsupportedValueError(
            f"write the matrix into {folder}", problem, "name another folder"
        ) from error
    return list(matrix["notes"])


def build_matrix(documents: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the matrix of reports.

    ``runs`` has what each report says of its run, and its name as ``source``. ``notes`` has what a
    reader has to know before comparing the runs. Each of ``requirements`` has a cell for each run,
    in the same order: ``outcome``, ``tests``, ``reasons`` and ``errors``. The cell is None if the
    run does not have the requirement. ``asks`` has what the tests of the requirement ask.

    Args:
        documents: reports, as ``read_report`` returns them, by their names.
    """
    rows: dict[str, dict[str, Any]] = {}
    for number, document in enumerate(documents.values()):
        for row in document["requirements"]:
            name = row["requirement"]
            kept = rows.setdefault(name, {"cells": [None] * len(documents)})
            kept["cells"][number] = {key: row[key] for key in _CELL}
            kept.update(requirement=name, module=row["module"], section=row["section"])
    asks: dict[str, list[str]] = {}
    for each in list_explanations():
        asks.setdefault(each.id, []).append(each.asks.replace("``", "`"))
    place = {name: number for number, name in enumerate(MODULES)}
    ordered = sorted(rows.values(), key=lambda row: (place[row["module"]], row["requirement"]))
    runs = [
        {"source": name, **{key: document[key] for key in document if key not in _NOT_OF_RUNS}}
        for name, document in documents.items()
    ]
    return {
        "schema": SCHEMA,
        "runs": runs,
        "notes": list(compare_runs(runs)),
        "requirements": [
            {
                **{key: row[key] for key in ("requirement", "module", "section")},
                "asks": asks.get(row["requirement"], []),
                "cells": row["cells"],
            }
            for row in ordered
        ],
    }


def name_sources(paths: Sequence[Path]) -> list[str]:
    """Return the name that each report has in a matrix: its file's, or its folder's.

    Two that have the same name get the names of further folders.

    >>> name_sources([Path("/kept/torch-cpu.json"), Path("/a/cpu/conformance.json")])
    ['torch-cpu', 'cpu']
    >>> name_sources([Path("/a/cpu/conformance.json"), Path("/b/cpu/conformance.json")])
    ['a/cpu', 'b/cpu']
    """
    places = [path.parent if path.name == REPORT else path.with_suffix("") for path in paths]
    names = ["" for _ in places]
    for length in range(1, max((len(place.parts) for place in places), default=0) + 1):
        tails = ["/".join(place.parts[-length:]) for place in places]
        names = [
            name if name and names.count(name) == 1 else tail
            for name, tail in zip(names, tails, strict=True)
        ]
    # A file and a folder beside it may have one name.
    return [
        str(path) if names.count(name) > 1 else name
        for path, name in zip(paths, names, strict=True)
    ]
