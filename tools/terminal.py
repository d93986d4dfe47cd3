"""Draw the README's picture of a terminal: ``python tools/terminal.py`` where all frameworks are.

The commands run in a new folder, and the picture holds what they printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
PROGRAM = """\
from d2ldev import backend

X = backend.ones((2, 3), device="gpu:0")
Y = backend.to(X, "gpu:1")
kind = type(Y).__name__
print(backend.name, kind, backend.device_of(Y))
with backend.strict():
    X + Y
"""
COMMANDS = (
    "cat add.py",
    "export D2LDEV_VIRTUAL_GPUS=2",
    "for name in torch jax mxnet tensorflow; do\n"
    "  D2LDEV_BACKEND=$name python add.py\n"
    "done 2>errors",
    "grep -c DeviceMismatchError errors",
    "tail -n 3 errors | fold -sw 48",
)

# A phone shows this many characters in a line that can be read.
COLUMNS = 48
CHARACTER, LINE, MARGIN, TOP = 8.4, 19, 16, 40
# With its own background the picture is readable on a light page and on a dark one.
STYLE = """\
.frame { fill: #161b22; stroke: #6e7681; }
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }
.input { fill: #7ee787; }
.output { fill: #e6edf3; }"""


def main() -> None:
    """Run the commands, and write the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(record(COMMANDS)), encoding="utf-8")


def record(commands: tuple[str, ...]) -> list[str]:
    """Run the commands in one shell, and return the lines of a terminal of ``COLUMNS``."""
    script = "".join(f"{command}\nprintf '\\0'\n" for command in commands)
    variables = {key: each for key, each in os.environ.items() if not key.startswith("D2LDEV_")}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with TemporaryDirectory() as folder:
        Path(folder, "add.py").write_text(PROGRAM, encoding="utf-8")
        done = subprocess.run(  # noqa: S603
            ["bash", "-c", script],  # noqa: S607
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    lines: list[str] = []
    for command, output in zip(commands, done.stdout.split("\0"), strict=False):
        lines.extend(f"{'>' if i else '$'} {line}" for i, line in enumerate(command.splitlines()))
        for line in output.splitlines():
            lines.extend(line[i : i + COLUMNS] for i in range(0, max(len(line), 1), COLUMNS))
    return lines


def draw(lines: list[str]) -> str:
    """Return a picture of the lines of a terminal, as SVG."""
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, TOP + len(lines) * LINE + MARGIN / 2
    drawn = [
        f'<text class="{"input" if line[:2] in ("$ ", "> ") else "output"}" x="{MARGIN}" '
        f'y="{TOP + (number + 0.5) * LINE}" textLength="{len(line) * CHARACTER:.1f}">'
        f"{escape(line, quote=False)}</text>"
        for number, line in enumerate(lines)
        if line
    ]
    dots = [
        f'<circle cx="{MARGIN + 6 + 20 * number}" cy="20" r="6" fill="{colour}"/>'
        for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" xml:space="preserve" role="img">',
            "<title>One program in a terminal, on four frameworks</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="frame" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}"/>',
            *dots,
            *drawn,
            "</svg>\n",
        ]
    )


def read(picture: str) -> list[str]:
    """Return the lines of a picture, without the empty ones."""
    return [unescape(line) for line in re.findall(r"<text [^>]*>([^<]*)</text>", picture)]


if __name__ == "__main__":
    main()
