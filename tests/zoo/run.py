"""Try models that others wrote: ``python tests/zoo/run.py torch --json conformance/results/zoo``.

It needs no network and no weights. Each model is built with random ones. The status is 1 if a
model is wrong or breaks, or is refused without a reason in ``refusals.py``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from checks import CHECKS, Subject, judge
from d2ldev_conformance.lines import format_lines
from refusals import find_reason
from zoo import Model

import d2ldev


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=["torch", "jax", "tensorflow"])
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of models")
    parser.add_argument("--json", type=Path, help="the folder of the report")
    arguments = parser.parse_args()
    start = time.perf_counter()
    d2ldev.virtual_gpus(2)
    plain = import_module(f"plain_{arguments.framework}")
    models = [model for model in plain.MODELS if model.is_one_of(arguments.only)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        backend = d2ldev.get_backend(arguments.framework)
        for result in try_all(models, plain, backend, Path(folder)):
            results.append(result)
            if arguments.json is not None:
                write_report(arguments.framework, models, results, arguments.json)
    failed = sum(result["outcome"] in ("wrong", "failed") for result in results)
    print(f"{time.perf_counter() - start:.0f} s")
    print(f"{len(results) - failed} passed, {failed} failed")
    return int(failed > 0)


def try_all(
    models: list[Model], plain: Any, backend: Any, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield the result of each model, and print it."""
    processes = None
    if backend.name == "torch":
        processes = folder / "processes"
        train_in_processes(models, processes)
    for model in models:
        start = time.perf_counter()
        subject = Subject(model, plain, backend, folder / model.id, processes)
        outcomes = {name: judge(check, subject) for name, check in CHECKS.items()}
        result = summarize(model, outcomes)
        print(f"{result['outcome']:8} {time.perf_counter() - start:5.1f} s  {model.id}", flush=True)
        for check, message in result["messages"].items():
            print(f"    {check}: {outcomes[check]['outcome']}: {message}", flush=True)
        yield result


def train_in_processes(models: list[Model], folder: Path) -> None:
    """Train the models in two processes. The first error ends them: the next ones go on."""
    folder.mkdir()
    program = [sys.executable, "-m", "d2ldev", "launch", "--processes", "2"]
    program += [
        str(Path(__file__).parent / "two_processes.py"),
        str(folder),
        *(model.id for model in models),
    ]
    environment = {**os.environ, "D2LDEV_VIRTUAL_GPUS": "2"}
    before = -1
    while before < len(list(folder.iterdir())) < len(models):
        before = len(list(folder.iterdir()))
        subprocess.run(program, env=environment, capture_output=True)


def summarize(model: Model, outcomes: dict[str, Any]) -> dict[str, Any]:
    """Return one outcome for a model: the worst of its checks."""
    found = {each["outcome"] for each in outcomes.values()}
    refused = [each["message"] for each in outcomes.values() if each["outcome"] == "refused"]
    if not all(map(find_reason, refused)):
        found.add("failed")
    worst = next((each for each in ("wrong", "failed", "refused") if each in found), "right")
    messages = {name: each["message"] for name, each in outcomes.items() if each["message"]}
    reasons = {name: find_reason(message) for name, message in messages.items()}
    return {
        "package": model.package,
        "model": model.name,
        "outcome": worst,
        "checks": {name: each["outcome"] for name, each in outcomes.items()},
        "warnings": sorted({told for each in outcomes.values() for told in each["warnings"]}),
        "messages": messages,
        "reasons": reasons,
    }


def write_report(
    framework: str, models: list[Model], results: list[dict[str, Any]], folder: Path
) -> None:
    """Write the results, with the versions that they hold for."""
    packages = sorted({model.distribution for model in models} | {"d2ldev", "numpy", framework})
    document = {
        "framework": framework,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{framework}.json").write_text(format_lines(document), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
