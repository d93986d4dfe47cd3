"""What the head of a report tells about its run, and what differs between the runs of a matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
"""A report, or an entry of ``runs`` in a matrix."""

# pytest's exit status of a run that did not end as it should.
_CUT_SHORT = {2: "interrupted", 3: "internal error", 4: "wrong options", 5: "nothing was tested"}


def platform_of(run: Run) -> str:
    """Return the platform of a run: that of its last device, as the CPU is the first.

    >>> platform_of({"devices": [{"platform": "cpu"}, {"platform": "cuda"}]})
    'cuda'
    """
    return str(run["devices"][-1]["platform"])


def name_gpus(run: Run) -> str:
    """Return the number of GPUs of each platform in words; ``'cpu'`` for a run without GPUs.

    >>> name_gpus({"devices": [{"platform": "cpu"}, *[{"platform": "virtual"}] * 2]})
    '2 virtual'
    """
    found = Counter(each["platform"] for each in run["devices"][1:])
    return ", ".join(f"{number} {name}" for name, number in found.items()) or "cpu"


def name_framework(run: Run) -> str:
    """Return the framework of a run with its version.

    >>> name_framework({"backend": "torch", "versions": {"d2ldev": "1", "torch": "2.13.0"}})
    'torch 2.13.0'
    """
    given = {**run["versions"]}
    names = [name for name in given if name not in ("d2ldev", "python")]
    return f"{names[0]} {given[names[0]]}" if names else str(run["backend"])


def name_origin(run: Run) -> list[str]:
    """Return d2ldev with its version, and what else the report has of the suite's origin.

    >>> name_origin({"versions": {"d2ldev": "0.1.0"}, "commit": "6fa6297", "suite": "c690af49"})
    ['d2ldev 0.1.0', 'commit 6fa6297', 'suite c690af49']
    """
    told = {"d2ldev": run["versions"].get("d2ldev"), "interface": run.get("interface")}
    told |= {key: run[key] for key in ("commit", "suite")}
    return [f"{name} {value}" for name, value in told.items() if value] or ["d2ldev"]


def tell_end(run: Run) -> str:
    """Return how a run ended if it was cut short; empty otherwise.

    >>> tell_end({"exit_status": 2})
    'exit status 2, interrupted'
    """
    status = run["exit_status"]
    if status is None or status in (0, 1):
        return ""
    return f"exit status {status}, {_CUT_SHORT.get(status, 'ended by a signal')}"


def select_newest(runs: Sequence[Run]) -> list[Run]:
    """Return the newest run of each backend on each platform, in the order of their names."""
    newest = {
        (run["backend"], platform_of(run)): run for run in sorted(runs, key=lambda run: run["date"])
    }
    return [newest[key] for key in sorted(newest)]


def compare_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what a reader of a matrix has to know before comparing its columns.

    Args:
        runs: each with its ``source``.
    """
    suites = {run["suite"] for run in runs}
    if len(runs) > 1 and (len(suites) > 1 or suites == {""}):
        origins = [
            ", ".join([*name_origin(run), *([] if run["suite"] else ["suite unknown"])])
            for run in runs
        ]
        told = "; ".join(f"{key}: {names}" for key, names in _group(runs, origins).items())
        yield f"The runs may be of different suites. {told}."
    same = [(run["backend"], name_framework(run), name_gpus(run)) for run in runs]
    for key, names in _group(runs, same).items():
        if same.count(key) > 1:
            yield f"{key[1]} on {key[2]} ran {same.count(key)} times: {names}."
    for run in runs:
        if end := tell_end(run):
            yield f"{run['source']} was cut short: {end}."


def _group(runs: Sequence[Run], keys: Sequence[Any]) -> dict[Any, str]:
    """Return the names of the runs with each key, in the order of the keys."""
    found: dict[Any, list[str]] = {}
    for run, key in zip(runs, keys, strict=True):
        found.setdefault(key, []).append(run["source"])
    return {key: ", ".join(names) for key, names in found.items()}
