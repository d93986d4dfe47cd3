"""The reference links to the pages that docstrings name by their paths."""

import subprocess
import sys
from pathlib import Path

EXTENSIONS = Path(__file__).parents[2] / "docs" / "_extensions"
CONF = f"""
import sys
sys.path[:0] = [{str(EXTENSIONS)!r}, "."]
extensions = ["sphinx.ext.autodoc", "page_links"]
root_doc = "docs/index"
"""
MODULE = '"""See docs/guides/one.md, or `docs/guides/one.md <https://example.org>`_."""\n'


def build(folder, module):
    """Build a site of a module's docstring and one guide; return Sphinx's exit status."""
    guides = folder / "docs" / "guides"
    guides.mkdir(parents=True, exist_ok=True)
    (folder / "conf.py").write_text(CONF, encoding="utf-8")
    (folder / "documented.py").write_text(module, encoding="utf-8")
    (guides / "one.rst").write_text(":orphan:\n\nOne GPU\n=======\n", encoding="utf-8")
    index = "Index\n=====\n\n.. automodule:: documented\n"
    (folder / "docs" / "index.rst").write_text(index, encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-E", ".", "site"]
    return subprocess.run(command, cwd=folder, check=False, timeout=60).returncode


def test_a_page_that_a_docstring_names_is_a_link_with_its_title(tmp_path):
    assert build(tmp_path, MODULE) == 0
    page = (tmp_path / "site" / "docs" / "index.html").read_text(encoding="utf-8")
    assert '<a class="reference internal" href="guides/one.html">' in page
    assert ">One GPU</span>" in page
    assert page.count("docs/guides/one.md") == 1  # the link that is one already


def test_a_page_that_is_missing_ends_the_build(tmp_path):
    assert build(tmp_path, MODULE.replace("one.md,", "two.md,")) != 0
