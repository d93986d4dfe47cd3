"""JSON with one line for each row: compact, and two reports can be compared line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def format_lines(document: Mapping[str, Any]) -> str:
    r"""Return a document as JSON, with a line for each entry, and for each row of a list.

    Args:
        document: a dict. A list of rows, or a dict of them, gets a line for each row.

    >>> print(format_lines({"backend": "torch", "rows": [{"id": 1}, {"id": 2}]}), end="")
    {
     "backend": "torch",
     "rows": [
      {"id": 1},
      {"id": 2}
     ]
    }
    """
    lines = [f" {json.dumps(name)}: {_format_entry(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _format_entry(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    if isinstance(value, dict) and any(isinstance(each, (dict, list)) for each in value.values()):
        lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    return json.dumps(value)
