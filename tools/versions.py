"""Run the suite on the versions that the extras allow: ``python tools/versions.py [ROW ...]``.

``conformance/versions.toml`` has the rows. Each one is a new environment, which is removed before
the next, with the wheels unless ``UV_CACHE_DIR`` keeps them: those of PyTorch for CUDA are
gigabytes.
``uv`` makes it, and gets a Python that is not here.
The suite runs there with two virtual GPUs, or on the CPU where the version cannot make any.

A row leaves ``conformance/results/versions/NAME.json``: date, exact versions, and what failed.
``tools/tables.py`` writes the table of ``docs/versions.md`` from them. The exit status is 1 if a
row does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# d2ldev is installed where a row runs, and not here.
sys.path.append(str(ROOT / "conformance"))
from d2ldev_conformance.lines import format_lines  # noqa: E402

RESULTS = ROOT / "conformance" / "results" / "versions"
# What takes long is left to those who ask for it: --select "". Training stands on the other
# modules, and hostile arguments meet every framework each day.
SELECTED = "(devices or tensors or models or files or strict) and not hostile_arguments"
# The tools of the tests are the same in all rows.
TOOLS = ("hypothesis", "pytest", "pytest-xdist")
# A framework whose kernels wait for each other is no failure of a version.
SECONDS = 3600


def rows() -> list[dict[str, Any]]:
    """Return the rows of the file, each with the ``name`` of its results."""
    table = tomllib.loads((ROOT / "conformance" / "versions.toml").read_text(encoding="utf-8"))
    for row in table["rows"]:
        pins = [each.replace("==", "-") for each in row["install"]]
        row["name"] = "-".join([row["backend"], f"python-{row['python']}", *pins])
    return list(table["rows"])


def main() -> int:
    """Run the rows whose names match the arguments, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("row", nargs="*", help="names of rows, with * and ?")
    parser.add_argument(
        "--select", default=SELECTED, help="pytest's -k expression; empty selects all"
    )
    parser.add_argument("--own", action="store_true", help="run the backend's own tests, too")
    parser.add_argument("--logs", type=Path, help="the folder for each row's output and report")
    arguments = parser.parse_args()
    chosen = [
        row
        for row in rows()
        if not arguments.row or any(fnmatch(row["name"], pattern) for pattern in arguments.row)
    ]
    if not chosen:
        parser.error(f"no row is named so; there are:\n{_names()}")
    outcomes = []
    for row in chosen:
        result = result_of(row, arguments.select, arguments.logs, own=arguments.own)
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = format_lines(result)
        (RESULTS / f"{row['name']}.json").write_text(text, encoding="utf-8")
        sys.stdout.write(f"{row['name']}: {result['outcome']}\n")
        sys.stdout.flush()
        outcomes.append(result["outcome"])
    return int(set(outcomes) != {"holds"})


def _names() -> str:
    return "\n".join(row["name"] for row in rows())


def result_of(
    row: dict[str, Any], selected: str, logs: Path | None, *, own: bool
) -> dict[str, Any]:
    """Return what came of a row: ``outcome`` is holds, fails or cannot be installed."""
    result: dict[str, Any] = {
        "row": {name: row[name] for name in ("backend", "python", "install")},
        "date": datetime.now(UTC).date().isoformat(),
        "selected": selected,
        "gpus": gpus_of(row),
        "versions": {},
        "summary": {},
        "failed": {},
        "own": "",
    }
    with tempfile.TemporaryDirectory(prefix="d2ldev-versions-") as folder:
        place = Path(folder)
        log = (logs or place) / f"{row['name']}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            installed = _run(install_commands(row, place), place, output)
            if installed:
                return {**result, "outcome": "cannot be installed", "problem": installed}
            began = time.monotonic()
            problem = _run([suite_command(row, selected, place)], place, output)
            if own:
                own_problem = _run([own_command(row, place)], place, output)
                result["own"] = "failed" if own_problem else "passed"
                problem = problem or own_problem
        report = place / "report" / "conformance.json"
        if report.exists():
            if logs:
                shutil.copy(report, logs / f"{row['name']}.json")
            document = json.loads(report.read_text(encoding="utf-8"))
            result["versions"] = document["versions"]
            result["summary"] = document["summary"]
            result["failed"] = {
                each["requirement"]: each["reasons"]
                for each in document["requirements"]
                if each["outcome"] == "failed"
            }
        result["versions"] |= versions(place)
        result["seconds"] = round(time.monotonic() - began)
        return {**result, "outcome": "fails" if problem else "holds", "problem": problem}


def install_commands(row: dict[str, Any], place: Path) -> list[list[str]]:
    """Return the commands that make the environment of a row in a folder."""
    python = str(place / "venv")
    extra = "test" if row["backend"] == "reference" else f"test,{row['backend']}"
    oldest = ["--resolution", "lowest-direct"] if row.get("oldest") else []
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in pins if line.partition("==")[0] in TOOLS]
    (place / "pins").write_text("\n".join(kept), encoding="utf-8")
    install = ["uv", "pip", "install", "--quiet", "--python", python, "--constraints", "pins"]
    return [
        ["uv", "venv", "--quiet", "--python", row["python"], python],
        [*install, *oldest, f"d2ldev[{extra}] @ {ROOT.as_uri()}", *row["install"]],
    ]


def suite_command(row: dict[str, Any], selected: str, place: Path) -> list[str]:
    """Return the command that runs the suite in the environment of a row."""
    options = ["-k", selected] if selected else []
    gpus = str(gpus_of(row))
    command = [str(place / "venv" / "bin" / "d2ldev"), "conformance", row["backend"]]
    command += ["--virtual-gpus", gpus, "--require-gpus", gpus]
    return [*command, "--report", str(place / "report"), "--", *options]


def gpus_of(row: dict[str, Any]) -> int:
    """Return on how many virtual GPUs a row is run."""
    return int(row.get("gpus", 2))


def own_command(row: dict[str, Any], place: Path) -> list[str]:
    """Return the command that runs the tests of a backend's own."""
    tests = ROOT / "tests" / "backends" / f"{row['backend']}_backend"
    return [str(place / "venv" / "bin" / "pytest"), str(tests), "-c", str(ROOT / "pyproject.toml")]


def versions(place: Path) -> dict[str, str]:
    """Return the versions of what may matter in the environment of a row, by distribution."""
    command = ["uv", "pip", "freeze", "--quiet", "--python", str(place / "venv")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    names = ("flax", "jaxlib", "keras", "ml-dtypes", "numpy", "optax", "pytest")
    return {name: found[name] for name in names if name in found}


def _run(commands: list[list[str]], place: Path, output: Any) -> str:
    """Run one command after the other; return the last line of the first one that fails."""
    # The checkout on the path would hide what is missing in the wheel. A program of JAX that runs
    # once costs more to optimise than it saves.
    settings = ("PYTHONSAFEPATH", "OMP_NUM_THREADS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    variables = {"UV_CACHE_DIR": str(place / "cache"), **os.environ, **dict.fromkeys(settings, "1")}
    for command in commands:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        began = output.tell()
        try:
            done = subprocess.run(  # noqa: S603
                command, cwd=place, env=variables, stdout=output, stderr=output, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {SECONDS} s: {command[0]}"
        if done.returncode:
            with Path(output.name).open(encoding="utf-8") as printed:
                printed.seek(began)
                lines = [line.strip() for line in printed if line.strip()]
            return lines[-1] if lines else f"status {done.returncode}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
