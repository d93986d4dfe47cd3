"""What each requirement of the suite asks, why, and its source.

The docstring of a test has them: the first paragraph is what it asks, the second is the reason.
The requirements of a file may share both. Then the second paragraph of the module's docstring is
the reason, and its ``SOURCE`` is the source.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from d2ldev_conformance.requirement import Requirement, link_source, module_of

PAGE = "docs/requirements.md"
"""The page of the documentation with all requirements. Each has its id as an anchor."""


class SuiteFile(NamedTuple):
    """What the requirements of one file share.

    Args:
        module: the module of the contract.
        name: of the file, as words.
        title: the first paragraph of its docstring.
        reason: the second one, or empty.
        source: one of ``SOURCES``, or empty.
    """

    module: str
    name: str
    title: str
    reason: str
    source: str


class Explanation(NamedTuple):
    """What one test of a requirement asks of a backend.

    Args:
        id: of the requirement.
        section: the section of D2L's chapter to which it belongs.
        asks: what a backend has to do, in one sentence.
        reason: why; that of the file if the test has none.
        source: the name of the document that states it; that of the file if the test has none.
        link: its address, which may be a page of ``docs``.
        file: the file of the test.
    """

    id: str
    section: str
    asks: str
    reason: str
    source: str
    link: str
    file: SuiteFile


def explain(test: Callable[..., Any]) -> Explanation | None:
    """Return what a function asks of a backend; None if it is not a test of a requirement."""
    mark = next((m for m in getattr(test, "pytestmark", ()) if m.name == "requirement"), None)
    if mark is None:
        return None
    found = Requirement(*mark.args)
    file = _read_file(test.__module__)
    asks, reason, *_ = *read_paragraphs(test), "", ""
    source, link = link_source(mark.kwargs["source"] or file.source, found.section)
    return Explanation(*found[:2], asks, reason or file.reason, source, link, file)


def describe(test: Callable[..., Any]) -> str:
    """Return what a test asks, why, the source, and where the documentation has it."""
    found = explain(test)
    if found is None:
        return ""
    return f"{found.asks}\n{found.reason}\nsource: {found.source}\ndocs: {PAGE}#{found.id}"


def _read_file(name: str) -> SuiteFile:
    module = sys.modules[name]
    path = Path(str(module.__file__))
    title, reason, *_ = *read_paragraphs(module), "", ""
    words = path.stem.removeprefix("test_").replace("_", " ").replace("gpu", "GPU")
    return SuiteFile(module_of(path), words, title, reason, getattr(module, "SOURCE", ""))


def read_paragraphs(obj: object) -> list[str]:
    """Return the paragraphs of a docstring, each as one line."""
    text = inspect.getdoc(obj) or ""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
