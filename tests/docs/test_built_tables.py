"""The site has the tables of the long pages."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def fill():
    return runpy.run_path(str(DOCS / "_extensions" / "built_tables.py"))["fill_tables"]


@pytest.fixture
def app():
    return SimpleNamespace(env=SimpleNamespace(doc2path=lambda page: str(DOCS / f"{page}.md")))


@pytest.mark.parametrize("page", ["requirements", "speed-tables"])
def test_a_long_page_gets_its_tables(fill, app, page):
    source = [(DOCS / f"{page}.md").read_text(encoding="utf-8")]
    fill(app, page, source)
    assert source[0].count("\n|") > 100


def test_another_page_stays_as_it_is(fill, app):
    source = ["<!-- requirements -->\n<!-- end of requirements -->\n"]
    fill(app, "training", source)
    assert source == ["<!-- requirements -->\n<!-- end of requirements -->\n"]
