"""What moves to a GPU: tensors, batches ahead of their use, an epoch of them, and a log back.

    python benchmarks/transfers.py [--framework NAME] [--device gpu:0] [--small] [--json FILE]

``to`` and ``prefetch`` are measured against the framework's own plain copies of the same memory of
the host: pinned memory where the framework pins any, and there the aim is to be as fast as 0.95 of
them. An epoch that prefetches is measured against the longer of two others, of which one trains on
batches that are on the GPU already, and one copies them and does nothing else. The log is that of
the third exercise of D2L's section 6.7.5, of ``d2ldev bench log``, against the least that it can
cost: a list with one transfer.

All sides run in turn in one process, and each waits for the device. An aim is one of hardware: on a
virtual GPU the figures are shown, so that the benchmark can be tried, and nothing about hardware
follows from them. The exit status is 0 also where an aim is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from measure import LOG_AIM, Comparison, Result, measure
from natives import COPIES, pin, pins
from overhead import document, table
from rich.console import Console

import d2ldev
from d2ldev.bench.exercises import logs_of_norms
from d2ldev.bench.results import VIRTUAL
from d2ldev.training.trainer import Trainer

# Ratios of times: a copy has at least 0.95 of the speed.
_AIM_OF_COPIES = 1 / 0.95
_AIM_OF_AN_EPOCH = 1.05
_WARM_UP = 2


class Sizes(NamedTuple):
    """How much is moved.

    Args:
        floats: of each tensor of ``to``.
        examples, inputs: of each batch.
        width: of the model, which makes a step take about as long as a batch takes to arrive.
        batches: of an epoch, so many that the first one, which nothing hides, is little.
        epochs: of which the median is taken.
        products: that are logged.
    """

    floats: int = 16_000_000
    examples: int = 4096
    inputs: int = 3072
    width: int = 1024
    batches: int = 64
    epochs: int = 15
    products: int = 1000


SMALL = Sizes(10_000, 16, 32, 16, 8, 3, 10)
# Of an epoch, which repeats them: all of them are held on the host, and on the GPU as well.
_DIFFERENT_BATCHES = 8


class Place:
    """A GPU, with the memory of the host that it copies from, and what the aims are there.

    Args:
        backend: ours.
        device: the GPU.

    Attributes:
        plain: copies a nesting there as one does without d2ldev.
    """

    def __init__(self, backend: Any, device: str) -> None:
        self.backend, self.device = backend, backend.device(device)
        self.plain = COPIES[backend.name](backend.native(device))
        self.is_hardware = backend.platform(device) not in ("cpu", VIRTUAL)
        self.pins = pins(backend)

    def of_host(self, value: Any) -> Any:
        """Return a nesting of the CPU's tensors in the memory that is copied from."""
        return pin(self.backend, value)

    def wait(self, found: Any) -> Any:
        """Return what was copied, when it is there: JAX waits for no array that nobody holds."""
        self.backend.synchronize(self.device)
        return found

    def aim(self, ratio: float) -> float | None:
        """Return an aim, which is none without hardware."""
        return ratio if self.is_hardware else None

    def note(self, *notes: str) -> str:
        """Return what is to be known about a row."""
        unlike = [] if self.is_hardware else ["nothing about hardware follows"]
        return "; ".join([*notes, *unlike])

    @property
    def memory(self) -> str:
        """Which memory of the host is copied from."""
        name = self.backend.name
        return "from pinned memory" if self.pins else f"from pageable memory: {name} pins none"


def rows(place: Place, sizes: Sizes) -> Iterator[Comparison]:
    """Compare single copies, batches that are prefetched, and a log."""
    backend, device = place.backend, place.device
    xs = [backend.rand((sizes.floats,), seed=i, device="cpu") for i in range(3)]
    names = {"backend": backend, "device": device, "plain": place.plain, "wait": place.wait}
    ours, theirs = "wait(backend.to(batch, device))", "wait(plain(batch))"
    aim = place.aim(_AIM_OF_COPIES) if place.pins else None
    note = place.note(place.memory)
    for what, batch in (("one tensor", xs[0]), ("a nesting of 3", {"x": xs[0], "y": xs[1:]})):
        name = f"to, {what} of {sizes.floats:,} floats each"
        used = {**names, "batch": place.of_host(batch)}
        yield Comparison(name, ours, theirs, aim, used, note)
    names |= {"last": _last, "batches": _batches(place, sizes)}
    ours, theirs = (
        "wait(last(backend.prefetch(batches, device)))",
        "wait(last(map(plain, batches)))",
    )
    name = f"prefetch, {len(names['batches'])} batches of {sizes.examples} x {sizes.inputs}"
    yield Comparison(name, ours, theirs, aim, names, note)
    a, b = (backend.randn((100, 100), seed=seed, device=device) for seed in (0, 1))
    listed, log, _ = logs_of_norms(backend, device, (a, b), sizes.products).values()
    # Some frameworks compute on their default device, whatever the operands are on.
    names = {"backend": backend, "device": device, "log": log, "listed": listed}
    ours, theirs = (f"with backend.on(device): {call}" for call in ("log()", "listed()"))
    name = f"a log of {sizes.products} norms, against a list with one transfer"
    yield Comparison(name, ours, theirs, place.aim(LOG_AIM), names, place.note())


def _batches(place: Place, sizes: Sizes) -> list[Any]:
    backend = place.backend
    return [
        place.of_host(
            (
                backend.rand((sizes.examples, sizes.inputs), seed=seed, device="cpu"),
                backend.rand((sizes.examples, 1), seed=seed, device="cpu"),
            )
        )
        for seed in range(min(_DIFFERENT_BATCHES, sizes.batches))
    ]


def _last(batches: Iterable[Any]) -> Any:
    """Return the last batch, when all of them are on their way."""
    for batch in batches:
        last = batch
    return last


class _InTurn:
    """Data that is another one at each epoch."""

    def __init__(self, *data: list[Any]) -> None:
        self._turns = itertools.cycle(data)

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self._turns))


def epoch(place: Place, sizes: Sizes) -> Result:
    """Compare an epoch that prefetches with the longer of computing and copying alone.

    One run trains in turn on batches of the host and on the same ones on the GPU, so that both take
    the same steps of the same model; the callback copies.
    """
    backend, different = place.backend, _batches(place, sizes)
    there = backend.to(different, place.device)
    of_host, on_gpu = (
        list(itertools.islice(itertools.cycle(batches), sizes.batches))
        for batches in (different, there)
    )
    trained: list[float] = []
    copied: list[float] = []
    began = 0.0

    def callback(_epoch: int, _history: object) -> None:
        nonlocal began
        backend.synchronize(place.device)
        between = time.perf_counter()
        trained.append(between - began)
        place.wait(_last(map(place.plain, of_host)))
        began = time.perf_counter()
        copied.append(began - between)

    trainer = Trainer(2 * (_WARM_UP + sizes.epochs), backend=backend, callbacks=callback)
    trainer.device = place.device
    model = backend.mlp([sizes.inputs, sizes.width, 1])
    trainer.fit(model, _InTurn(of_host, on_gpu), lr=1e-3)
    both, compute = (median(trained[2 * _WARM_UP + turn :: 2]) for turn in (0, 1))
    transfers = median(copied[2 * _WARM_UP :])
    name = f"an epoch, {sizes.batches} batches of {sizes.examples} x {sizes.inputs}"
    longer = max(compute, transfers)
    parts = f"{compute / both:.2f} of it, copying {transfers / both:.2f}"
    alone = f"computing alone takes {parts}"
    statements = "Trainer(epochs).fit(net, batches)", "the longer of computing and copying"
    aim, note = place.aim(_AIM_OF_AN_EPOCH), place.note(place.memory, alone)
    return Result(name, *statements, both, longer, both / longer, "ratio", aim, note)


def results(place: Place, sizes: Sizes) -> list[Result]:
    """Return every comparison."""
    return [*map(measure, rows(place, sizes)), epoch(place, sizes)]


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=COPIES, default="torch")
    parser.add_argument("--device", default="gpu:0", help="the device to copy to")
    parser.add_argument("--small", action="store_true", help="do little work, to try it out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    place = Place(d2ldev.get_backend(arguments.framework), arguments.device)
    found = results(place, SMALL if arguments.small else Sizes())
    platform = place.backend.platform(place.device)
    title = f"what moves to {place.device} ({platform}), {arguments.framework}"
    Console().print(table(title, found))
    if arguments.json is not None:
        made = document(found, arguments.framework, ()) | {"device": str(place.device)}
        text = format_lines(made | {"platform": platform})
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
