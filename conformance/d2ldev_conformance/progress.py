"""The progress of a backend, by module, and whether a run did what it was asked to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from d2ldev.framework.testing import MODULES

OUTCOMES = ("passed", "failed", "not begun", "known gap", "cannot", "skipped", "not run")
"""What may happen to a requirement, in the order of the columns."""
# A requirement has the worst outcome of its tests, except for skipping. If it passed on the CPU,
# and was skipped without a GPU, it has passed. The counts show the skipped tests. If the run ended
# before some of its tests, nobody knows.
_WORST_FIRST = ("failed", "not begun", "known gap", "cannot", "not run", "passed", "skipped")
FAILED = ("failed", "not begun")
_TESTED = ("passed", "failed", "known gap")
_UNDONE = ("failed", "not begun", "not run")


def read_modules(given: Iterable[str]) -> list[str]:
    """Return the modules of ``--only``, in their order; each text may have several, with commas.

    Raises:
        ValueError: if a name is not that of a module.
    """
    found = {name.strip() for text in given for name in text.split(",")}
    if unknown := sorted(found - {*MODULES}):
        raise ValueError(f"no such module: {', '.join(unknown)}; there are {', '.join(MODULES)}")
    return [module for module in MODULES if module in found]


def judge(tests: Mapping[str, int]) -> str:
    """Return the outcome of a requirement: the worst of its tests, not run if there is none.

    Args:
        tests: how many have each outcome.

    >>> judge({"passed": 3, "skipped": 1}), judge({"passed": 3, "not run": 1})
    ('passed', 'not run')
    """
    return next((outcome for outcome in _WORST_FIRST if tests.get(outcome)), "not run")


def count_by_module(rows: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many requirements of each module have each outcome, in the modules' order.

    Args:
        rows: as ``Report.rows`` returns them.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["module"], Counter())[row["outcome"]] += 1
    return {module: found[module] for module in MODULES if module in found}


def format_counts(counts: Mapping[str, Counter[str]]) -> list[str]:
    r"""Return a table: a line for each module, and a column for each outcome that there is.

    >>> print(*format_counts({"tensors": Counter({"passed": 60, "not begun": 1})}), sep="\n")
             passed  not begun
    tensors      60          1
    """
    columns = [each for each in OUTCOMES if any(count[each] for count in counts.values())]
    width = max(map(len, counts), default=0)
    lines = [" " * width + "".join(f"  {each:>6}" for each in columns)]
    for module, count in counts.items():
        cells = (f"  {count[each]:>{max(6, len(each))}}" for each in columns)
        lines.append(module.ljust(width) + "".join(cells))
    return lines


def tell_progress(counts: Mapping[str, Counter[str]], next_steps: Mapping[str, str]) -> str:
    """Return one sentence: the modules that are done, how many, and what is next.

    Args:
        counts: as ``count_by_module`` returns them, of whole modules.
        next_steps: what is left to write in a module.

    >>> done, empty, red = (Counter({each: 4}) for each in ("passed", "not begun", "failed"))
    >>> tell_progress({"devices": done, "models": empty}, {"models": "write Models.mlp"})
    'devices done, 1 of 7: next, models: write Models.mlp'
    >>> tell_progress({"devices": red, "tensors": red, "files": done}, {})
    'files done, 1 of 7: next, devices: 4 failed; tensors: 4 failed'
    >>> tell_progress({"files": done}, {})
    'files done, 1 of 7; devices, tensors, models did not run: next, strict'
    """
    done = [module for module, count in counts.items() if is_done(count)]
    left = [
        f"{module}: {next_steps.get(module) or _count_undone(count)}"
        for module, count in counts.items()
        if module not in done
    ]
    before = MODULES[: MODULES.index([*counts][-1]) + 1] if counts else ()
    unknown = [module for module in before if module not in counts]
    head = f"{', '.join(done)} done, {len(done)} of {len(MODULES)}" if done else ""
    if unknown and not left:
        head += f"; {', '.join(unknown)} did not run"
    step = "next, " + "; ".join(left) if left else _name_next([*counts])
    return f"{head}: {step}" if head else step


def _count_undone(count: Counter[str]) -> str:
    """Return how many requirements of a module keep it from being done, in words."""
    told = [f"{count[each]} {each}" for each in _UNDONE if count[each]]
    return ", ".join(told) or "nothing passed"


def _name_next(modules: Sequence[str]) -> str:
    """Return the module after the last one, in words."""
    number = MODULES.index(modules[-1]) + 1 if modules else 0
    return f"next, {MODULES[number]}" if number < len(MODULES) else "nothing is left"


def is_done(count: Counter[str]) -> bool:
    """Return whether requirements of a module passed, and no one is undone."""
    return count["passed"] > 0 and not any(count[each] for each in _UNDONE)


def was_tested(counts: Mapping[str, Counter[str]]) -> bool:
    """Return whether a run tested a requirement at all."""
    return any(count[each] for count in counts.values() for each in _TESTED)


def find_undone_modules(counts: Mapping[str, Counter[str]], asked: Sequence[str]) -> list[str]:
    """Return the modules that are not done, in their order.

    Args:
        counts: as ``count_by_module`` returns them.
        asked: the modules that were named. Of the others, those in which something is not begun or
            failed are undone. A selection of tests may leave a module without one that passes.
    """
    return [
        module
        for module in MODULES
        if (module in asked and not is_done(counts.get(module, Counter())))
        or any(counts.get(module, Counter())[each] for each in _UNDONE)
    ]
