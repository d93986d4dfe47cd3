"""``tools/open_site.py`` finds what is wrong with a page in a browser."""

import runpy
from pathlib import Path

import pytest

OPEN_SITE = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "open_site.py"))
HEAD = '<!DOCTYPE html><meta name="viewport" content="width=device-width"><body>'
STYLE = "<style>.sd-tab-content { display: none }</style>"
WIDE = '<div style="width: 2000px">wide</div>'
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="

pytestmark = pytest.mark.skipif(
    OPEN_SITE["find_chromium"]() is None, reason="there is no Chromium here"
)


@pytest.fixture
def find_problems(tmp_path):
    def find_in(**pages):
        for name, body in pages.items():
            (tmp_path / f"{name}.html").write_text(HEAD + body, encoding="utf-8")
        return list(OPEN_SITE["find_problems"](tmp_path))

    return find_in


def test_a_page_without_a_problem(find_problems):
    image = f'<img src="{PIXEL}" loading="lazy">'
    scrolls = f'<div style="overflow: auto">{WIDE}</div>'
    quiet = '<script>console.warn("no error")</script>'
    assert find_problems(page=f"{image}{scrolls}{quiet}") == []


def test_what_is_wrong_is_named_with_its_page_and_its_width(find_problems):
    found = find_problems(
        broken='<img src="gone.png" loading="lazy">',
        folded=f"<details><summary>more</summary>{WIDE}</details>",
        loud='<script>console.error("loud", 3)</script>',
        tabs=f'{STYLE}<div class="sd-tab-content">{WIDE}</div>',
        throws="<script>throw new Error('thrown')</script>",
        wide='<div style="width: 500px">wide</div>',
    )
    missing = "error: Failed to load resource: the server responded with a status of 404"
    phone, desktop = (
        [each.partition(f" at {width} px: ")[::2] for each in found if f" at {width} px" in each]
        for width in (390, 1280)
    )
    assert [page for page, _ in phone] == [
        *("broken.html", "broken.html", "folded.html", "loud.html", "tabs.html", "throws.html"),
        "wide.html",
    ]
    texts = [problem for _, problem in phone]
    assert texts[0].startswith(missing)
    assert texts[1] == "gone.png is a broken image"
    assert texts[2].startswith("it scrolls sideways by 1618 px: <div> wide")
    assert texts[3] == "error: loud 3"
    assert texts[4].startswith("it scrolls sideways by 1618 px: <div> wide")
    assert texts[5] == "error: Error: thrown"
    assert texts[6].startswith("it scrolls sideways by 118 px: <div> wide")
    assert "wide.html" not in dict(desktop)
    assert len(desktop) == len(phone) - 1


def test_a_page_that_is_named_is_opened_alone(find_problems, tmp_path):
    assert find_problems(good="good", wide=WIDE) != []
    assert list(OPEN_SITE["find_problems"](tmp_path, ["good.html"])) == []


CODE = "<style>pre { overflow: auto; width: 300px }</style>"
FADES = "<style>pre { mask-image: linear-gradient(to right, black, transparent) }</style>"


def test_code_is_whole_on_a_desktop_and_fades_where_it_goes_on(find_problems):
    line = f"<pre>x = '{'y' * 94}'</pre>"
    assert find_problems(cut=CODE + line, fades=CODE + FADES + line, whole="<pre>x = 1</pre>") == [
        f"cut.html at 390 px: nothing shows more: x = '{'y' * 45}",
        f"cut.html at 1280 px: nothing shows more: x = '{'y' * 45}",
        f"cut.html at 1280 px: code of 100 characters is cut: x = '{'y' * 45}",
        f"fades.html at 1280 px: code of 100 characters is cut: x = '{'y' * 45}",
    ]


def test_the_search_has_to_begin_with_the_page_about_the_words(find_problems):
    pages = dict.fromkeys(OPEN_SITE["SEARCHES"].values())
    list_pages = """
        <p class="search-summary">done</p><ul class="search"></ul>
        <script>for (const page of %s) {
          const link = document.createElement("a");
          link.href = page + "#part";
          document.querySelector("ul").append(link);
        }</script>
    """
    first, last = next(iter(pages)), OPEN_SITE["LAST"]
    found = find_problems(search=list_pages % [first, first, last])
    assert f"the search for 'warm-up' does not begin with {first}" not in "\n".join(found)
    assert len(found) == len(OPEN_SITE["SEARCHES"]) - 1
    found = find_problems(search=list_pages % [first, last, "docs/other.html"])
    assert f"the search for 'warm-up' has pages behind {last}" in found
