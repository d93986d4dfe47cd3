"""How cost grows: leaves, parameters, threads, bytes in a file, and training steps.

    python benchmarks/growth.py [--framework NAME] [--small] [--folder DIR] [--json FILE]
                                [--plot FILE]

Each row does the same with more and more, up to 10^6 leaves, 10^5 parameters, 64 threads, a file of
4 GB and 10^5 steps. The time of a size is the median of three runs after one that does not count.
The slope is that of a line through the logarithms of sizes and times, over the last two decades,
where what each call costs once is small: 1 is linear, 2 is quadratic. Memory is what the process
holds (its resident memory): its peak in a run, beside what was there before, and what is left of a
size when all of it is gone. The peak is that of one more run, which is not timed.

A size is left out where its run, or what prepares it, would take longer than ``--seconds`` by what
the one before took, or where the framework has no model of so many layers. Run it on a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from measure import Result
from natives import CREATIONS
from overhead import document
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import d2ldev
from d2ldev._backend import framework_of

_MB = 10**6
_RUNS = 3
# Noise may make a line as steep; whatever is quadratic is steeper.
_LINEAR = 1.15
# Bytes of the process for each step more: a number in a log has 8, and an allocator's pages vary.
_FLAT = 100
_DECADES = 100
# Of a parameter: a file of 10^5 that are smaller is refused, because to read its header could take
# more than four times the file.
_FLOATS = 1024
# Of each model, where there are several.
_PARAMETERS = 10


@dataclass(frozen=True)
class Growth:
    """Work that is done in several sizes.

    Args:
        name: what is done.
        statement: how.
        unit: what a size counts.
        sizes: ascending.
        prepare: returns the call that is measured, for a size.
        memory: its unit, the most that it may be, and how it follows from the samples.
        aim: the most that the slope may be; None is for information.
    """

    name: str
    statement: str
    unit: str
    sizes: Sequence[int]
    prepare: Callable[[int], Callable[[], object]]
    memory: tuple[str, float, Callable[[Sequence[Sample]], float | None]] | None = None
    aim: float | None = _LINEAR


@dataclass(frozen=True)
class Sample:
    """One size: the seconds of a run, and bytes of the process.

    Args:
        size: how much.
        seconds: the median of the runs.
        peak: the most that a run held beside what was there before.
        left: what the process holds afterwards, more than before anything was made.
    """

    size: int
    seconds: float
    peak: int
    left: int


# -- what grows -----------------------------------------------------------------------------------


def growths(backend: d2ldev.Backend, folder: Path, *, is_small: bool) -> Iterator[Growth]:
    """Yield everything that is measured."""

    def decades(most: int, small: int) -> list[int]:
        return [10**i for i in range(round(math.log10(small if is_small else most)) + 1)]

    leaves, parameters = decades(10**6, 10**3), decades(10**5, 10**2)
    x = backend.ones(4)

    def to(size: int) -> Callable[[], object]:
        batch = _nest([x] * size)
        return lambda: backend.to(batch, "cpu")

    def copy(size: int) -> Callable[[], object]:
        batch = _nest([backend.ones(4) for _ in range(size)])
        return lambda: backend.copy(batch)

    yield Growth("to, leaves already there", "backend.to(batch, device)", "leaves", leaves, to)
    yield Growth("copy, leaves of 16 bytes", "backend.copy(batch)", "leaves", leaves, copy)

    def place(size: int) -> Callable[[], object]:
        tensors = _name(backend, size)
        return lambda: backend.place(tensors, "cpu")

    def placement(size: int) -> Callable[[], object]:
        net = backend.mlp([1] * (size // 2 + 2))
        return lambda: backend.placement(backend.place(net, "cpu"))

    def models(size: int) -> Callable[[], object]:
        net = backend.mlp([1] * (_PARAMETERS // 2 + 1))
        # A copy takes less time than another model.
        nets = [backend.replicate(net, ["cpu"])[0] for _ in range(size // _PARAMETERS)]
        return lambda: backend.placement(backend.place(nets, "cpu"))

    def save(size: int) -> Callable[[], object]:
        tensors = _name(backend, size)
        return lambda: backend.save(tensors, folder / "parameters")

    def load_into(size: int) -> Callable[[], object]:
        tensors = _name(backend, size)
        backend.save(tensors, folder / "parameters")
        return lambda: backend.load_into(tensors, folder / "parameters")

    # ``mlp`` takes 10,000 layers at most. More than 10^4 parameters are those of several models.
    of_one = [size for size in parameters if size <= 10**4]
    of_several = [size for size in parameters if size >= _PARAMETERS]
    for name, statement, prepare, sizes in (
        ("place, parameters in a dict", "backend.place(parameters, device)", place, parameters),
        (
            "place, parameters of a model",
            "backend.placement(backend.place(net, ...))",
            placement,
            of_one,
        ),
        (
            "place, parameters of several models",
            "backend.placement(backend.place(nets, ...))",
            models,
            of_several,
        ),
        ("save, parameters of 4 kB", "backend.save(parameters, path)", save, parameters),
        (
            "load_into, parameters of 4 kB",
            "backend.load_into(parameters, path)",
            load_into,
            parameters,
        ),
    ):
        yield Growth(name, statement, "parameters", sizes, prepare)

    threads = [2**i for i in range(4 if is_small else 7)]
    scope = "with backend.on(device): backend.ones(4)"
    yield Growth(
        "threads in scopes of their own", scope, "threads", threads, lambda n: _threads(backend, n)
    )
    if (creation := CREATIONS.get(backend.name)) is not None:
        makers = [creation(backend.native(device)) for device in backend.devices()]
        yield Growth(
            "threads without d2ldev, the floor",
            "ones by the framework's own call",
            "threads",
            threads,
            lambda n: _in_threads(makers, n),
            aim=None,
        )

    def of_file(samples: Sequence[Sample]) -> float | None:
        return samples[-1].peak / (samples[-1].size * _MB)

    def load_by_safetensors(size: int) -> Callable[[], object]:
        save_megabytes(size)()
        return lambda: load_file(folder / "large")

    def save_megabytes(size: int) -> Callable[[], object]:
        tensors = {str(i): backend.ones(_MB // 4) for i in range(size)}
        return lambda: backend.save(tensors, folder / "large")

    def load_megabytes(size: int) -> Callable[[], object]:
        save_megabytes(size)()
        return lambda: backend.load(folder / "large")

    megabytes = [2**i for i in range(5 if is_small else 13)]
    for name, statement, prepare, most in (
        ("save, tensors of 1 MB", "backend.save(tensors, path)", save_megabytes, 0.1),
        ("load, tensors of 1 MB", "backend.load(path)", load_megabytes, 1.1),
    ):
        yield Growth(name, statement, "MB", megabytes, prepare, ("of the file", most, of_file))
    yield Growth(
        "load, without d2ldev, the floor",
        "load_file(path) of safetensors, into NumPy arrays",
        "MB",
        megabytes,
        load_by_safetensors,
        aim=None,
    )

    if "train" not in framework_of(backend).cannot:
        steps = decades(10**5, 10**3)[1:]
        memory = ("bytes a step", _FLAT, _bytes_a_step)
        yield Growth(
            "training",
            "Trainer(1).fit(net, batches)",
            "steps",
            steps,
            _prepare_fit(backend),
            memory,
        )


def _nest(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves in dicts of ten, in a list."""
    return [dict(enumerate(leaves[i : i + 10])) for i in range(0, len(leaves), 10)]


def _name(backend: d2ldev.Backend, size: int) -> dict[str, Any]:
    return {f"layer{i}.weight": backend.ones(_FLOATS) for i in range(size)}


def _threads(backend: d2ldev.Backend, number: int) -> Callable[[], object]:
    """Return a call in which so many threads enter a scope a hundred times each."""

    def maker(device: d2ldev.Device) -> Callable[[], object]:
        def make() -> None:
            with backend.on(device):
                x = backend.ones(4)
            if backend.device_of(x) is not device:
                raise SystemExit(f"made on {backend.device_of(x)} in a scope of {device}")

        return make

    return _in_threads([maker(device) for device in backend.devices()], number)


def _in_threads(makers: Sequence[Callable[[], object]], number: int) -> Callable[[], object]:
    """Return a call in which so many threads make a tensor a hundred times each."""

    def work(make: Callable[[], object]) -> None:
        for _ in range(100):
            make()

    def run() -> None:
        them = [
            threading.Thread(target=work, args=(makers[i % len(makers)],)) for i in range(number)
        ]
        for thread in them:
            thread.start()
        for thread in them:
            thread.join()

    return run


def _prepare_fit(backend: d2ldev.Backend) -> Callable[[int], Callable[[], object]]:
    """Return a function that prepares a fit of so many steps, for a compiled model."""
    net = backend.mlp([4, 8, 1])
    batch = (backend.ones((8, 4)), backend.ones((8, 1)))

    def prepare(size: int) -> Callable[[], object]:
        return lambda: d2ldev.Trainer(1, backend=backend).fit(net, [batch] * size)

    return prepare


def _bytes_a_step(samples: Sequence[Sample]) -> float | None:
    """Return what the peak rose by from the size before the last, for each step more."""
    if len(samples) < 2:
        return None
    before, last = samples[-2:]
    return (last.peak - before.peak) / (last.size - before.size)


# -- measuring ------------------------------------------------------------------------------------


def samples_of(growth: Growth, seconds: float, wait: Callable[[], object]) -> list[Sample]:
    """Measure the sizes, as far as preparing and running one takes no longer than that.

    How long it would take follows from the size before.
    """
    found: list[Sample] = []
    prepared = 0.0
    for size in growth.sizes:
        if found and max(prepared, found[-1].seconds) * size / found[-1].size > seconds:
            break
        begin = _resident()
        started = time.perf_counter()
        try:
            call = growth.prepare(size)
        except RecursionError:  # of Keras, which walks from layer to layer in a model of so many
            break
        prepared = time.perf_counter() - started
        call()
        wait()
        times = []
        gc.disable()  # as timeit does: Python's collector walks over all that there is
        for _ in range(_RUNS):
            started = time.perf_counter()
            result = call()
            wait()
            times.append(time.perf_counter() - started)
            del result
        gc.enable()  # MXNet's arrays are in circles, which nothing else ends
        before = _resident()
        _reset_peak()
        result = call()
        wait()
        peak = _status("VmHWM") - before
        del result
        del call
        found.append(Sample(size, median(times), max(peak, 0), _resident() - begin))
    return found


def slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the slope of the line through the logarithms, over the last two decades of sizes.

    >>> slope([1, 10, 100, 1000], [5.0, 1.0, 10.0, 100.0])
    1.0
    >>> slope([10, 100], [1.0, 100.0])
    2.0
    """
    pairs = [
        (math.log10(size), math.log10(value))
        for size, value in zip(sizes, values, strict=True)
        if size * _DECADES >= sizes[-1] and value > 0
    ]
    if len(pairs) < 2:
        return None
    x, y = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    above = sum((a - x) * (b - y) for a, b in pairs)
    return round(above / sum((a - x) ** 2 for a, _ in pairs), 3)


def results_of(growth: Growth, samples: Sequence[Sample]) -> Iterator[Result]:
    """Yield the slope of the times, and what is asked of the memory."""
    first, last = samples[0], samples[-1]
    name = f"{growth.name}: {first.size:,} to {last.size:,} {growth.unit}"
    steepness = slope([s.size for s in samples], [s.seconds for s in samples])
    times = last.seconds, first.seconds
    left = ""
    if last.size < growth.sizes[-1]:
        left = f"{growth.sizes[-1]:,} would take too long, or are more than the framework can make"
    against = f"{first.size:,} {growth.unit}"
    yield Result(name, growth.statement, against, *times, steepness, "slope", growth.aim, left)
    if growth.memory is not None:
        unit, most, value_of = growth.memory
        value = value_of(samples)
        yield Result(f"{name}: memory", growth.statement, against, *times, value, unit, most, left)


def _resident() -> int:
    """Return the bytes that the process holds, when what can be given back was given back."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _reset_peak() -> None:
    """Let the peak of the resident memory begin anew: see proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


# -- the command ----------------------------------------------------------------------------------


def table(title: str, growth: Growth, samples: Sequence[Sample], results: list[Result]) -> Table:
    """Return the sizes of one growth, with what follows from them as the caption."""
    verdicts = {True: "aim met", False: "AIM MISSED", None: "not measured"}
    words = []
    for result in results:
        value = "-" if result.value is None else f"{result.value:.3g}"
        aim = "" if result.aim is None else f" (at most {result.aim:g}): {verdicts[result.met]}"
        words.append(f"{value} {result.unit}{aim}")
    made = Table(title=title, caption="; ".join(words))
    for column in (growth.unit, "seconds", "microseconds each", "peak, MB", "left, MB"):
        made.add_column(column, justify="right")
    for each in samples:
        peak, left = (f"{value / _MB:,.1f}" for value in (each.peak, each.left))
        one = each.seconds * 1e6 / each.size
        made.add_row(f"{each.size:,}", f"{each.seconds:.4g}", f"{one:,.3g}", peak, left)
    return made


def plot(measured: Mapping[str, Sequence[Sample]], path: Path) -> None:
    """Draw times and peaks over sizes, each growth in a plot of its own.

    Args:
        measured: the name of a growth -> its sizes.
        path: the file, of any kind that matplotlib writes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * len(measured)), layout="constrained")
    for (name, samples), axes in zip(
        measured.items(), figure.subplots(len(measured), 2, squeeze=False), strict=True
    ):
        sizes = [each.size for each in samples]
        axes[0].loglog(sizes, [each.seconds for each in samples], marker="o")
        linear = [samples[-1].seconds * size / sizes[-1] for size in sizes]
        axes[0].loglog(sizes, linear, linestyle=":", color="gray")
        axes[0].set(xlabel="how many", ylabel="seconds", title=name)
        axes[1].plot(sizes, [each.peak / _MB for each in samples], marker="o", label="peak")
        axes[1].plot(sizes, [each.left / _MB for each in samples], marker="o", label="left")
        axes[1].set(xscale="log", xlabel="how many", ylabel="MB")
        axes[1].legend()
    figure.savefig(path, dpi=70)


def main() -> None:
    """Measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__)
    frameworks = ("torch", "jax", "tensorflow", "mxnet", "reference")
    parser.add_argument("--framework", choices=frameworks, default="torch")
    parser.add_argument("--small", action="store_true", help="use small sizes, to try it out")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure only rows with TEXT in their name"
    )
    parser.add_argument(
        "--seconds", type=float, default=300, help="the longest time of a run or of its set-up"
    )
    parser.add_argument(
        "--folder", type=Path, help="the folder for files; by default the system's temporary folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot times and memory into FILE")
    arguments = parser.parse_args()
    os.environ.setdefault("D2LDEV_VIRTUAL_GPUS", "2")  # for the scopes
    backend = d2ldev.get_backend(arguments.framework)
    measured: dict[str, list[Sample]] = {}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for growth in growths(backend, Path(folder), is_small=arguments.small):
            if arguments.only not in growth.name:
                continue
            samples = samples_of(growth, arguments.seconds, backend.synchronize)
            found = list(results_of(growth, samples))
            title = f"{arguments.framework}, {growth.name}"
            Console().print(table(title, growth, samples, found))
            measured[growth.name] = samples
            results += found
    if arguments.json is not None:
        made = document(results, arguments.framework)
        made["samples"] = {name: [*map(vars, samples)] for name, samples in measured.items()}
        arguments.json.write_text(format_lines(made), encoding="utf-8")
    if arguments.plot is not None:
        plot(measured, arguments.plot)


if __name__ == "__main__":
    main()
