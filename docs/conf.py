"""The site: ``sphinx-build -W -c docs . FOLDER`` in the root of the repository.

The root is the source folder, so that a page may link to ``../SECURITY.md`` as on GitHub.
"""

from __future__ import annotations

import sys
from pathlib import Path

from d2ldev_conformance.matrix import merge_reports
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation

import d2ldev
from d2ldev import typing

ROOT = Path(__file__).parent.parent
FOLDERS = {"conformance", "docs", "examples"}

project = "d2ldev"
author = "the authors of d2ldev"
project_copyright = author
version = release = d2ldev.__version__

# Sphinx takes the repr of each attribute, also of the active backend. Else it would warn or import.
d2ldev.set_backend("reference")

sys.path.append(str(ROOT / "docs" / "_extensions"))
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "built_tables",
    "page_links",
    "tutorials",
]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "examples/README.md",
    "examples/*/README.md",
    "conformance/results/README.md",
]
# Sphinx looks through every folder that it is not told to leave out, also environments of tox.
exclude_patterns = sorted(
    path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in FOLDERS
)

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
maximum_signature_line_length = 120
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "d2ldev"
html_context = {"default_mode": "auto"}
templates_path = ["_templates"]
# The pages lie in docs/: the address of the site leads there.
html_additional_pages = {"index": "redirect.html"}
html_static_path = ["_static"]
html_css_files = [
    "columns.css",
    "diffs.css",
    "lines.css",
    "pictures.css",
    "tables.css",
    "tutorials.css",
]
html_js_files = ["tables.js"]
html_search_scorer = str(ROOT / "docs" / "_extensions" / "search.js")
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def attach_comments(app: Sphinx) -> None:
    """Give the constants that the package imports the docstrings beside their definitions.

    autodoc looks for them in the package alone, in the analyzer that Sphinx keeps of it.
    """
    comments: dict[str, list[str]] = {}
    for name in sorted(name for name in sys.modules if name.startswith("d2ldev.")):
        docs = ModuleAnalyzer.for_module(name).find_attr_docs()
        comments |= {key: doc for (owner, key), doc in docs.items() if not owner}
    docs = ModuleAnalyzer.for_module("d2ldev").find_attr_docs()
    docs.update({("", name): comments[name] for name in d2ldev.__all__ if name in comments})


def keep_colons(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Hide the first line of an attribute's docstring from napoleon, behind an empty comment.

    It would take what stands before a colon for the type: "The name that it is selected by".
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def name_unions(
    app: Sphinx,
    what: str,
    name: str,
    value: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Write the names of types that are unions, also of private protocols, into signatures."""
    named = {
        "~d2ldev.typing.DTypeLike": typing.DTypeLike,
        "~d2ldev.typing.Callback": typing.Callback,
    }
    for alias, annotation in named.items():
        union = stringify_annotation(annotation, "smart", short_literals=True)
        signature = signature and signature.replace(union, alias)
        returned = returned and returned.replace(union, alias)
    return signature, returned


def write_matrix(app: Sphinx, error: Exception | None) -> None:
    """Write the matrix of all kept reports beside the page that links to it."""
    if error is None and app.builder.format == "html":
        merge_reports([ROOT / "conformance" / "results"], Path(app.outdir) / "docs" / "matrix")


def setup(app: Sphinx) -> None:
    """Connect what the build writes beside the pages."""
    app.connect("builder-inited", attach_comments)
    app.connect("autodoc-process-docstring", keep_colons, priority=1)  # before napoleon
    app.connect("autodoc-process-signature", name_unions)
    app.connect("build-finished", write_matrix)
