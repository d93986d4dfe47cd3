"""Read reports, and refuse a report of another schema or one that contradicts itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from d2ldev.display import format_html_table, format_text_table
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework.testing import MODULES
from d2ldev_conformance.progress import OUTCOMES, count_by_module, judge

SCHEMA = 1
"""The version of ``conformance.json`` and ``matrix.json``.

It changes if a key goes or means something else.
"""
REPORT = "conformance.json"
MATRIX = "matrix.json"
VERDICTS = "mutants.json"
"""What became of mutants: like the matrix it is no report, and may lie beside one."""
_UNMET = ("failed", "not begun", "known gap")
# ``[x]`` is a list of x, ``{str: x}`` a dict of x, and a tuple has the values that are allowed.
_DOCUMENT: dict[Any, Any] = {
    "schema": int,
    "backend": str,
    "date": str,
    "versions": {str: str},
    "interface": int | None,
    "commit": str,
    "suite": str,
    "machine": str,
    "devices": [{"device": str, "platform": str}],
    "cards": [str],
    "exit_status": int | None,
    "summary": {OUTCOMES: int},
    "requirements": [
        {
            "requirement": str,
            "module": MODULES,
            "section": str,
            "outcome": OUTCOMES,
            "tests": {OUTCOMES: int},
            "reasons": [str],
            "errors": [str],
        }
    ],
}

# What reports that were written before it came do not have.
_OPTIONAL = ("interface",)


class ReportDocument(dict[str, Any]):
    """The document of a report: a dict as in ``conformance.json``, which a notebook shows briefly.

    One table counts the requirements of each area by outcome. Another one has the requirements
    that are not met, with the reasons.
    """

    def __repr__(self) -> str:
        tables = [format_text_table(*table, numbers=OUTCOMES) for table in self._tables()]
        return "\n\n".join([self._title(), *tables])

    def _repr_html_(self) -> str:
        first, *others = self._tables()
        tables = [format_html_table(*first, caption=self._title(), numbers=OUTCOMES)]
        tables += [format_html_table(*table) for table in others]
        return "\n".join(tables)

    def _title(self) -> str:
        devices = ", ".join(f"{each['device']} ({each['platform']})" for each in self["devices"])
        versions = ", ".join(f"{name} {number}" for name, number in self["versions"].items())
        return f"{self['backend']} on {devices}: {versions}"

    def _tables(self) -> list[tuple[Sequence[str], list[list[str]]]]:
        """Return the header and the rows of each table."""
        counts = count_by_module(self["requirements"])
        total = sum(counts.values(), Counter[str]())
        shown = [outcome for outcome in OUTCOMES if total[outcome]]
        rows = [
            [area, *(str(count[outcome]) for outcome in shown)]
            for area, count in [*counts.items(), ("total", total)]
        ]
        unmet = [
            [row["requirement"], row["outcome"], "; ".join(row["reasons"])]
            for row in self["requirements"]
            if row["outcome"] in _UNMET
        ]
        tables: list[tuple[Sequence[str], list[list[str]]]] = [(["area", *shown], rows)]
        return tables + ([(("requirement", "outcome", "reasons"), unmet)] if unmet else [])


def read_reports(places: Iterable[Path]) -> dict[Path, ReportDocument]:
    """Return the document of each report, by its path.

    Args:
        places: files and folders. A folder has a report, or several: every JSON file, and the
            ``conformance.json`` of each folder in it.

    Raises:
        UnsupportedValueError: if a place has no report, or a file is not a report.
    """
    paths = {path.resolve(): None for place in places for path in _find_reports(place)}
    return {path: read_report(path) for path in paths}


def _find_reports(place: Path) -> Iterator[Path]:
    found = [place]
    if place.is_dir():
        found = sorted(place.glob("*.json"))
        found = [path for path in found if path.name not in (MATRIX, VERDICTS)]
        found += sorted(place.glob(f"*/{REPORT}"))
    if not found:
        raise UnsupportedValueError(
            f"read the reports in {place}",
            "the folder has no report",
            f"name a folder with a {REPORT}",
        )
    yield from found


def read_report(path: Path) -> ReportDocument:
    """Return the document of a report.

    Args:
        path: a ``conformance.json``, of any name.

    Raises:
        UnsupportedValueError: if the file cannot be read, or is not a report of this schema.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, f"{type(error).__name__}: {error}") from error
    if problem := next(find_problems(document), ""):
        raise _refusal(path, problem)
    return ReportDocument(document)


def find_problems(document: Any) -> Iterator[str]:
    """Yield each problem of a document that should be a report, with the path of the key.

    Args:
        document: as ``json.loads`` returns it.
    """
    if isinstance(document, dict) and document.get("schema") != SCHEMA:
        has = f"schema {document['schema']!r}" if "schema" in document else "no schema"
        yield f"it has {has}, and this d2ldev reads schema {SCHEMA}"
        return
    problems = list(_find_problems(document, _DOCUMENT, ""))
    yield from problems or _find_contradictions(document)


def _find_problems(value: Any, expected: Any, path: str) -> Iterator[str]:
    if isinstance(expected, tuple):
        if value not in expected:
            yield f"{path} is {value!r}, not one of {', '.join(expected)}"
        return
    wanted = get_args(expected) or (_type_of(expected),)
    found: type = type(value)  # True is an int for isinstance
    if found not in wanted:
        names = " or ".join(each.__name__.removesuffix("Type") for each in wanted)
        yield f"{path or 'the document'} has the type {found.__name__}, not {names}"
    elif found is int and value < 0:
        yield f"{path} is {value}, which is less than 0"
    elif isinstance(expected, list):
        for number, each in enumerate(value):
            yield from _find_problems(each, expected[0], f"{path}[{number}]")
    elif isinstance(expected, dict):
        yield from _find_problems_of_keys(value, expected, path)


def _type_of(expected: Any) -> type:
    return expected if isinstance(expected, type) else type(expected)


def _find_problems_of_keys(
    value: dict[str, Any], expected: dict[Any, Any], path: str
) -> Iterator[str]:
    ((first, each), *_) = expected.items()
    if isinstance(first, tuple):
        for name in value:
            yield from _find_problems(name, first, f"a key of {path}")
    if not isinstance(first, str):
        expected = dict.fromkeys(value, each)
    for name, each in expected.items():
        # A name from the file may have anything in it, and a terminal shows it.
        key = f"{path}.{name}".removeprefix(".") if name.isidentifier() else f"{path}[{name!r}]"
        if name in value:
            yield from _find_problems(value[name], each, key)
        elif key not in _OPTIONAL:
            yield f"{key} is missing"


def _find_contradictions(document: dict[str, Any]) -> Iterator[str]:
    """Yield each problem of a document that has all keys, with values of the right types."""
    try:
        datetime.fromisoformat(document["date"])
    except ValueError:
        yield f"date is {document['date']!r}, which is no date"
    if not document["devices"]:
        yield "devices is empty"
    rows = document["requirements"]
    for name, count in Counter(row["requirement"] for row in rows).items():
        if count > 1:
            yield f"requirements has {name!r} {count} times"
    for number, row in enumerate(rows):
        if row["outcome"] != (outcome := judge(row["tests"])):
            yield f"requirements[{number}].outcome is {row['outcome']}, and its tests say {outcome}"
    counts = Counter(row["outcome"] for row in rows)
    if Counter(document["summary"]) != counts:
        yield f"summary is {document['summary']}, and the requirements say {dict(counts)}"


def _refusal(path: Path, problem: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"read the report {path}", problem, "d2ldev conformance NAME --report DIR writes a new one"
    )
