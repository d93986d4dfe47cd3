"""One self-contained HTML page of a matrix, which works without scripts and without network.

The page has the style and the script in itself. The script only filters.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from d2ldev_conformance.progress import OUTCOMES
from d2ldev_conformance.runs import name_framework, name_gpus, name_origin

_ABSENT = "not in this run"
# Colour alone says nothing to some readers, and nothing on paper.
_SYMBOLS = {
    "passed": "\u2713",
    "failed": "\u2717",
    "not begun": "\u25cb",
    "known gap": "\u25b3",
    "cannot": "\u00d8",
    "skipped": "\u2212",
    "not run": "\u2026",
    _ABSENT: "\u00b7",
}
_SCRIPT = """
const form = document.querySelector("form");
const bodies = [...document.querySelectorAll("tbody")];
function filter() {
  const { outcome, module, run } = Object.fromEntries(new FormData(form));
  const text = form.elements.text.value.trim().toLowerCase();
  const column = run ? Number(run) : 0;
  document.body.className = column ? "one" : document.body.dataset.kind;
  for (const row of document.querySelectorAll("tr")) {
    [...row.cells].forEach((cell, number) => {
      cell.hidden = Boolean(column && number && number !== column);
    });
  }
  let count = 0;
  for (const body of bodies) {
    let shown = 0;
    for (const row of body.querySelectorAll("tr.requirement")) {
      row.hidden = Boolean((module && body.dataset.module !== module)
        || (outcome && ![...row.cells].some((cell) => !cell.hidden && cell.className === outcome))
        || (text && ![...row.cells].some((cell) => !cell.hidden
          && cell.textContent.toLowerCase().includes(text))));
      shown += !row.hidden;
    }
    body.hidden = !shown;
    count += shown;
  }
  form.elements.count.value = count + (count === 1 ? " requirement" : " requirements");
}
form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = false;
filter();
"""
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
  script-src 'sha256-$digest'; form-action 'none'; base-uri 'none'">
<title>$title</title>
<style>
:root { --page: #fff; --text: #1c2024; --weak: #5b6570; --line: #d5dae0; --head: #f1f3f5;
  --passed: #17692f; --failed: #b3182b; --failed-back: #fde5e7; --gap: #8a4b00;
  --skipped: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e4e8ec; --weak: #9aa5b1; --line: #343b43; --head: #1f2429;
    --passed: #6fd08c; --failed: #ff9aa2; --failed-back: #4a1a20; --gap: #f0b35c;
    --skipped: #a4afba; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; max-width: 110rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
ul { list-style: none; margin: 0 0 1rem; padding: 0; }
li { margin: .25rem 0; }
small { color: var(--weak); }
form { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: end; margin: 1rem 0; }
label { display: grid; gap: .15rem; grid-template-columns: minmax(0, auto); max-width: 100%; }
select, input { font: inherit; color: inherit; background: var(--page); max-width: 100%;
  border: 1px solid var(--line); border-radius: .3rem; padding: .35rem .5rem; height: 2.3rem; }
.scroll { overflow: auto; border: 1px solid var(--line); border-radius: .3rem; }
.many .scroll { max-height: 88vh; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; font-weight: normal;
  border-bottom: 1px solid var(--line); }
/* Chromium draws a background of a sticky cell over the line above it. */
th { background: var(--page); background-clip: padding-box; }
.many th:first-child { position: sticky; left: 0; z-index: 1; border-right: 1px solid var(--line);
  min-width: 17rem; }
.many td, .many thead th { min-width: 6rem; white-space: nowrap; }
.many thead th { position: sticky; top: 0; z-index: 2; background: var(--head);
  line-height: 1.3; }
.many thead th:first-child { z-index: 3; }
tr.module th, tr.module td { background: var(--head); font-weight: bold; }
.one th { width: 24rem; }
span { white-space: nowrap; }
.passed { color: var(--passed); }
.failed { color: var(--failed); }
td.failed { background: var(--failed-back); }
.known-gap, .not-begun, .cannot { color: var(--gap); }
.skipped, .not-run, .not-in-this-run { color: var(--skipped); }
.failed, .known-gap, .not-begun { font-weight: bold; }
summary { cursor: pointer; }
.told { color: var(--text); font-weight: normal; margin: .3rem 0 .2rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.many td .told { width: min(24rem, 50vw); }
pre.told { font-size: .8rem; max-height: 24rem; overflow-y: auto; }
@media (max-width: 40rem) {
  body { padding: .75rem; }
  .one table, .one tbody { display: block; }
  .one thead { display: none; }
  .one tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--line); }
  .one th, .one td { border: 0; }
  .one th { flex: 1 1 9rem; }
  .one td { flex: 0 1 auto; }
  .one td:has([open]) { flex-basis: 100%; }
  .many th:first-child { min-width: 9rem; }
}
@media print { .scroll, .many .scroll { overflow: visible; max-height: none; }
  th { position: static; } }
</style>
</head>
<body class="$kind" data-kind="$kind">
<h1>$title</h1>
$runs
$notes
<form hidden>
$columns
<label>outcome <select name="outcome"><option value="">all</option>$outcomes</select></label>
<label>module <select name="module"><option value="">all</option>$modules</select></label>
<label>text <input name="text" type="search" autocomplete="off"></label>
<output name="count"></output>
</form>
<div class="scroll" tabindex="0" role="region" aria-label="requirements">
<table>
<thead><tr><th scope="col">requirement</th>$heads</tr></thead>
$bodies
</table>
</div>
<script>$script</script>
</body>
</html>
""")


def write_page(matrix: dict[str, Any], path: Path) -> None:
    """Write the page of a matrix into a file."""
    # The reason of a test may have half of a surrogate pair.
    path.write_bytes(format_page(matrix).encode("utf-8", "backslashreplace"))


def format_page(matrix: dict[str, Any]) -> str:
    """Return the page of a matrix.

    Args:
        matrix: as ``matrix.build_matrix`` returns it, of one run or of many.
    """
    runs, rows = matrix["runs"], matrix["requirements"]
    has_one = len(runs) == 1
    name = runs[0]["backend"] if has_one else f"{len(runs)} runs"
    found = {outcome for row in rows for outcome in _outcomes_of(row)}
    outcomes = [each for each in _SYMBOLS if each in found]
    modules = {row["module"]: None for row in rows}
    return _PAGE.substitute(
        title=escape(f"Conformance of {name}"),
        script=_SCRIPT,
        digest=b64encode(sha256(_SCRIPT.encode()).digest()).decode(),
        kind="one" if has_one else "many",
        runs=_format_runs(runs),
        notes=_format_notes(matrix["notes"]),
        columns=_format_columns(runs),
        outcomes="".join(_format_option(_slug(each), each) for each in outcomes),
        modules="".join(_format_option(each, each) for each in modules),
        heads="".join(map(_format_head, runs)),
        bodies="\n".join(
            line
            for module, group in groupby(rows, lambda row: row["module"])
            for line in _format_module(module, list(group))
        ),
    )


def _format_runs(runs: Sequence[dict[str, Any]]) -> str:
    """Return the list of runs, which is closed at first if there are many."""
    entries = _format_list(map(_format_run, runs))
    return entries if len(runs) == 1 else _format_details("The runs", entries)


def _format_notes(notes: Sequence[str]) -> str:
    """Return what to know before comparing the runs, which is closed at first."""
    if not notes:
        return ""
    shown = "1 note" if len(notes) == 1 else f"{len(notes)} notes"
    return _format_details(shown, _format_list(map(escape, notes)))


def _format_list(entries: Iterable[str]) -> str:
    lines = "\n".join(f"<li>{entry}</li>" for entry in entries)
    return f"<ul>\n{lines}\n</ul>"


def _format_columns(runs: Sequence[dict[str, Any]]) -> str:
    """Return the choice of a run, if there are many."""
    if len(runs) == 1:
        return ""
    options = "".join(
        _format_option(str(number), run["source"]) for number, run in enumerate(runs, 1)
    )
    return f'<label>run <select name="run"><option value="">all</option>{options}</select></label>'


def _format_run(run: dict[str, Any]) -> str:
    """Return what is known of a run, as an entry of the list."""
    versions = [f"{name} {version}" for name, version in run["versions"].items()]
    devices = [f"{each['device']} ({each['platform']})" for each in run["devices"]]
    facts = [
        *(", ".join(devices), *run["cards"], run["machine"], ", ".join(versions)),
        f"interface {run.get('interface') or 'unknown'}",
        f"commit {run['commit'] or 'unknown'}",
        f"suite {run['suite'] or 'unknown'}",
        run["date"].replace("T", " "),
    ]
    if run["exit_status"] is not None:
        facts.append(f"exit status {run['exit_status']}")
    counts = ", ".join(
        _format_outcome(each, f"{run['summary'][each]} {each}")
        for each in OUTCOMES
        if run["summary"].get(each)
    )
    told = escape("; ".join(facts))
    return f"<b>{escape(run['source'])}</b>: {counts}<br><small>{told}</small>"


def _format_head(run: dict[str, Any]) -> str:
    """Return the head of a run's column."""
    facts = (name_framework(run), name_gpus(run), *name_origin(run), run["date"][:10])
    told = "<br>".join(map(escape, facts))
    return f'<th scope="col"><b>{escape(run["backend"])}</b><br><small>{told}</small></th>'


def _format_module(module: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a module: how many requirements passed in each run, and the rows."""
    name = escape(module)
    cells = [
        Counter(cell["outcome"] for cell in column if cell)
        for column in zip(*(row["cells"] for row in rows), strict=True)
    ]
    counts = "".join(f"<td>{count['passed']} of {count.total()}</td>" for count in cells)
    yield f'<tbody data-module="{name}">'
    yield f'<tr class="module"><th scope="rowgroup">{name}</th>{counts}</tr>'
    for row in rows:
        head = f"{escape(row['requirement'])} <small>{escape(row['section'])}</small>"
        if row["asks"]:
            head = _format_details(head, "".join(map(_format_line, row["asks"])))
        columns = "".join(map(_format_cell, row["cells"]))
        yield f'<tr class="requirement"><th scope="row">{head}</th>{columns}</tr>'
    yield "</tbody>"


def _format_cell(cell: dict[str, Any] | None) -> str:
    """Return a cell, which opens if the report has a reason or an error."""
    outcome = _outcome_of(cell)
    told = _format_told(cell) if cell else ""
    shown = f"{_SYMBOLS[outcome]} {outcome}"
    if told:
        shown = _format_details(shown, told)
    return f'<td class="{_slug(outcome)}">{shown}</td>'


def _format_told(cell: dict[str, Any]) -> str:
    errors = "".join(f'<pre class="told">{escape(each)}</pre>' for each in cell["errors"])
    # The first line of an error is a reason, too, after the phase of the test.
    reasons = [
        each
        for each in cell["reasons"]
        if not (line := each.partition(": ")[2]) or not any(line in x for x in cell["errors"])
    ]
    return "".join(map(_format_line, reasons)) + errors


def _format_line(text: str) -> str:
    return f'<p class="told">{escape(text)}</p>'


def _format_details(shown: str, told: str) -> str:
    return f"<details><summary>{shown}</summary>{told}</details>"


def _format_outcome(outcome: str, text: str) -> str:
    return f'<span class="{_slug(outcome)}">{_SYMBOLS[outcome]} {escape(text)}</span>'


def _format_option(value: str, text: str) -> str:
    return f'<option value="{escape(value)}">{escape(text)}</option>'


def _outcomes_of(row: dict[str, Any]) -> list[str]:
    """Return the outcome of a requirement in each run."""
    return [_outcome_of(cell) for cell in row["cells"]]


def _outcome_of(cell: dict[str, Any] | None) -> str:
    return str(cell["outcome"]) if cell else _ABSENT


def _slug(outcome: str) -> str:
    """Return an outcome as the name of a class."""
    return outcome.replace(" ", "-")
