"""One sentence for each exercise, drawn from the figures and from nothing else.

The CPU computes for a virtual GPU: nothing about hardware follows from its figures. Two times of
which the quartiles overlap, or that differ by less than a twentieth, are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from d2ldev.bench.results import VIRTUAL, Figures, Result, Row, bests

_SAME = 1.05
OF_SMALL = "Nothing follows from --small: its sizes are there to try the command out."
"""What is said in the place of each conclusion with ``--small``."""
# How much of the time of a list and one transfer a ``DeviceLog`` takes at most.
LOG_AIM = 1.1


def of_products(rows: Sequence[Row]) -> str:
    """Say from which size on each GPU is faster than the CPU, and the best rates.

    >>> of_products([Row('', 'cpu', 'cpu', 16, Figures(1.0, 1.0, 1.0, 2.0))])
    'Tthere is no real GPU to compare the CPU with; the best rate is 2 GFLOP/s on cpu.'
    """
    times: dict[str, dict[int, float]] = {}
    for device, of_it in _find_measured(rows).items():
        times[device] = {row.size or 0: figures.seconds for row, figures in of_it}
    best = bests([row for row in rows if row.platform != VIRTUAL])
    peaks = ", ".join(f"{number(rate)} GFLOP/s on {device}" for device, rate in best.items())
    found = [_crossover(gpu, times[gpu], times.get("cpu", {})) for gpu in times if gpu != "cpu"]
    found = found or ["there is no real GPU to compare the CPU with"]
    return _sentence([*found, f"the best rate is {peaks}"] if peaks else found, rows)


def _crossover(device: str, gpu: Mapping[int, float], cpu: Mapping[int, float]) -> str:
    sizes = sorted(gpu.keys() & cpu.keys())
    if not sizes:
        return f"no size was measured on both {device} and the CPU"
    first = None
    for size in reversed(sizes):
        if gpu[size] >= cpu[size]:
            break
        first = size
    if first is None:
        return f"up to {sizes[-1]} x {sizes[-1]}, {device} is not faster than the CPU"
    least = ", the smallest size," if first == sizes[0] else ""
    return f"from {first} x {first}{least} on, {device} is faster than the CPU"


def of_ways(rows: Sequence[Row]) -> str:
    """Say of each device how fast its other ways are against the first one.

    >>> of_ways([Row('one by one', 'gpu:0', 'cuda', None, Figures(6.0, 6.0, 6.0, 1.0)),
    ...          Row('together', 'gpu:0', 'cuda', None, Figures(2.0, 2.0, 2.0, 3.0))])
    'On gpu:0, together is 3 times as fast as one by one.'
    """
    parts = []
    for device, ((first, before), *others) in _find_measured(rows).items():
        for row, figures in others:
            parts.append(f"on {device}, {row.way} is {_against(figures, before)} {first.way}")
    return _sentence(parts, rows)


def of_logs(rows: Sequence[Row]) -> str:
    """Say of each device how much of the time of the first way its others take.

    The second way is a ``DeviceLog``, which has an aim.

    >>> of_logs([Row('a list', 'cpu', 'cpu', None, Figures(2.0, 2.0, 2.0, 1.0)),
    ...          Row('a DeviceLog', 'cpu', 'cpu', None, Figures(2.1, 2.1, 2.1, 1.0)),
    ...          Row('one at a time', 'cpu', 'cpu', None, Figures(5.0, 5.0, 5.0, 1.0))])
    'On cpu, a DeviceLog takes 1.05 of the time of a list (the aim, at most 1.1, is met), \
one at a time 2.5.'
    """
    parts = []
    for device, ((first, floor), *others) in _find_measured(rows).items():
        shares = [(row.way, figures.seconds / floor.seconds) for row, figures in others]
        if shares:
            (log, share), *rest = shares
            met = "met" if share <= LOG_AIM else "missed"
            said = f"on {device}, {log} takes {number(share)} of the time of {first.way}"
            said += f" (the aim, at most {number(LOG_AIM)}, is {met})"
            parts.append(", ".join([said, *(f"{way} {number(share)}" for way, share in rest)]))
    return _sentence(parts, rows)


def of_rates(rows: Sequence[Row]) -> str:
    """Say of each device at which rate its ways move bytes."""
    parts = []
    for device, of_it in _find_measured(rows).items():
        rates = [f"{row.way} moves {number(figures.rate)} MB/s" for row, figures in of_it]
        parts.append(f"on {device}, {', '.join(rates)}")
    return _sentence(parts, rows)


def of_backends(results: Sequence[Result]) -> str:
    """Say of each device which backend has the best rate there, and by how much.

    Only what multiplied in the same precision is compared.

    Args:
        results: of one exercise on several backends; those that ended with an error are left out.

    Returns:
        A sentence; empty if no device of the hardware was measured on two of them.

    >>> def result(backend, rate):
    ...     row = Row('', 'cpu', 'cpu', None, Figures(1.0, 1.0, 1.0, rate))
    ...     return Result('log', backend, '', '', [row])
    >>> of_backends([result('torch', 6.0), result('jax', 2.0)])
    'At its best on cpu, torch is 3 times as fast as jax.'
    """
    best: dict[tuple[str, str], list[tuple[str, Figures]]] = {}
    for result in results:
        rows = result.rows if result.error is None else []
        for device, of_it in _find_measured(rows).items():
            row, figures = max(of_it, key=lambda each: each[1].rate)
            best.setdefault((device, row.precision), []).append((result.backend, figures))
    parts = []
    for (device, precision), found in best.items():
        (first, fastest), *others = sorted(found, key=lambda each: -each[1].rate)
        if others:
            said = [f"{_at_rates(fastest, figures)} {name}" for name, figures in others]
            where = f"{device} with products in {precision!r}" if precision else device
            parts.append(f"at its best on {where}, {first} is {' and '.join(said)}")
    return _sentence(parts, ()) if parts else ""


def _at_rates(figures: Figures, before: Figures) -> str:
    (low, _), (_, high) = _range_of_rates(figures), _range_of_rates(before)
    return _times_as_fast(figures.rate / before.rate, overlap=low <= high)


def _range_of_rates(figures: Figures) -> tuple[float, float]:
    work = figures.rate * figures.seconds
    return work / max(figures.high, 1e-12), work / max(figures.low, 1e-12)


def _against(figures: Figures, before: Figures) -> str:
    overlap = figures.low <= before.high and before.low <= figures.high
    return _times_as_fast(before.seconds / figures.seconds, overlap=overlap)


def _times_as_fast(ratio: float, *, overlap: bool) -> str:
    if overlap or 1 / _SAME < ratio < _SAME:
        return "as fast as"
    if ratio > 1:
        return f"{number(ratio)} times as fast as"
    return f"{number(1 / ratio)} times as slow as"


def _find_measured(rows: Sequence[Row]) -> dict[str, list[tuple[Row, Figures]]]:
    """Return what was measured on each device of the hardware."""
    found: dict[str, list[tuple[Row, Figures]]] = {}
    for row in rows:
        if row.figures is not None and row.platform != VIRTUAL:
            found.setdefault(row.device, []).append((row, row.figures))
    return found


def _sentence(parts: Sequence[str], rows: Sequence[Row]) -> str:
    virtual = ", ".join(dict.fromkeys(row.device for row in rows if row.platform == VIRTUAL))
    said = [*parts]
    if virtual:
        said.append(f"nothing about a GPU follows from what is virtual here ({virtual})")
    text = "; ".join(said or ["nothing was compared here, and nothing follows"])
    return f"{text[0].upper()}{text[1:]}."


def number(value: float) -> str:
    """Return a number with three digits.

    >>> number(0.12345), number(2.0), number(12345.6)
    ('0.123', '2', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
