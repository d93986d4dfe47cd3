"""What it costs to log one number after each step: in a ``DeviceLog``, and without one.

    python benchmarks/device_log.py [--framework NAME] [--device gpu:0] [--json FILE]

Both sides of a row train the same model for a hundred steps, in the same process, in turn, until
everything that was queued is done. They differ in the log alone: ``listed`` keeps the losses in a
list and brings them over in one transfer, the least that a log can cost; ``read`` reads each at
once; ``none`` reads nothing. Most frameworks have computed on the CPU before a step returns, so
that ``read`` waits for nothing there. It is the third exercise of D2L's section 6.7.5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from measure import LOG_AIM, Comparison, measure
from overhead import document, table
from rich.console import Console

import d2ldev
from d2ldev._backend import framework_of

_STEPS = 100


def rows(backend: Any, device: str, width: int, examples: int) -> Iterator[Comparison]:
    """Compare the log with each of the others over a hundred steps."""
    step = _steps(backend, device, width, examples)

    def log() -> None:
        kept = d2ldev.DeviceLog(backend, device)
        for _ in range(_STEPS):
            kept.add(loss=step())
        kept.flush()

    def make_list() -> None:
        kept = [step() for _ in range(_STEPS)]
        backend.to_numpy(framework_of(backend).tensors.stack(kept)).tolist()

    def read() -> None:
        for _ in range(_STEPS):
            float(backend.to_numpy(step()))

    def none() -> None:
        for _ in range(_STEPS):
            step()

    names = {"log": log, "listed": make_list, "read": read, "none": none}
    what = f"{_STEPS} steps, {width} wide, {examples} examples"
    for theirs, against, aim in (
        ("listed()", "a list with one transfer", LOG_AIM),
        ("read()", "reading each loss", None),
        ("none()", "no log", None),
    ):
        name = f"{what}: against {against}"
        yield Comparison(name, "log()", theirs, aim, names, finish=backend.synchronize)


def _steps(backend: Any, device: str, width: int, examples: int) -> Callable[[], Any]:
    """Return a function that trains a model of its own for one step, and returns the loss."""
    learner = backend.learner(backend.mlp([20, width, width, 1], device=device))
    x = backend.rand((examples, 20), seed=0, device=device)
    y = backend.ones((examples, 1), device=device)
    return lambda: learner.step((x,), y)[0]


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    frameworks = ("torch", "jax", "tensorflow", "mxnet")
    parser.add_argument("--framework", choices=frameworks, default="torch")
    parser.add_argument("--device", default="cpu", help="the device to train on, such as gpu:0")
    parser.add_argument("--width", type=int, default=64, help="the width of the hidden layers")
    parser.add_argument(
        "--examples", type=int, default=64, help="the number of examples in a batch"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    backend = d2ldev.get_backend(arguments.framework)
    size = arguments.width, arguments.examples
    results = [measure(row) for row in rows(backend, arguments.device, *size)]
    platform = backend.platform(arguments.device)
    title = f"a log on {arguments.device} ({platform}), {arguments.framework}"
    Console().print(table(title, results))
    if arguments.json is not None:
        found = document(results, arguments.framework) | {"device": arguments.device}
        found["platform"] = platform
        arguments.json.write_text(format_lines(found), encoding="utf-8")


if __name__ == "__main__":
    main()
