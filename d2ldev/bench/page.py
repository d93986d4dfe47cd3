"""Results for people: plots, and one page that compares backends and needs no network."""

from __future__ import annotations

import base64
import html
import importlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from d2ldev.bench.conclusions import number
from d2ldev.bench.results import VIRTUAL, Figures, Result, Row, bests, by_exercise
from d2ldev.dependencies import import_optional
from d2ldev.files.format.atomic import replace_file

_TIMES = ((1, "s"), (1e3, "ms"), (1e6, "us"))
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 14px; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ccc; padding: .2rem .7rem; text-align: left }
td:nth-child(n+4) { text-align: right; white-space: nowrap }
img { max-width: 100%; background: white }
.error { color: #b00 }
"""


def require_matplotlib() -> None:
    """Check, before anything is measured, that plots can be drawn.

    Raises:
        PackageNotInstalledError: if matplotlib is missing.
    """
    fix = "pip install 'd2ldev[plots]', or leave out --out"
    import_optional("matplotlib.figure", "draw what was measured", install=fix)


def write(folder: Path, document: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write ``results.json``, the plots of each exercise, and ``index.html``.

    Args:
        folder: one that exists; files of these names are replaced, each as a whole.
        document: what ``results.json`` holds.
        results: of any number of exercises and backends.

    Raises:
        OSError: if they cannot be written.
    """
    parts = []
    for exercise, of_it in by_exercise(results).items():
        drawn = {kind: plot(of_it, kind) for kind in ("svg", "png")}
        for kind, data in drawn.items():
            if data:
                _replace(folder / f"{exercise}.{kind}", data)
        parts.append(_section(of_it, drawn["svg"], document["comparisons"].get(exercise, "")))
    _replace(folder / "results.json", json.dumps(document, indent=2).encode())
    _replace(folder / "index.html", _page(document, "\n".join(parts)).encode())


def _replace(path: Path, data: bytes) -> None:
    with replace_file(str(path)) as new:
        Path(new).write_bytes(data)


def plot(results: Sequence[Result], kind: str) -> bytes:
    """Return a picture of one exercise on all backends: ``'svg'`` or ``'png'``; empty if empty."""
    if not any(_lines(results)):
        return b""
    data = io.BytesIO()
    # Without its date, so that the same figures make the same file.
    metadata = {"Date": None} if kind == "svg" else None
    figure_of(results).savefig(data, format=kind, metadata=metadata)
    return data.getvalue()


def figure_of(results: Sequence[Result]) -> Any:
    """Return matplotlib's figure of one exercise on all backends, which has something to show."""
    lines = list(_lines(results))
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 4 + 0.15 * len(lines) if lines[0][1][0].size else 1.5 + 0.35 * len(lines)),
        layout="constrained",
    )
    axes = figure.subplots()
    if lines[0][1][0].size:
        for label, rows in lines:
            axes.plot([row.size for row in rows], _rates(rows), marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel="width", ylabel=results[0].unit)
        sizes = sorted({row.size for _, rows in lines for row in rows if row.size})
        axes.set_xticks(sizes, labels=map(str, sizes))
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside lower center", ncols=min(len(lines), 2))
    else:
        axes.barh([label for label, _ in lines], [_rates(rows)[0] for _, rows in lines])
        axes.invert_yaxis()
        axes.set_xlabel(results[0].unit)
    figure.suptitle(results[0].question, wrap=True)
    return figure


def _lines(results: Sequence[Result]) -> Iterator[tuple[str, list[Row]]]:
    """Yield what a plot shows, with its label: all sizes of a device, or one way there."""
    lines: dict[str, list[Row]] = {}
    for result in results:
        for row in result.rows:
            if row.figures is not None:
                label = ", ".join(filter(None, (result.backend, place(row), row.precision)))
                lines.setdefault(label if row.size else f"{label}: {row.way}", []).append(row)
    yield from lines.items()


def _rates(rows: Sequence[Row]) -> list[float]:
    return [row.figures.rate for row in rows if row.figures is not None]


def place(row: Row) -> str:
    """Return the device of a row, and whether it is virtual."""
    return f"{row.device} (virtual)" if row.platform == VIRTUAL else row.device


def cells(result: Result) -> Iterator[list[str]]:
    """Yield the heads of a table, and the cells of each row."""
    yield ["device", "what", "products", "time (quartiles)", result.unit, "of its best"]
    best = bests(result.rows)
    for row in result.rows:
        figures = ["-", "-", "-"]
        if found := row.figures:
            part = found.rate / best[row.device]
            figures = [_time(found), number(found.rate), f"{part:.0%}"]
        yield [place(row), row.way, row.precision, *figures]


def remarks(result: Result) -> list[str]:
    """Return why rows have no figures, each with its row."""
    return [f"{place(row)}, {row.way}: {row.note}" for row in result.rows if row.note]


def _time(found: Figures) -> str:
    factor, unit = next((each for each in _TIMES if found.seconds * each[0] >= 1), _TIMES[-1])
    median, low, high = (number(x * factor) for x in (found.seconds, found.low, found.high))
    return f"{median} {unit} ({low} to {high})"


def _section(results: Sequence[Result], picture: bytes, comparison: str) -> str:
    title = html.escape(f"{results[0].exercise}: {results[0].question}")
    lines = [f"<h2>{title}</h2>"]
    if comparison:
        lines.append(f"<p>{html.escape(comparison)}</p>")
    if picture:
        data = base64.b64encode(picture).decode()
        lines.append(f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">')
    for result in results:
        lines += [
            f"<h3>{html.escape(result.backend)}</h3>",
            f"<p>{html.escape(result.conclusion)}</p>",
        ]
        if result.error is not None:
            lines.append(f'<pre class="error">{html.escape(result.error)}</pre>')
        heads, *rows = cells(result)
        if rows:
            lines += ["<table>", _line("th", heads)]
            lines += [*(_line("td", row) for row in rows), "</table>"]
        lines += [f"<p>{html.escape(remark)}</p>" for remark in remarks(result)]
    return "\n".join(lines)


def _line(tag: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"


def describe_machine(document: Mapping[str, Any]) -> str:
    """Say which machine was measured on, and how much others computed there."""
    on = document["machine"]
    hardware = [f"{on['cores']} cores of {on['processor'] or on['system']}", *on["cards"]]
    load = "" if on["load"] is None else f" Its load was {on['load']:g} before."
    return f"Measured on {', '.join(hardware)}.{load}"


def threads(backend: Mapping[str, Any]) -> str:
    """Say with how many threads a backend computes on the CPU."""
    number = backend["threads"]
    said = "does not say with how many threads it computes" if number is None else None
    many = "one thread" if number == 1 else f"{number} threads"
    return f"{backend['name']} {said or f'computes with {many}'} on the CPU"


def _page(document: Mapping[str, Any], body: str) -> str:
    facts = []
    for backend in document["backends"]:
        versions = ", ".join(f"{name} {version}" for name, version in backend["versions"].items())
        text = f"{backend['name']}: {versions or 'no versions'}"
        computes = [threads(backend)] if backend["error"] is None else []
        said = (text, *computes, *backend["notes"])
        facts += [f"<li>{html.escape(x)}</li>" for x in said]
        if backend["error"] is not None:
            facts.append(f'<li><pre class="error">{html.escape(backend["error"])}</pre></li>')
    common = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    warning = document["machine"]["warning"]
    warned = f'<p class="error">{html.escape(warning)}</p>' if warning else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>d2ldev bench</title><style>{_STYLE}</style></head>
<body>
<h1>d2ldev bench</h1>
<p>{html.escape(document["date"])}: {html.escape(common)}</p>
<p>{html.escape(describe_machine(document))}</p>
{warned}
<ul>{"".join(facts)}</ul>
<p>A time is the median of several runs; every device is waited for before and after each.
The best of a device is the highest rate in its table: of products, the peak that was measured.
Products of float32 are computed in what stands beside the row: highest is float32, high is
TensorFloat-32, medium bfloat16, or a better one.</p>
{body}
</body>
</html>
"""
