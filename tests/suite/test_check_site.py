"""``tools/check_site.py`` names each link of a built site that leads nowhere."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OTHER = '<h1 id="here">Other</h1><a href="index.html">back</a>'


@pytest.fixture
def find_problems(tmp_path):
    find = runpy.run_path(str(ROOT / "tools" / "check_site.py"))["find_problems"]

    def find_in(page):
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "index.html").write_text(page, encoding="utf-8")
        (tmp_path / "docs" / "other.html").write_text(OTHER, encoding="utf-8")
        return list(find(tmp_path))

    return find_in


@pytest.mark.parametrize(
    "page",
    [
        '<a href="other.html#here">other</a>',
        '<p id="top"></p><a href="#top">up</a>',
        '<a href="https://d2l.ai#nowhere">elsewhere</a>',
        '<img src="data:image/png;base64,">',
    ],
)
def test_a_link_that_leads_somewhere_is_no_problem(page, find_problems):
    assert find_problems(page) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<a href="gone.html">gone</a>', "gone.html is no file"),
        ('<a href="../docs">a folder</a>', "../docs is no file"),
        ('<a href="other.html#gone">gone</a>', "other.html#gone is no anchor"),
        ('<a href="#gone">gone</a>', "#gone is no anchor"),
        ('<img src="gone.png">', "gone.png is no file"),
        ('<script src="https://cdn/x.js"></script>', "https://cdn/x.js is loaded from the network"),
        (
            '<link rel="stylesheet" href="//cdn/x.css">',
            "//cdn/x.css is loaded from the network",
        ),
    ],
)
def test_a_link_that_leads_nowhere_is_named_with_its_page(page, problem, find_problems):
    assert find_problems(page) == [f"docs/index.html: {problem}"]


def test_a_folder_without_a_page_is_a_problem(tmp_path):
    find = runpy.run_path(str(ROOT / "tools" / "check_site.py"))["find_problems"]
    assert list(find(tmp_path)) == [f"{tmp_path}: there is no page"]
