"""Read reports, and refuse a report of another schema or without a key that the schema has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d2ldev.errors import UnsupportedValueError
from d2ldev_conformance.progress import OUTCOMES
from d2ldev_conformance.requirement import ROOMS

SCHEMA = 1
"""The version of ``conformance.json`` and ``matrix.json``.

It changes if a key goes or means something else. A report without ``schema`` has version 1.
"""
REPORT = "conformance.json"
_OPTIONAL = ("schema", "errors")
# ``[x]`` is a list of x, ``{str: x}`` a dict of x, and a tuple has the values that are allowed.
_DOCUMENT: dict[str, Any] = {
    "schema": int,
    "backend": str,
    "date": str,
    "versions": {str: str},
    "machine": str,
    "devices": [{"device": str, "platform": str}],
    "cards": [str],
    "summary": {str: int},
    "requirements": [
        {
            "requirement": str,
            "room": ROOMS,
            "section": str,
            "outcome": OUTCOMES,
            "tests": {str: int},
            "reasons": [str],
            "errors": [str],
        }
    ],
}


def read_report(path: Path) -> dict[str, Any]:
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
    schema = document.get("schema", SCHEMA) if isinstance(document, dict) else SCHEMA
    if schema != SCHEMA:
        problem = f"it has schema {schema!r}, and this d2ldev reads schema {SCHEMA}"
        raise _refusal(path, problem)
    if problem := next(find_problems(document), ""):
        raise _refusal(path, problem)
    return dict(document)


def find_problems(document: Any) -> Iterator[str]:
    """Yield each problem of a document that should be a report, with the path of the key.

    Args:
        document: as ``json.loads`` returns it.
    """
    return _find_problems(document, _DOCUMENT, "")


def _find_problems(value: Any, expected: Any, path: str) -> Iterator[str]:
    if isinstance(expected, tuple):
        if value not in expected:
            yield f"{path} is {value!r}, not one of {', '.join(expected)}"
        return
    wanted = expected if isinstance(expected, type) else type(expected)
    found: type = type(value)  # True is an int for isinstance
    if found is not wanted:
        yield f"{path or 'the document'} has the type {found.__name__}, not {wanted.__name__}"
    elif isinstance(expected, list):
        for number, each in enumerate(value):
            yield from _find_problems(each, expected[0], f"{path}[{number}]")
    elif isinstance(expected, dict):
        yield from _find_problems_of_keys(value, expected, path)


def _find_problems_of_keys(
    value: dict[str, Any], expected: dict[Any, Any], path: str
) -> Iterator[str]:
    keys = dict.fromkeys(value, expected[str]) if str in expected else expected
    for name, each in keys.items():
        key = f"{path}.{name}".removeprefix(".")
        if name in value:
            yield from _find_problems(value[name], each, key)
        elif name not in _OPTIONAL:
            yield f"{key} is missing"


def _refusal(path: Path, problem: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"read the report {path}", problem, "d2ldev conformance NAME --report DIR writes a new one"
    )
