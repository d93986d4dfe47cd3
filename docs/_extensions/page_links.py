"""Make links of the pages that docstrings name, such as ``docs/guides/several-gpus.md``."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_PAGE = re.compile(r"(?<![`\w/])docs/([\w/-]+)\.md\b")


def link_pages(
    app: Sphinx | None, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Replace the paths in the lines of a docstring by links; Sphinx warns of a missing page."""
    lines[:] = [_PAGE.sub(r":doc:`/docs/\1`", line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the function to autodoc."""
    app.connect("autodoc-process-docstring", link_pages)
    return {"parallel_read_safe": True}
