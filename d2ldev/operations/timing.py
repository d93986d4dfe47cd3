"""How long a call takes, with everything that it has queued on its devices.

Source: D2L, section 6.7.5, whose fourth exercise measures calls that only queue work.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from d2ldev.contract import Framework
from d2ldev.device import Device
from d2ldev.display import format_html_table, format_number
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError, describe
from d2ldev.operations import creation
from d2ldev.operations.devices import all_devices, on
from d2ldev.operations.moving import to_numpy

# Seconds. Asking the clock and the devices then takes less than a hundredth of a run.
_SHORTEST_RUN = 5e-3
_FEWEST_RUNS = 5
_MOST_RUNS = 200
# Seconds of products that show whether ``synchronize`` waits for them.
_LONG_ENOUGH = 0.02
_TRIES = 3
_ROWS = 256

# Whether a framework computes on a device only what somebody holds.
_CHECKED: WeakKeyDictionary[Framework, dict[Device, bool]] = WeakKeyDictionary()


class Timing(NamedTuple):
    """How long one call takes.

    Args:
        median: seconds, of all runs.
        low, high: the quartiles: half of the runs lie between them.
        runs: how often was measured.
        calls: how many calls each run had.
        devices: those that were waited for before and after each run.

    >>> Timing(0.002, 0.0019, 0.0022, 198, 1, (Device('cpu'),))
    <2 ms (1.9 to 2.2), 198 runs, cpu>
    """

    median: float
    low: float
    high: float
    runs: int
    calls: int
    devices: tuple[Device, ...]

    def __repr__(self) -> str:
        median, quartiles, runs, where = self._words()
        return f"<{median} ({quartiles}), {runs}, {where}>"

    def _repr_html_(self) -> str:
        median, quartiles, runs, where = self._words()
        rows = [("median", median), ("quartiles", quartiles), ("measured", runs), ("on", where)]
        return format_html_table((), rows)

    def _words(self) -> tuple[str, str, str, str]:
        """Return the median, the quartiles in its unit, the runs, and the devices, in words."""
        _, factor = _unit(self.median)
        quartiles = " to ".join(format_number(each / factor, 4) for each in (self.low, self.high))
        runs = f"{self.runs} runs of {self.calls}" if self.calls > 1 else f"{self.runs} runs"
        return _in_words(self.median), quartiles, runs, ", ".join(map(str, self.devices))


_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is shown, and its seconds."""
    return next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])


def _in_words(seconds: float) -> str:
    unit, factor = _unit(seconds)
    return f"{format_number(seconds / factor, 4)} {unit}"


def timeit(
    framework: Framework,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seconds: float,
) -> Timing:
    """Measure a function; see ``Backend.timeit``.

    Args:
        framework: whose devices are waited for.
        function: the function to call.
        args, kwargs: its arguments.
        seconds: the approximate duration.
    """
    if not callable(function):
        raise UnsupportedValueError(
            f"time {describe(function)}",
            "it cannot be called",
            "backend.timeit(torch.mm, X, Y), or backend.timeit(lambda: X @ Y)",
        )
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= seconds <= 3600:
        raise UnsupportedValueError(
            f"time {describe(function)} for seconds={describe(seconds)}",
            "it must be a number from 0 to 3600",
            "seconds=1",
        )
    places = all_devices(framework)
    # Without a wait after each call they would compute the last one of a run only.
    lazy = [device for device in places if _check_waiting(framework, device)]

    def run(calls: int) -> float:
        """Return the seconds of so many calls."""
        _wait(framework, places)
        begin = time.perf_counter_ns()
        for _ in range(calls):
            # Kept until after the wait: JAX does not wait for an array without a reference.
            kept = function(*args, **kwargs)
            _wait(framework, lazy)
        _wait(framework, places)
        taken = (time.perf_counter_ns() - begin) / 1e9
        del kept
        return taken

    run(1)  # compiles
    calls, taken = 1, run(1)
    while taken < _SHORTEST_RUN:
        calls = max(2 * calls, int(calls * _SHORTEST_RUN / max(taken, 1e-9)))
        taken = run(calls)
    end = time.perf_counter() + float(seconds)
    found: list[float] = []
    while len(found) < _FEWEST_RUNS or (time.perf_counter() < end and len(found) < _MOST_RUNS):
        found.append(run(calls) / calls)
    from statistics import median  # which takes a sixth of the time of ``import d2ldev``

    found.sort()
    low, high = found[len(found) // 4], found[-1 - len(found) // 4]
    return Timing(median(found), low, high, len(found), calls, tuple(places))


def _wait(framework: Framework, places: Sequence[Device]) -> None:
    for device in places:
        framework.devices.synchronize(device)


def _check_waiting(framework: Framework, device: Device) -> bool:
    """Check, once for each device, that ``synchronize`` waits for its queue.

    Returns:
        Whether the framework only records work, and drops what nobody holds.

    Raises:
        DeviceUnavailableError: if values are read much later than it has returned.
    """
    checked = _CHECKED.setdefault(framework, {})
    if device in checked:
        return checked[device]
    # With the device as the framework's default: some compute a new number there.
    with on(framework, device):
        x = creation.full(framework, (_ROWS, _ROWS), 1 / _ROWS, None, device, None)
        products = 16
        for _ in range(_TRIES):
            taken = _time_products(framework, device, x, products)
            while sum(taken) < _LONG_ENOUGH:
                products *= 2
                taken = _time_products(framework, device, x, products)
            called, waited, read = taken
            if read <= called + waited:
                checked[device] = _check_dropping(framework, device, x, products)
                return checked[device]
    raise DeviceUnavailableError(
        f"time what {device} computes",
        f"its synchronize returned after {called + waited:.3f} s, and values were there"
        f" {read:.3f} s later",
        "a framework whose synchronize waits: d2ldev conformance NAME",
        [device],
    )


def _check_dropping(framework: Framework, device: Device, x: Any, products: int) -> bool:
    """Return whether products that nobody holds are never computed, each time.

    One time says little: the first products are compiled, and another program may have its turn.
    """
    for _ in range(_TRIES):
        held = _time_products(framework, device, x, products)
        dropped = _time_products(framework, device, x, products, is_held=False)
        is_computed_at_once = held.waited < held.called / 10
        if is_computed_at_once or dropped.waited > held.waited / 4:
            return False
    return True


class _Products(NamedTuple):
    """The seconds of the calls, of ``synchronize``, and until the values were read."""

    called: float
    waited: float
    read: float


def _time_products(
    framework: Framework, device: Device, x: Any, products: int, *, is_held: bool = True
) -> _Products:
    """Return how long products take, whose result is read, or which nobody holds."""
    framework.devices.synchronize(device)
    times = [time.perf_counter()]
    y = x
    for _ in range(products):
        y = x @ y  # of means, which stay what they are
    y = y if is_held else x
    times.append(time.perf_counter())
    framework.devices.synchronize(device)
    times.append(time.perf_counter())
    to_numpy(framework, y)
    times.append(time.perf_counter())
    return _Products(*(end - begin for begin, end in itertools.pairwise(times)))
