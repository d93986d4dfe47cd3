"""Check the links of a built site: ``python tools/check_site.py FOLDER``.

Every link inside the site leads to a file and to an anchor of it. Every script, style and image is
a file of the site, because a page asks nothing of the network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, the addresses that it links to, and those that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(values["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in values:
            self.loads.append(values["src"])


def find_problems(folder: Path) -> Iterator[str]:
    """Find what leads nowhere in the pages of a folder; yield one line for each.

    Args:
        folder: the root of the site.
    """
    paths = sorted(folder.resolve().rglob("*.html"))
    pages = {path: Page(path) for path in paths if "_static" not in path.parts}
    if not pages:
        yield f"{folder}: there is no page"
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for address in page.links + page.loads:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loads and parts.scheme != "data":
                    yield f"{name}: {address} is loaded from the network"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file():
                yield f"{name}: {address} is no file"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {address} is no anchor"


def main() -> int:
    """Print the problems of the folder on the command line; return 1 if there are any."""
    problems = list(dict.fromkeys(find_problems(Path(sys.argv[1]))))
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
