"""Write the README's tables from the results that are kept: ``python tools/readme_tables.py``.

``conformance/results/*.json`` are reports of the suite, ``benchmarks/results/*.json`` those
of the benchmark. Nothing in the README that is a figure of ours is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Rewrite the tables in README.md."""
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(readme: str) -> str:
    """Return the README's text with its tables as the results have them."""
    tables = {
        "support": support_rows(),
        "overhead": overhead_rows(),
        "log": log_rows(),
        "training": training_rows(),
        "files": files_rows(),
    }
    for name, rows in tables.items():
        block = "\n".join([f"<!-- {name} -->", *rows, f"<!-- end of {name} -->"])
        pattern = rf"<!-- {name} -->.*?<!-- end of {name} -->"
        readme = re.sub(pattern, lambda _, block=block: block, readme, flags=re.DOTALL)
    return readme


def support_rows() -> Iterator[str]:
    """Return one row for each kept report of the conformance suite."""
    yield "| backend | on | requirements | versions | date |"
    yield "|---|---|---|---|---|"
    for report in _documents(ROOT / "conformance" / "results"):
        summary = report["summary"]
        counts = ", ".join(f"{count} {outcome}" for outcome, count in summary.items() if count)
        cards = ", ".join(report["cards"])
        platforms = dict.fromkeys(device["platform"] for device in report["devices"])
        where = " + ".join(platforms) + (f" ({cards})" if cards else "")
        versions = ", ".join(
            f"{name} {version}" for name, version in report["versions"].items() if name != "d2ldev"
        )
        yield f"| {report['backend']} | {where} | {counts} | {versions} | {report['date'][:10]} |"


def overhead_rows() -> Iterator[str]:
    """Return one row for each comparison of the benchmark through the handle."""
    yield "| | with d2ldev | without | ratio | aim |"
    yield "|---|---|---|---|---|"
    for document in _documents(ROOT / "benchmarks" / "results", "overhead-*"):
        for result in document["results"]:
            if result["value"] is None or result["ours_statement"].startswith("d2l."):
                continue
            unit = "" if result["unit"] == "ratio" else f" {result['unit']}"
            aim = "" if result["aim"] is None else f"{result['aim']:g}"
            ours, theirs = (
                result[side].replace("|", "/") for side in ("ours_statement", "theirs_statement")
            )
            value = f"{result['value']:.3g}{unit}"
            yield f"| {result['name']} | `{ours}` | `{theirs}` | {value} | {aim} |"


def log_rows() -> Iterator[str]:
    """Return one row for each framework on which the log was compared with reading each loss."""
    yield "| | on | with a log | reading each | ratio | aim |"
    yield "|---|---|---|---|---|---|"
    for framework, document, result, ours, theirs in _comparisons("device-log-*"):
        if result["aim"] is not None:
            figures = f"{ours} | {theirs} | {result['value']:.3g} | {result['aim']:g}"
            yield f"| {framework} | {document['platform']} | {figures} |"


def training_rows() -> Iterator[str]:
    """Return one row for each training loop that ``Trainer.fit`` was compared with."""
    yield "| | epoch | with `Trainer` | the loop | without | ratio | aim |"
    yield "|---|---|---|---|---|---|---|"
    for framework, _, result, ours, theirs in _comparisons("training-*"):
        loop = f"{result['theirs_statement']} | {theirs}"
        figures = f"{result['value']:.3g} | {result['aim']:g}"
        yield f"| {framework} | {result['name']} | {ours} | {loop} | {figures} |"


def files_rows() -> Iterator[str]:
    """Return one row for each comparison with the safetensors library."""
    yield "| | | with d2ldev | without | ratio |"
    yield "|---|---|---|---|---|"
    for framework, _, result, ours, theirs in _comparisons("files-*"):
        yield f"| {framework} | {result['name']} | {ours} | {theirs} | {result['value']:.3g} |"


def _comparisons(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str, str]]:
    """Yield each result of a benchmark: framework, document, the result, and the two times."""
    for document in _documents(ROOT / "benchmarks" / "results", name):
        framework = next(name for name in document["versions"] if name != "d2ldev")
        for result in document["results"]:
            ours, theirs = (f"{result[side] * 1e3:.3g} ms" for side in ("ours", "theirs"))
            yield framework, document, result, ours, theirs


def _documents(folder: Path, name: str = "*") -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"{name}.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
