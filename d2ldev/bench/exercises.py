"""The exercises: measurements, their devices, and the checks of results.

Each result is checked before it is timed: it is right, and on the device that the row names. If
something cannot be measured, the row gives the reason, and has no figure.

Source: D2L, section 6.7.5, and the side notes of section 6.7.2.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from d2ldev._backend import Backend, framework_of
from d2ldev.bench.limits import verify_rate
from d2ldev.bench.results import Result, Row
from d2ldev.contract.abilities import check_precision, set_precision
from d2ldev.device import CPU, Device
from d2ldev.errors import (
    D2LDevError,
    DeviceMismatchError,
    OutOfDeviceMemoryError,
    UnsupportedValueError,
    text_of,
)
from d2ldev.training.log import DeviceLog

# Seconds of one product: a size that would take longer is left out.
_LONGEST = 0.5
# Seconds of products that are queued on each of two GPUs.
_QUEUED = 0.02
_SMALLEST = 16
# The largest error of a product, relative to its norm. In float32 it is at most 1e-6. In
# TensorFloat-32 it is at most 3e-4. The type bfloat16 has 3 bits less.
_TOLERANCES = {"highest": 3e-5, "high": 1e-2, "medium": 1e-2}
_WIDTH = 100
_LAYERS = 8

Measure = Callable[[Backend, int, float], Iterator[Row]]


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Args:
        name: of the subcommand.
        question: the question that it answers.
        unit: of the rates.
        default, small: the size, and one to try it out.
        measure: yields the rows, for a backend, a size, and the seconds for each row.
        has_sizes: whether the rows of a device differ in their size alone, which makes a plot.
    """

    name: str
    question: str
    unit: str
    default: int
    small: int
    measure: Measure
    has_sizes: bool

    def run(
        self, backend: Backend, size: int, seconds: float = 0.2, precision: str = "highest"
    ) -> Result:
        """Measure it on a backend; an error of d2ldev's or of the framework's is in the result.

        Args:
            backend: the backend to measure.
            size: of the exercise.
            seconds: for each row.
            precision: of products of float32.
        """
        rows: list[Row] = []
        error = None
        framework = framework_of(backend)
        attempted, fix = f"measure {self.name}", "--matmul-precision highest"
        try:
            precision = check_precision(framework, precision, attempted, fix)
            with set_precision(framework, precision) as in_force:
                for row in self.measure(backend, size, seconds):
                    rows += [replace(row, precision=in_force)]  # kept if the next one is an error
        except Exception as problem:  # whatever a framework raises
            error = text_of(problem) if isinstance(problem, D2LDevError) else _in_words(problem)
        return Result(self.name, backend.name, self.question, self.unit, rows, error)


EXERCISES: dict[str, Exercise] = {}


def _exercise(
    question: str, unit: str, *, default: int, small: int, has_sizes: bool = False
) -> Callable[[Measure], Measure]:
    """Make an exercise, of the same name, of a function that measures it."""

    def add(measure: Measure) -> Measure:
        name = measure.__name__.replace("_", "-")
        EXERCISES[name] = Exercise(name, question, unit, default, small, measure, has_sizes)
        return measure

    return add


@_exercise(
    "From which size on is a product of matrices faster on a GPU than on the CPU?",
    "GFLOP/s",
    default=8192,
    small=64,
    has_sizes=True,
)
def matmul(backend: Backend, largest: int, seconds: float) -> Iterator[Row]:
    """Multiply square matrices on every device, each twice as wide, up to the largest."""
    sizes = [min(_SMALLEST, largest)]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    for device in backend.devices():
        row = None
        for before, size in zip([sizes[0], *sizes], sizes, strict=False):
            way = f"{size} x {size}"
            work = (size / before) ** 3
            if row is not None and row.figures and work * row.figures.seconds > _LONGEST:
                note = f"left out: a product would take about {work * row.figures.seconds:.1g} s"
                yield replace(_row(backend, way, device), size=size, note=note)
                break
            row = replace(_row(backend, way, device), size=size)
            try:
                with backend.on(device):
                    a, b = _matrices(backend, size, device)
                    _check(backend, a @ b, a, b, device)
                    timing = backend.timeit(lambda a=a, b=b: a @ b, seconds=seconds)
                row = row.with_timing(timing, 2 * size**3 / 1e9)
            except OutOfDeviceMemoryError as error:
                row = replace(row, note=_in_words(error))
            yield row


@_exercise(
    "How fast are parameters on a device written into a file, and read from it?",
    "MB/s",
    default=64,
    small=1,
)
def parameters(backend: Backend, megabytes: int, seconds: float) -> Iterator[Row]:
    """Write the parameters of an MLP on each device into a file, and read them back."""
    width = max(1, round((megabytes * 1e6 / 4 / _LAYERS) ** 0.5))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "parameters")
        for device in backend.devices():
            net = backend.mlp([width] * (_LAYERS + 1), device=device)
            tensors = backend.named_tensors(net)
            work = sum(map(framework_of(backend).tensors.nbytes, tensors.values())) / 1e6
            backend.save(net, path)
            for name, x in backend.named_tensors(backend.load(path, device)).items():
                _check_device(backend, x, device, "read parameters")
                _check_equal(backend, x, backend.to_numpy(tensors[name]), "read parameters")
            calls: dict[str, Callable[[], object]] = {
                "save": partial(backend.save, net, path),
                "load": partial(backend.load, path, device),
                "load_into": partial(backend.load_into, net, path),
            }
            for way, call in calls.items():
                timing = backend.timeit(call, seconds=seconds)
                yield _row(backend, way, device).with_timing(timing, work)


@_exercise(
    "What does it cost to log the norm of each product at once?",
    "products/s",
    default=1000,
    small=10,
)
def log(backend: Backend, products: int, seconds: float) -> Iterator[Row]:
    """Log the Frobenius norms of products of 100 x 100: each at once, and all of them together."""
    for device in backend.devices():
        with backend.on(device):
            a, b = _matrices(backend, _WIDTH, device)
            _check(backend, a @ b, a, b, device)
            expected = float(np.linalg.norm(backend.to_numpy(a) @ backend.to_numpy(b)))
            for way, call in logs_of_norms(backend, device, (a, b), products).items():
                for found in call():
                    _check_close(found, expected, f"log norms {way}", device)
                timing = backend.timeit(call, seconds=seconds)
                yield _row(backend, way, device).with_timing(timing, products)


def logs_of_norms(
    backend: Backend, device: Device, operands: tuple[Any, Any], products: int
) -> dict[str, Callable[[], list[float]]]:
    """Return three ways to log the norms of products of two matrices on a device.

    The first one is the least that a log of all of them can cost.
    """
    a, b = operands
    tensors = framework_of(backend).tensors

    def norm() -> Any:
        return tensors.norm(a @ b)

    def through_list() -> list[float]:
        kept = [norm() for _ in range(products)]
        found: list[float] = backend.to_numpy(tensors.stack(kept)).tolist()
        return found

    def one_at_a_time() -> list[float]:
        return [float(backend.to_numpy(norm())) for _ in range(products)]

    def through_log() -> list[float]:
        kept = DeviceLog(backend, device, max_pending=products)
        for _ in range(products):
            kept.add(norm=norm())
        return kept.flush()["norm"]

    return {
        "a list with one transfer": through_list,
        "a DeviceLog with one transfer": through_log,
        "one at a time": one_at_a_time,
    }


@_exercise("Do two GPUs compute at the same time?", "GFLOP/s", default=2048, small=64)
def two_gpus(backend: Backend, size: int, seconds: float) -> Iterator[Row]:
    """Multiply on two GPUs: one after the other, and both at once."""
    gpus = backend.devices()[1:3]
    ways = ("one after the other", "both at once")
    if len(gpus) < 2:
        note = f"needs two GPUs: {backend.name} has {len(gpus)} here"
        yield from (Row(way, "gpu:0 + gpu:1", "-", note=note) for way in ways)
        return
    pairs = [_matrices(backend, size, gpu) for gpu in gpus]

    for gpu, (a, b) in zip(gpus, pairs, strict=True):
        with backend.on(gpu):
            _check(backend, a @ b, a, b, gpu)
            once = backend.timeit(lambda a=a, b=b: a @ b, seconds=0).median
    products = max(1, int(_QUEUED / once))

    def multiply(*, waits: bool) -> list[Any]:
        last = []
        for gpu, (a, b) in zip(gpus, pairs, strict=True):
            with backend.on(gpu):
                for _ in range(products):
                    c = a @ b
            last.append(c)
            if waits:
                backend.synchronize(gpu)
        return last

    where, platform = " + ".join(map(str, gpus)), backend.platform(gpus[0])
    for way, waits in zip(ways, (True, False), strict=True):
        timing = backend.timeit(multiply, waits=waits, seconds=seconds)
        for gpu, (a, b), product in zip(gpus, pairs, multiply(waits=waits), strict=True):
            _check(backend, product, a, b, gpu)
        yield Row(way, where, platform).with_timing(timing, 2 * products * 2 * size**3 / 1e9)


@_exercise("What do many small copies cost against a large one?", "MB/s", default=1000, small=10)
def copies(backend: Backend, number: int, seconds: float) -> Iterator[Row]:
    """Copy the same bytes to each GPU: in many tensors of 4 kB, and in one."""
    values = np.arange(number * 1000, dtype="float32")
    large = backend.asarray(values, device=CPU)
    small = [backend.asarray(row, device=CPU) for row in values.reshape(number, 1000)]
    ways: dict[str, Callable[[Device], list[Any]]] = {
        f"{number} copies": lambda gpu: [backend.to(x, gpu) for x in small],
        "one copy": lambda gpu: [backend.to(large, gpu)],
    }
    for gpu in backend.devices()[1:]:
        for way, call in ways.items():
            found = call(gpu)
            for x in found:
                _check_device(backend, x, gpu, "copy tensors")
            _check_equal(backend, found[-1], values[-found[-1].shape[0] :], "copy tensors")
            timing = backend.timeit(call, gpu, seconds=seconds)
            row = _row(backend, way, gpu).with_timing(timing, values.nbytes / 1e6)
            yield verify_rate(row, gpu, values.nbytes)
    yield from _without_gpu(backend, ways)


@_exercise(
    "What does an operand cost that is not where it is computed with?",
    "products/s",
    default=1000,
    small=10,
)
def operands(backend: Backend, products: int, seconds: float) -> Iterator[Row]:
    """Multiply an operand of the CPU on each GPU: moved once, each time, or by the framework."""

    def repeat(a: Any, b: Any, _gpu: Device) -> Any:
        for _ in range(products):
            c = a @ b
        return c

    def move_once(a: Any, b: Any, gpu: Device) -> Any:
        return repeat(backend.to(a, gpu), b, gpu)

    def move_each_time(a: Any, b: Any, gpu: Device) -> Any:
        for _ in range(products):
            c = backend.to(a, gpu) @ b
        return c

    ways = {
        "moving at each product": move_each_time,
        "moving once before": move_once,
        "leaving it to the framework": repeat,
    }
    for gpu in backend.devices()[1:]:
        a, b = _matrices(backend, _WIDTH, gpu)
        there = backend.copy(a, CPU)
        for way, call in ways.items():
            row = _row(backend, way, gpu)
            with backend.on(gpu):
                try:
                    c = _compute(backend, call, there, b, gpu)
                except Exception as error:
                    if call is not repeat:
                        raise
                    yield replace(row, note=f"{backend.name} refuses it: {_in_words(error)}")
                    continue
                place = backend.device_of(c)
                _check(backend, c, a, b, gpu if call is not repeat else place)
                if place is not gpu:
                    yield replace(row, note=f"it computed on {place}")
                    continue
                timing = backend.timeit(call, there, b, gpu, seconds=seconds)
                yield row.with_timing(timing, products)
    yield from _without_gpu(backend, ways)


def _compute(backend: Backend, call: Callable[..., Any], *operands: Any) -> Any:
    """Return the result of a call, once it is computed: a lazy framework refuses operands then."""
    c = call(*operands)
    backend.to_numpy(c)
    return c


@_exercise(
    "What does it cost to convert each result to NumPy in the loop?",
    "products/s",
    default=1000,
    small=10,
)
def numpy(backend: Backend, products: int, seconds: float) -> Iterator[Row]:
    """Bring products of 100 x 100 to NumPy: each in the loop, and all of them at its end."""

    def in_loop(a: Any, b: Any) -> list[Any]:
        return [backend.to_numpy(a @ b) for _ in range(products)]

    def after(a: Any, b: Any) -> Any:
        stack = framework_of(backend).tensors.stack
        return backend.to_numpy(stack([a @ b for _ in range(products)]))

    for device in backend.devices():
        with backend.on(device):
            a, b = _matrices(backend, _WIDTH, device)
            _check(backend, a @ b, a, b, device)
            for way, call in (("NumPy in the loop", in_loop), ("one transfer at the end", after)):
                last = call(a, b)[-1]
                _check_close(last, backend.to_numpy(a @ b), f"bring a product to {way}", device)
                timing = backend.timeit(call, a, b, seconds=seconds)
                yield _row(backend, way, device).with_timing(timing, products)


def _row(backend: Backend, way: str, device: Device) -> Row:
    return Row(way, str(device), backend.platform(device))


def _without_gpu(backend: Backend, ways: Any) -> Iterator[Row]:
    """Yield rows that give the reason if there is no GPU."""
    if not backend.num_gpus():
        note = f"needs a GPU: {backend.name} has none here"
        yield from (Row(way, "gpu:0", "-", note=note) for way in ways)


def _matrices(backend: Backend, size: int, device: Device) -> tuple[Any, Any]:
    a, b = (backend.randn((size, size), seed=seed, device=device) for seed in (0, 1))
    return a, b


def _check(backend: Backend, c: Any, a: Any, b: Any, device: Device) -> None:
    """Check that ``c`` is ``a @ b``, and on the device.

    Both sides are multiplied by a vector of 1 and -1, which takes far less time than the product.
    """
    attempted = "time a product"
    _check_device(backend, c, device, attempted)
    found, left, right = (backend.to_numpy(x).astype("float64") for x in (c, a, b))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], found.shape[-1])
    tolerance = _TOLERANCES[backend.matmul_precision()]
    _check_close(found @ signs, left @ (right @ signs), attempted, device, tolerance)


def _check_close(
    found: Any, expected: Any, attempted: str, device: Device, tolerance: float = 1e-2
) -> None:
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not error <= tolerance:
        raise UnsupportedValueError(
            attempted,
            f"its result is wrong by {error:.2g} of its norm",
            "a framework that computes right: d2ldev doctor",
            [device],
        )


def _check_equal(backend: Backend, x: Any, expected: Any, attempted: str) -> None:
    if not np.array_equal(backend.to_numpy(x), expected):
        raise UnsupportedValueError(
            attempted, "other values arrived", "d2ldev doctor", [backend.device_of(x)]
        )


def _check_device(backend: Backend, x: Any, device: Device, attempted: str) -> None:
    there = backend.device_of(x)
    if there is not device:
        raise DeviceMismatchError(
            f"{attempted} on {device}",
            f"the result is on {there}",
            "a framework that computes where it is told to: d2ldev doctor",
            [device, there],
        )


def _in_words(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {text_of(error)}".partition("\n")[0][:200]
