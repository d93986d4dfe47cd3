"""Fill the tables of the pages that are long, when the site is built: see ``tools/tables.py``."""

from __future__ import annotations

import runpy
from pathlib import Path

from sphinx.application import Sphinx

TOOL = runpy.run_path(str(Path(__file__).parent.parent.parent / "tools" / "tables.py"))


def fill_tables(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the source of a page by the source with its tables."""
    if Path(app.env.doc2path(page)) in TOOL["BUILT"]:
        source[0] = TOOL["with_tables"](source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the function to the reading of a page."""
    app.connect("source-read", fill_tables)
    return {"parallel_read_safe": True}
