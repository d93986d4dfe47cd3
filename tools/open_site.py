"""Open a built site in a headless Chromium: ``python tools/open_site.py FOLDER [PAGE ...]``.

Each page is opened as wide as a phone and as wide as a desktop, with all of its tabs and folded
parts shown. A page must not report an error in the console, show a broken image, or scroll
sideways. Wide tables and code scroll inside of themselves, and fade where they go on. On a desktop
each line of code is shown whole.

Where all pages are opened, the site's search is asked, too: see ``SEARCHES``.

Chromium is controlled by the DevTools protocol over two pipes, so that no package is needed:
https://chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

NAMES = ("chromium", "google-chrome", "chromium-browser", "chrome")
WIDTHS = (390, 1280)
"""The widths of a phone and of a desktop, in pixels."""
SEARCHES = {
    "warm-up": "docs/guides/learning-rate.html",
    "gradient accumulation": "docs/training.html",
    "workers": "docs/guides/workers.html",
    "metrics": "docs/guides/metrics.html",
}
"""What a reader searches for, and the page that the search has to name first."""
LAST = "docs/requirements.html"
"""The page with every subject, which no page may follow."""
# Seconds until a page is loaded; one takes a fifth of a second.
_PATIENCE = 60
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
    *("--disable-dev-shm-usage", "--disable-component-update"),
)
_LOOK = """
(async () => {
  const style = document.createElement("style");
  style.textContent = ".sd-tab-content { display: block !important }";
  document.head.append(style);
  for (const each of document.querySelectorAll("details")) each.open = true;
  const images = [...document.images];
  for (const each of images) each.loading = "eager";
  await Promise.all(images.map((image) => image.decode().catch(() => {})));
  await document.fonts.ready;
  const problems = images
    .filter((image) => !image.naturalWidth)
    .map((image) => `${image.getAttribute("src")} is a broken image`);
  const root = document.scrollingElement;
  if (root.scrollWidth > innerWidth) {
    const isClipped = (element) => {
      for (let outer = element.parentElement; outer && outer !== document.body;
           outer = outer.parentElement) {
        if (getComputedStyle(outer).overflowX !== "visible") return true;
      }
      return false;
    };
    const wide = [...document.body.querySelectorAll("*")]
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !isClipped(each))
      .map((each) => `<${each.tagName.toLowerCase()}> ${each.textContent.trim().slice(0, 50)}`);
    problems.push(`it scrolls sideways by ${root.scrollWidth - innerWidth} px: ${wide.at(-1)}`);
  }
  // Until what observes the sizes has seen those of now.
  for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
  for (const box of document.querySelectorAll("pre, .pst-scrollable-table-container")) {
    if (box.scrollWidth <= box.clientWidth + 1) continue;
    const begin = box.textContent.trim().slice(0, 50);
    if (getComputedStyle(box).maskImage === "none") problems.push(`nothing shows more: ${begin}`);
    if (box.tagName === "PRE" && innerWidth >= 1280) {
      const length = Math.max(...box.textContent.split("\\n").map((line) => line.length));
      problems.push(`code of ${length} characters is cut: ${begin}`);
    }
  }
  return problems;
})()
"""
_FOUND = """
(async () => {
  while (!document.querySelector(".search-summary")?.textContent) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  return [...document.querySelectorAll("ul.search a")].map((each) => each.getAttribute("href"));
})()
"""


class BrowserError(Exception):
    """Chromium ended, or did not do what it was asked to."""


class Browser:
    """A headless Chromium with one page, for a ``with`` block.

    Args:
        command: the path of Chromium.
        folder: where it keeps its files.
    """

    def __init__(self, command: str, folder: str) -> None:
        self._number = 0
        self._events: list[dict[str, Any]] = []
        theirs_in, ours_out = map(_move_up, os.pipe())
        ours_in, theirs_out = map(_move_up, os.pipe())

        def connect() -> None:
            # The protocol names these two numbers.
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(  # noqa: S603  # Chromium, with our own arguments
            [command, *_FLAGS, f"--user-data-dir={folder}"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            env=os.environ | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out = os.fdopen(ours_out, "wb", buffering=0)
        self._in = os.fdopen(ours_in, "rb")
        self._session = ""

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for area in ("Page", "Runtime", "Log"):
            self.call(f"{area}.enable")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self._events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            else:
                return dict(answer["result"])

    def wait_for(self, event: str) -> None:
        """Wait for an event of the protocol."""
        while all(each.get("method") != event for each in self._events):
            self._events.append(self._read())

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events so far, and forget them."""
        events, self._events = self._events, []
        return events

    def _read(self) -> dict[str, Any]:
        """Return the next message, which ends with a zero byte."""
        timer = threading.Timer(_PATIENCE, self._process.kill)
        timer.start()
        try:
            found = bytearray()
            while (byte := self._in.read(1)) != b"\0":
                if not byte:
                    raise BrowserError("Chromium has ended, or gives no answer")
                found += byte
        finally:
            timer.cancel()
        return dict(json.loads(found))


def _move_up(descriptor: int) -> int:
    """Return a copy of a file descriptor that is neither 3 nor 4, and close the other one."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class _Server(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/favicon.ico":  # Chromium asks for it, and no page does
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine alone, in a block that gets the address."""
    handler = partial(_Server, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def find_problems(folder: Path, pages: Sequence[str] = ()) -> Iterator[str]:
    """Open the pages of a site; yield one line for each problem.

    Args:
        folder: the root of the site.
        pages: their names in the folder; empty for all of them.

    Raises:
        BrowserError: if there is no Chromium, or it does not answer.
    """
    command = find_chromium()
    if command is None:
        raise BrowserError(f"none of {', '.join(NAMES)} is installed")
    searches = {} if pages or not (folder / "search.html").is_file() else SEARCHES
    pages = pages or list(_list_pages(folder))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
        serve(folder) as address,
        Browser(command, home) as browser,
    ):
        for width in WIDTHS:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            for page in pages:
                for problem in _open(browser, f"{address}/{quote(page)}", _LOOK):
                    yield f"{page} at {width} px: {problem}"
        for words, expected in searches.items():
            found = _open(browser, f"{address}/search.html?q={quote(words)}", _FOUND)
            links = [each.partition("#")[0] for each in found]
            if links[:1] != [expected]:
                yield f"the search for {words!r} does not begin with {expected}: {links[:3]}"
            if LAST in links and {*links[links.index(LAST) :]} != {LAST}:
                yield f"the search for {words!r} has pages behind {LAST}"


def _list_pages(folder: Path) -> Iterator[str]:
    """Yield the names of the pages, without those that only lead to another one."""
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder)
        if "_static" not in name.parts and 'http-equiv="refresh"' not in path.read_text("utf-8"):
            yield name.as_posix()


def _open(browser: Browser, address: str, script: str) -> list[str]:
    """Return the problems of a page: errors in its console, and what a script returns."""
    browser.take_events()
    browser.call("Page.navigate", url=address)
    browser.wait_for("Page.loadEventFired")
    seen = browser.call(
        "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
    )
    if "exceptionDetails" in seen:
        raise BrowserError(f"{address}: {seen['exceptionDetails']['text']}")
    errors = [_read_error(event) for event in browser.take_events()]
    return [*filter(None, errors), *seen["result"]["value"]]


def _read_error(event: dict[str, Any]) -> str:
    """Return the text of an error in the console; empty for another event."""
    parameters = event.get("params", {})
    if event.get("method") == "Runtime.exceptionThrown":
        details = parameters["exceptionDetails"]
        text = details.get("exception", {}).get("description", details["text"])
        return f"error: {text.splitlines()[0]}"
    if event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
        return "error: " + " ".join(
            str(each.get("value", each.get("description"))) for each in parameters["args"]
        )
    if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
        entry = parameters["entry"]
        return f"error: {entry['text']} {entry.get('url', '')}".rstrip()
    return ""


def main() -> int:
    """Print the problems of the folder on the command line; return 1 if there are any."""
    folder, *pages = sys.argv[1:]
    if find_chromium() is None:
        sys.stdout.write(f"no page was opened: none of {', '.join(NAMES)} is installed\n")
        return 0
    problems = list(find_problems(Path(folder).resolve(), pages))
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
