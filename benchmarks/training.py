"""What an epoch of ``Trainer.fit``, and a second short fit, cost over the framework's own loop.

    python benchmarks/training.py [--framework NAME] [--runs N] [--json FILE]

Both train the same model on the same batches, which are tensors on the CPU already. They run in
turn, epoch by epoch in one process: the hand-written epoch is in the trainer's callback. Several
pairs of models are trained. Of half of them the trainer's is made after the other one, and of half
before it: where its memory is can make a fifth of the time. The C library keeps what is freed, so
that no side pays for pages of the system. Reported are the medians of the epochs, each timed until
the device is done, and of the ratios of two epochs side by side, which do not change when the
machine slows down for a while. They differ from process to process: of several ``--runs``, each a
process of its own, the median is reported.

A second fit is one of one epoch by a trainer made anew, of a model that was trained before: it
traces and compiles nothing, like the same loop by hand, made once, and Keras' own ``fit``. It is to
cost no more than the latter. A loop by hand does not look for what has changed since; it is there
for information. The exit status is 0 also where an aim is not met.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from loops import FRAMEWORKS, LEARNING_RATE, Batches, Epoch, Framework
from measure import Result, keep_freed_memory
from overhead import add_runs, document, measure_in_processes, table
from rich.console import Console

import d2ldev
from d2ldev.training.trainer import Trainer

AIM = 1.02
AIM_OF_A_SECOND_FIT = 1.0
WARM_UP = 3
EPOCHS = 25  # of each side, with each pair of models
_PAIRS = 4
_FITS = 41
_SHORT = 10  # batches of a short fit


def results(name: str) -> list[Result]:
    """Return every comparison for one framework."""
    backend, framework = d2ldev.get_backend(name), FRAMEWORKS[name]()
    found = []
    for case, make_model, batches in cases(backend, framework):
        for described, make_epoch in framework.loops.items():
            ours, theirs = epochs(backend, make_model, batches, make_epoch)
            statement = "Trainer(epochs).fit(net, batches)"
            found.append(_result(case, statement, described, ours, theirs, AIM))
    for case, make_model, batches in cases(backend, framework):
        short = batches[:_SHORT]
        model = case.removeprefix("an epoch of ").partition(",")[0]
        case = f"a second fit of one epoch, {model}, {len(short)} batches of {len(short[0][1])}"
        for described, make_epoch in (framework.loops | framework.fits).items():
            ours, theirs = _second_fits(backend, make_model, short, make_epoch)
            statement = "Trainer(1).fit(net, batches)"
            aim = AIM_OF_A_SECOND_FIT if described in framework.fits else None
            found.append(_result(case, statement, described, ours, theirs, aim))
    return found


def _result(
    case: str,
    statement: str,
    described: str,
    ours: list[float],
    theirs: list[float],
    aim: float | None,
) -> Result:
    """Return the medians of the times and of the ratios of two that were measured side by side."""
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    times = median(ours), median(theirs)
    return Result(case, statement, described, *times, ratio, "ratio", aim, "")


def cases(
    backend: d2ldev.Backend, framework: Framework
) -> list[tuple[str, Callable[[], Any], Batches]]:
    """Return two models of the book with the sizes of its batches: sections 5.2 and 7.6."""
    images = (28, 28, 1) if framework.is_channels_last else (1, 28, 28)

    def mlp() -> Any:
        return _hybridize(backend.mlp([784, 256, 10]))

    return [
        ("an epoch of an MLP, 30 batches of 256", mlp, _batches(backend, 30, 256, (784,))),
        (
            "an epoch of LeNet, 10 batches of 128",
            lambda: _hybridize(framework.lenet()),
            _batches(backend, 10, 128, images),
        ),
    ]


def _batches(backend: d2ldev.Backend, number: int, size: int, shape: tuple[int, ...]) -> Batches:
    draw = np.random.default_rng(0)
    return [
        (
            backend.asarray(draw.standard_normal((size, *shape), "float32"), device="cpu"),
            backend.asarray(draw.integers(0, 10, size), device="cpu"),
        )
        for _ in range(number)
    ]


def _hybridize(model: Any) -> Any:
    """Return the model as its framework runs fastest, where the user has to ask for that."""
    if hasattr(model, "hybridize"):
        model.hybridize(static_alloc=True, static_shape=True)
    return model


def epochs(
    backend: d2ldev.Backend,
    make_model: Callable[[], Any],
    batches: Batches,
    make_epoch: Callable[[Any], Epoch],
    number: int = EPOCHS,
) -> tuple[list[float], list[float]]:
    """Return the seconds of each epoch of ours, and of the native one after it, of all pairs.

    ``number`` is how many of each side are measured with each pair of models.
    """
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(_PAIRS):
        model = make_model() if pair % 2 else None
        epoch_of_theirs = make_epoch(make_model())
        samples = _in_turn(backend, model or make_model(), batches, epoch_of_theirs, number)
        ours += samples[0]
        theirs += samples[1]
    return ours, theirs


def _in_turn(
    backend: d2ldev.Backend,
    model: Any,
    batches: Batches,
    epoch_of_theirs: Epoch,
    number: int,
) -> tuple[list[float], list[float]]:
    ours: list[float] = []
    theirs: list[float] = []
    began = 0.0

    def callback(_epoch: int, _history: object) -> None:
        nonlocal began
        backend.synchronize()
        between = time.perf_counter()
        ours.append(between - began)
        epoch_of_theirs(batches)
        backend.synchronize()
        began = time.perf_counter()
        theirs.append(began - between)

    trainer = Trainer(WARM_UP + number, backend=backend, callbacks=callback)
    trainer.fit(model, batches, loss="cross_entropy", lr=LEARNING_RATE)
    return ours[WARM_UP:], theirs[WARM_UP:]


def _second_fits(
    backend: d2ldev.Backend,
    make_model: Callable[[], Any],
    batches: Batches,
    make_epoch: Callable[[Any], Epoch],
) -> tuple[list[float], list[float]]:
    """Return the seconds of fits of one epoch, and of the native loop in turn."""
    model, epoch_of_theirs = make_model(), make_epoch(make_model())

    def fit() -> None:
        trainer = Trainer(1, backend=backend)
        trainer.fit(model, batches, loss="cross_entropy", lr=LEARNING_RATE)

    def seconds(function: Callable[[], object]) -> float:
        began = time.perf_counter()
        function()
        backend.synchronize()
        return time.perf_counter() - began

    pairs = [(seconds(fit), seconds(lambda: epoch_of_theirs(batches))) for _ in range(_FITS)]
    ours, theirs = zip(*pairs[WARM_UP:], strict=True)
    return list(ours), list(theirs)


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    add_runs(parser)
    arguments = parser.parse_args()
    if arguments.runs > 1:
        found = measure_in_processes(__file__, arguments.framework, arguments.runs)
    else:
        keep_freed_memory()
        found = results(arguments.framework)
    title = f"a training epoch of d2ldev's against {arguments.framework}'s own loop, on the CPU"
    Console().print(table(title, found))
    if arguments.json is not None:
        text = format_lines(document(found, arguments.framework))
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
