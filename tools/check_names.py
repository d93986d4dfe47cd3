"""Find functions whose names are not verbs: ``python tools/check_names.py``.

A function does something, and its name says what: ``copy``, ``find_group``, ``is_placed``.
A participle (``copied``, ``given``) names a thing. Properties are things, and so are fixtures.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("d2ldev", "backends", "conformance", "benchmarks", "examples", "tests", "tools")
# Names that users know from elsewhere.
KNOWN = {
    "elapsed_time": "of torch's events",
    "timed": "in the chapter's own cells",
    "named_tensors": "as PyTorch's named_parameters",
    "training_step": "of D2L's Module, as in Lightning",
    "warning_filters": "of warnings, a noun",
}
# Irregular participles that are not the verb's own form, as "put" and "read" are.
IRREGULAR = {
    "begun",
    "bound",
    "broken",
    "brought",
    "built",
    "caught",
    "chosen",
    "done",
    "drawn",
    "driven",
    "fed",
    "fought",
    "found",
    "frozen",
    "given",
    "gone",
    "grown",
    "heard",
    "held",
    "hidden",
    "kept",
    "known",
    "laid",
    "led",
    "left",
    "lent",
    "lost",
    "made",
    "meant",
    "met",
    "paid",
    "said",
    "seen",
    "sent",
    "shown",
    "spent",
    "spoken",
    "stolen",
    "taken",
    "thrown",
    "told",
    "torn",
    "understood",
    "undone",
    "won",
    "woken",
    "worn",
    "written",
}
# Neither is a participle.
OTHERS = {
    "anything",
    "bring",
    "embed",
    "everything",
    "feed",
    "need",
    "nothing",
    "seed",
    "something",
    "speed",
}
THINGS = ("property", "cached_property", "setter", "made_once", "fixture", "overload")


def main() -> int:
    """Print each name that begins with a participle; return how many there are."""
    found = [each for folder in FOLDERS for each in find_participles(ROOT / folder)]
    print(*found, sep="\n", end="\n" if found else "")  # noqa: T201  # what the tool is for
    return min(len(found), 1)


def find_participles(folder: Path) -> Iterator[str]:
    """Yield ``file:line: name`` for each function below a folder whose name is not a verb."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_misnamed(node):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield f"{place}: {node.name} begins with a participle"


def is_misnamed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether the name of a function begins with a participle."""
    decorators = [ast.unparse(each).partition("(")[0] for each in function.decorator_list]
    is_special = function.name.startswith("__")
    if is_special or function.name in KNOWN or any(each.endswith(THINGS) for each in decorators):
        return False
    return is_participle(function.name.strip("_").partition("_")[0])


def is_participle(word: str) -> bool:
    """Tell whether a word is a participle.

    >>> [word for word in ("copied", "copy", "given", "placing", "seed") if is_participle(word)]
    ['copied', 'given', 'placing']
    """
    if word in OTHERS:
        return False
    return word in IRREGULAR or (len(word) > 4 and word.endswith(("ed", "ing")))


if __name__ == "__main__":
    sys.exit(main())
