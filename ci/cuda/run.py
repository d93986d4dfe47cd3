"""Run on a machine with one NVIDIA GPU what no other machine can show, within a few minutes.

    ci/cuda/pack            # where there is a network: d2ldev and what the machine lacks
    ci/cuda/run --out DIR   # on the machine with the GPU, which needs no network

The machine has Python, pytest and the frameworks that are tested: those that are missing are named.
What is a matter of right and wrong runs first, all at once. What is timed runs afterwards, alone.
Within each part the most telling comes first, because the time may end before the list does.

``DIR`` then holds the output of each step, the reports of the suites as ``NAME.conformance.json``,
and ``summary.txt``: the card, the frameworks that are missing, and each step with its seconds and
its status, which is ``passed``, ``failed``, ``cut short`` or ``left out``. The exit status is 1
unless all steps passed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Those with code for current cards, which MXNet's last release lacks.
FRAMEWORKS = ("torch", "jax", "tensorflow")
SUMMARY = "summary.txt"
# Beside the wheels: the commit that d2ldev's wheel was built from.
COMMIT = "commit.txt"
# Of the time that is left, for what runs at the same time. The rest is for what is timed.
_SHARE = 0.5
# How often it is asked whether a step has ended, in seconds.
_LOOK = 0.1
# How long processes may take to write their reports after they were interrupted, in seconds.
_GRACE = 10.0
# A step that would have less time than this, in seconds, is left out.
_LEAST = 10.0


@dataclass(frozen=True)
class Step:
    """A command whose output is kept.

    Args:
        name: of the step, and of the file with its output.
        command: the arguments of Python.
        seconds: the longest time it may take; the remaining time of the run is a limit, too.
        backend: the active one; empty leaves the choice to d2ldev.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = math.inf
    backend: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a step: its status, and the seconds that it took."""

    name: str
    status: str
    seconds: float = 0.0


def d2ldev(*arguments: str) -> tuple[str, ...]:
    """Return the arguments of Python for a command of d2ldev."""
    return ("-m", "d2ldev", *arguments)


def pytest(*arguments: str) -> tuple[str, ...]:
    """Return the arguments of Python for pytest with this project's settings."""
    return ("-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), *arguments)


def steps_together(
    frameworks: Sequence[str], out: Path, cores: int, commit: str = ""
) -> Iterator[Step]:
    """Yield what is right or wrong: the steps that run at the same time.

    Args:
        frameworks: that are there.
        out: the folder of the results, where the suites write their reports.
        cores: of the machine, which the tests of the frameworks share.
        commit: of d2ldev's wheel, for the reports; empty if it is unknown.
    """
    named = ("--d2ldev-commit", commit) if commit else ()
    workers = ("-n", str(max(1, cores // (2 * len(frameworks) or 1))))
    for name in frameworks:
        suite = ("conformance", name, "--report", str(out / "reports" / name))
        yield Step(f"suite-{name}", d2ldev(*suite, "--", "-q", *workers, *named))
    for name in frameworks:
        yield Step(f"tour-{name}", d2ldev("tour"), backend=name)
    for name in frameworks:
        own = ROOT / "tests" / "backends" / f"{name}_backend"
        yield Step(f"book-{name}", pytest(str(own / "book")))
        ignored = ("--ignore", str(own / "book"))
        yield Step(f"own-tests-{name}", pytest(str(own), *ignored, *workers))


def steps_alone(frameworks: Sequence[str], out: Path) -> Iterator[Step]:
    """Yield what is timed: the steps that run one after the other, with nothing beside them."""
    if "torch" in frameworks:
        yield benchmark("epochs", out)
    for name in frameworks:
        yield benchmark("small_calls", out, name)
        yield Step(f"bench-{name}", d2ldev("bench", "--all", "--backend", name), 90)
        yield benchmark("transfers", out, name)
    for name in frameworks:
        # Beside others it would leave them no memory.
        # Only as the machine is: the profile itself also has a process with virtual GPUs.
        suite = ("-m", "pytest", "--pyargs", "d2ldev_conformance", "--d2ldev-backend", name)
        full = ("--d2ldev-profile", "nightly", "-q")
        full += ("--d2ldev-requirement", "gpus.a-copy-that-does-not-fit")
        yield Step(f"full-card-{name}", (*suite, *full), 60)


def benchmark(program: str, out: Path, framework: str = "") -> Step:
    """Return the step of one of the programs in ``benchmarks``, which keeps its results as JSON."""
    name = "-".join(filter(None, [program, framework]))
    chosen = ("--framework", framework) if framework else ()
    path = ROOT / "benchmarks" / f"{program}.py"
    return Step(name, (str(path), *chosen, "--json", str(out / f"{name}.json")), 120)


class Clock:
    """The time that is left.

    Args:
        seconds: of the whole run.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until the run has to end."""
        return self._end - time.monotonic()


class Process:
    """A step that runs, in a process group of its own, so that what it started ends with it.

    Args:
        step: what is run.
        out: the folder of its output.
        variables: the environment.
    """

    def __init__(self, step: Step, out: Path, variables: Mapping[str, str]) -> None:
        self._step = step
        self._began, self._seconds = time.monotonic(), 0.0
        chosen = {"D2LDEV_BACKEND": step.backend} if step.backend else {}
        with (out / f"{step.name}.txt").open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, *step.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**variables, **chosen},
                cwd=out,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended; asked often, it knows when that was."""
        is_running = self._process.poll() is None
        if is_running:
            self._seconds = time.monotonic() - self._began
        return is_running

    @property
    def has_time(self) -> bool:
        """Whether the step has not had the time that it may take at most."""
        return self._seconds < self._step.seconds

    def interrupt(self) -> None:
        """Let pytest write its report, and end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def end(self, grace: float | None = None) -> Outcome:
        """Kill what is left of the group, and return what became of the step.

        Args:
            grace: how many seconds an interrupted step has to end by itself.
        """
        if grace is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, grace))
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = "failed" if self._process.wait() else "passed"
        return Outcome(self._step.name, status if grace is None else "cut short", self._seconds)


class Run:
    """Steps, and what became of them.

    Args:
        out: the folder of the results.
        variables: the environment of the steps.
        clock: the time that is left.
    """

    def __init__(self, out: Path, variables: Mapping[str, str], clock: Clock) -> None:
        self._out, self._variables, self._clock = out, variables, clock
        self.outcomes: list[Outcome] = []

    def together(self, steps: Iterable[Step], share: float) -> None:
        """Run steps at the same time, for at most a share of the time that is left."""
        # Several of them run at once: more threads than cores would only wait for each other.
        self._run(steps, {"OMP_NUM_THREADS": "1"}, Clock(self._clock.left * share))

    def in_turn(self, steps: Iterable[Step]) -> None:
        """Run steps one after the other; those that find no time are left out."""
        for step in steps:
            if self._clock.left < _LEAST:
                self._note(Outcome(step.name, "left out"))
            else:
                self._run([step], {}, self._clock)

    def _run(self, steps: Iterable[Step], variables: Mapping[str, str], clock: Clock) -> None:
        started = [Process(step, self._out, {**self._variables, **variables}) for step in steps]
        while clock.left > 0:
            running = [each for each in started if each.is_running]
            if not any(each.has_time for each in running):
                break
            time.sleep(_LOOK)
        cut = [each for each in started if each.is_running]
        for process in cut:
            process.interrupt()
        grace = Clock(_GRACE)  # of all of them together
        for process in started:
            self._note(process.end(grace.left if process in cut else None))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        line = f"{outcome.status:10} {outcome.seconds:6.1f} s  {outcome.name}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        # At once: the machine may be taken away before the run has ended.
        with (self._out / SUMMARY).open("a", encoding="utf-8") as summary:
            summary.write(line)


def install(wheels: Path, site: Path) -> None:
    """Install wheels into a folder of their own, without a network and without what they need."""
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    if found:
        options = ("--no-index", "--no-deps", "--no-compile", "--target", str(site))
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *found]
        subprocess.run(command, check=True)  # noqa: S603


def read_commit(wheels: Path) -> str:
    """Return the commit that ``pack`` noted beside the wheels; empty if there is none."""
    note = wheels / COMMIT
    return note.read_text(encoding="utf-8").strip() if note.exists() else ""


def cards() -> list[str]:
    """Return the names of the NVIDIA GPUs of this machine, with their drivers."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return found.stdout.splitlines()


def collect_reports(out: Path) -> None:
    """Put the reports of the suites beside the other results, each under the backend's name."""
    for path in sorted((out / "reports").glob("*/conformance.json")):
        shutil.move(path, out / f"{path.parent.name}.conformance.json")
    shutil.rmtree(out / "reports", ignore_errors=True)


def main() -> int:
    """Run all steps, write the summary, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("cuda-results"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=10.0, help="the longest time of the run")
    parser.add_argument("--wheels", type=Path, default=HERE / "wheels", metavar="DIR")
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="run only this backend; may be repeated"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="run only steps whose names match"
    )
    parser.add_argument("--without-gpu", action="store_true", help="try the script itself")
    arguments = parser.parse_args()
    # A shell that puts it into the background has it ignore Ctrl-C, and so would its steps.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    clock = Clock(60 * arguments.minutes)
    found = cards()
    if not found and not arguments.without_gpu:
        sys.stderr.write(
            "cannot run: nvidia-smi finds no GPU here; --without-gpu tries the script\n"
        )
        return 2
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    frameworks = arguments.backend or [x for x in FRAMEWORKS if importlib.util.find_spec(x)]
    missing = [name for name in FRAMEWORKS if name not in frameworks]
    head = f"cards: {', '.join(found) or 'none'}\nnot run: {', '.join(missing) or 'none'}\n"
    (out / SUMMARY).write_text(head, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="d2ldev-site-") as site:
        install(arguments.wheels, Path(site))
        path = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Whatever the working folder holds, it is not imported.
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        variables["PYTHONUNBUFFERED"] = "1"  # what is cut short has said what it knew
        run = Run(out, variables, clock)

        def chosen(steps: Iterable[Step]) -> list[Step]:
            return [step for step in steps if fnmatch(step.name, arguments.only)]

        run.in_turn(chosen([Step("doctor", d2ldev("doctor", "--all"), 60)]))
        commit = read_commit(arguments.wheels)
        suites = steps_together(frameworks, out, os.cpu_count() or 1, commit)
        run.together(chosen(suites), _SHARE)
        collect_reports(out)
        run.in_turn(chosen(steps_alone(frameworks, out)))
    return 0 if all(each.status == "passed" for each in run.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
