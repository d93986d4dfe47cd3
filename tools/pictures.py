"""Draw the pictures of the explanation: ``python tools/pictures.py``.

It writes SVG files beside the pages, without a package. A name of the code in a picture has an
attribute ``data-name``: a test looks it up. The figures of the plot are those of
``benchmarks/results``. A browser chooses the dark colours as it does for the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path

from tables import OVERHEAD, find_overhead

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "explanation"
WIDTH = 400  # a phone shows it in its own size
STYLE = """
.paper { fill: #ffffff; }
.you { fill: #ddf4ff; }
.core { fill: #fff4c2; }
.area { fill: #d8f6df; }
.native { fill: #eff2f5; }
.lane { fill: #f6f8fa; }
rect { stroke: none; }
.line { stroke: #6e7781; fill: none; }
.grid { stroke: #d0d7de; fill: none; }
.head { fill: #6e7781; }
text { fill: #1f2328; font: 13px system-ui, sans-serif; }
.name { font: 13px ui-monospace, monospace; }
.title { font-weight: 600; }
.note { fill: #57606a; }
.torch { fill: #bc4c00; } .jax { fill: #6639ba; } .tensorflow { fill: #0550ae; }
.mxnet { fill: #116329; }
@media (prefers-color-scheme: dark) {
.paper { fill: #14181e; }
.you { fill: #0c3050; }
.core { fill: #453a08; }
.area { fill: #133a20; }
.native { fill: #2b323b; }
.lane { fill: #1d232b; }
.line { stroke: #9198a1; }
.grid { stroke: #3d444d; }
.head { fill: #9198a1; }
text { fill: #e6edf3; }
.note { fill: #a9b4c0; }
.torch { fill: #ffa657; } .jax { fill: #d2a8ff; } .tensorflow { fill: #79c0ff; }
.mxnet { fill: #7ee787; }
}
"""


class Picture:
    """The elements of a picture, from top to bottom.

    Args:
        height: the height in pixels; the width is ``WIDTH``.
        title: one line for those who cannot see it.
    """

    def __init__(self, height: int, title: str) -> None:
        self._height, self._title = height, title
        self._lines: list[str] = []

    def draw_box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a box; ``kind`` is a class of the style."""
        self._lines.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="5"/>'
        )

    def write(
        self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start"
    ) -> None:
        """Write a line of text, whose baseline is at ``y``."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._lines.append(f'<text class="{kind}" {place}>{escape(text, quote=False)}</text>')

    def write_name(self, x: float, y: float, name: str, *, is_whole: bool = False) -> None:
        """Write a name of the code: all of ``Learner.step``, or its last part."""
        shown = name if is_whole else name.rpartition(".")[2]
        place = f'x="{x:g}" y="{y:g}" text-anchor="start"'
        self._lines.append(f'<text class="name" data-name="{name}" {place}>{shown}</text>')

    def draw_arrow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow along some points; the last piece is horizontal or vertical."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        path = " ".join(f"{px:g},{py:g}" for px, py in points)
        self._lines.append(f'<polyline class="line" points="{path}"/>')
        tip = (
            (x, y),
            (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx),
            (x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx),
        )
        self._lines.append(
            f'<polygon class="head" points="{" ".join(f"{px:g},{py:g}" for px, py in tip)}"/>'
        )

    def draw_line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "grid") -> None:
        """Draw a line."""
        self._lines.append(
            f'<line class="{kind}" x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"/>'
        )

    def draw_mark(self, x: float, y: float, kind: str) -> None:
        """Draw the mark of a framework around a point: each has a shape and a colour of its own."""
        corners = {
            "jax": ((-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)),
            "tensorflow": ((0, -6), (6, 5), (-6, 5)),
            "mxnet": ((0, -6), (6, 0), (0, 6), (-6, 0)),
        }
        if kind == "torch":
            self._lines.append(f'<circle class="torch" cx="{x:g}" cy="{y:g}" r="5"/>')
            return
        points = " ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in corners[kind])
        self._lines.append(f'<polygon class="{kind}" points="{points}"/>')

    def finish(self) -> str:
        """Return the picture as SVG."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{self._height}"/>',
                *self._lines,
                "</svg>\n",
            ]
        )


def draw_layers() -> str:
    """Return the picture of Backend, Framework and the areas."""
    picture = Picture(604, "From your program through Backend and Framework to the framework")
    left, width = 12, 284
    middle = left + width / 2

    picture.draw_box(left, 12, 376, 40, "native")
    picture.write(left + 10, 37, "your program", "title")
    picture.write(378, 37, "native tensors in and out", "note", anchor="end")
    picture.draw_arrow((middle, 52), (middle, 76))

    picture.draw_box(left, 76, width, 92, "you")
    picture.write_name(left + 10, 98, "Backend")
    picture.write(left + 76, 98, "what you call", "note")
    for i, name in enumerate(("ones", "to", "place", "save", "load", "strict", "split", "learner")):
        picture.write_name(left + 10 + 70 * (i % 4), 126 + 26 * (i // 4), f"Backend.{name}")
    picture.draw_arrow((middle, 168), (middle, 192))

    picture.draw_box(left, 192, width, 92, "core")
    picture.write(left + 10, 214, "one rule for all frameworks", "note")
    names = ("operations", "nesting", "files", "training", "distributed", "leaks")
    for i, name in enumerate(names):
        path = f"d2ldev.{name}"
        picture.write_name(left + 10 + 94 * (i % 3), 242 + 26 * (i // 3), path)
    picture.draw_arrow((middle, 284), (middle, 308))

    picture.draw_box(left, 308, width, 118, "area")
    picture.write_name(left + 10, 330, "Framework")
    picture.write(left + 92, 330, "what an author writes", "note")
    areas = ("devices", "tensors", "models", "files", "training", "strict", "parallel")
    for i, name in enumerate(areas):
        picture.write_name(left + 10 + 94 * (i % 3), 358 + 26 * (i // 3), f"Framework.{name}")
    picture.draw_arrow((middle, 426), (middle, 450))

    picture.draw_box(left, 450, width, 66, "area")
    packages = ("d2ldev_torch", "d2ldev_jax", "d2ldev_mxnet", "d2ldev_tensorflow")
    for i, name in enumerate(packages):
        picture.write_name(left + 10 + (130 if i % 2 else 0), 474 + 28 * (i // 2), name)
    picture.draw_arrow((middle, 516), (middle, 540))

    picture.draw_box(left, 540, 376, 52, "native")
    picture.write(left + 10, 562, "PyTorch, JAX, TensorFlow, MXNet", "title")
    picture.write(left + 10, 581, "its own tensors, models, autograd, kernels", "note")

    picture.draw_box(308, 76, 80, 440, "core")
    picture.write_name(316, 98, "d2ldev.registry")
    lines = (
        "finds the",
        "packages",
        "by their",
        "entry",
        "points,",
        "and loads",
        "the one",
        "that you",
        "choose",
    )
    for i, line in enumerate(lines):
        picture.write(316, 130 + 20 * i, line, "note")
    picture.draw_arrow((308, 122), (296, 122))
    picture.draw_arrow((308, 483), (296, 483))
    return picture.finish()


# Methods whose name alone says little.
METHODS = ("Feed.draw", "Learner.step", "DeviceLog.add", "Run.record")


def draw_batch() -> str:
    """Return the picture of a batch on its way through a step."""
    picture = Picture(624, "A batch on its way from the loader through a training step")
    picture.draw_box(8, 8, 186, 608, "lane")
    picture.draw_box(206, 8, 186, 608, "lane")
    picture.write(18, 30, "host", "title")
    picture.write(216, 30, "device", "title")

    def draw_step(x: float, y: float, kind: str, name: str, *lines: str) -> float:
        height = 34 + 19 * len(lines)
        picture.draw_box(x, y, 170, height, kind)
        picture.write_name(x + 9, y + 22, name, is_whole=name in METHODS)
        for i, line in enumerate(lines):
            picture.write(x + 9, y + 43 + 19 * i, line, "note")
        return y + height

    def draw_down(x: float, y: float) -> float:
        picture.draw_arrow((x, y), (x, y + 22))
        return y + 22

    end = draw_step(16, 42, "you", "ArrayLoader", "or your own loader:", "the global batch")
    top = draw_down(101, end)
    end = draw_step(
        16,
        top,
        "core",
        "Feed.draw",
        "casts the floats,",
        "takes the share of",
        "this process",
    )
    top = draw_down(101, end)
    end = draw_step(
        16,
        top,
        "core",
        "prefetching.device_batches",
        "copies two batches",
        "ahead, while the",
        "device computes",
    )
    picture.draw_arrow((186, top + 30), (214, top + 30))
    end = draw_step(
        214,
        top,
        "area",
        "Learner.step",
        "a shard for each GPU",
        "prediction, mean loss",
        "gradients, summed",
        "over GPUs, clipped",
        "the optimizer's step",
    )
    top = draw_down(299, end)
    end = draw_step(
        214,
        top,
        "core",
        "DeviceLog.add",
        "the loss stays here,",
        "and nobody waits",
    )
    picture.draw_arrow((214, top + 30), (186, top + 30))
    draw_step(16, top, "you", "Trainer.callbacks", "get the loss,", "without reading it")
    picture.draw_arrow((299, end), (299, end + 66), (186, end + 66))
    picture.write(291, end + 28, "once an epoch", "note", anchor="end")
    draw_step(16, end + 44, "core", "Run.record", "the history", "in Python floats")
    return picture.finish()


def draw_overhead() -> str:
    """Return the plot of the overhead: a row for each kind of call, a mark for each framework."""
    names = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
    top, step = 62, 50
    bottom = top + step * len(OVERHEAD)
    picture = Picture(bottom + 46, "Time with d2ldev, divided by the time without it")
    for i, (kind, name) in enumerate(names.items()):
        x = 16 + (0, 92, 158, 268)[i]
        picture.draw_mark(x, 22, kind)
        picture.write(x + 11, 27, name)

    def place(ratio: float) -> float:
        return 20 + 360 * (log10(ratio) + 2) / 2.5

    for ratio in (0.01, 0.1, 1):
        picture.draw_line(
            place(ratio), top - 14, place(ratio), bottom, "line" if ratio == 1 else "grid"
        )
        picture.write(place(ratio), bottom + 18, f"{ratio:g}", anchor="middle")
    picture.write(place(1) - 6, bottom + 38, "less time than without d2ldev", "note", anchor="end")
    picture.write(place(1) + 6, bottom + 38, "more", "note")
    for i, label in enumerate(OVERHEAD):
        y = top + step * i
        picture.write(20, y, label)
        for kind, ratio in find_overhead(label).items():
            picture.draw_mark(place(ratio), y + 18, kind)
    return picture.finish()


PICTURES = {"layers": draw_layers, "batch": draw_batch, "overhead": draw_overhead}


def main(names: Sequence[str] = tuple(PICTURES)) -> None:
    """Write the pictures beside the pages."""
    for name in names:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
