"""The pytest plugin: ``pytest --d2ldev-leaks`` runs a library's own tests on another device.

Every pytest run of an environment that has d2ldev loads it. It offers options, markers and fixtures
there. All else waits for ``--d2ldev-leaks``. No framework is imported before the first test runs,
unless ``--d2ldev-leaks-backend`` names it.

Held by ``tests/backends/torch_backend/test_torch_leaks_plugin.py``.
"""

from __future__ import annotations

import json
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from d2ldev._backend import Backend
    from d2ldev.contract.leaks import Frames, Leak
    from d2ldev.leaks.finding import Leaks

_SEARCH: pytest.StashKey[_Search] = pytest.StashKey()
_LEAKS: pytest.StashKey[Leaks] = pytest.StashKey()
_TABLE: pytest.StashKey[_Table] = pytest.StashKey()
_PROPERTY = "d2ldev leaks"
_DEVICES = ("cpu", "gpu:0", "gpu:1")
_ALLOWED = "d2ldev_allow_leaks"
_SKIPPED = "d2ldev_skip_leaks"
VERSION = 1
"""The version of the JSON file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the options."""
    group = parser.getgroup("d2ldev leaks", "d2ldev: find tensors that leave their inputs' device")
    group.addoption(
        "--d2ldev-leaks",
        action="store_true",
        help="run the tests with their inputs on another device, and fail where a tensor leaves it",
    )
    group.addoption(
        "--d2ldev-leaks-backend",
        metavar="NAME",
        help="the framework; default: the active backend of d2ldev",
    )
    group.addoption(
        "--d2ldev-leaks-device",
        metavar="DEVICE",
        default="gpu:1",
        help="the device of the inputs; default: gpu:1, a virtual GPU",
    )
    group.addoption(
        "--d2ldev-leaks-allow",
        metavar="PATTERN",
        action="append",
        default=[],
        help="allow a line, a file or a function: 'ot/backend.py:1034', 'ot.backend.*'",
    )
    group.addoption(
        "--d2ldev-leaks-tests",
        metavar="PATH",
        action="append",
        default=[],
        help="a further file or folder whose tensors are inputs, such as helpers of the tests",
    )
    group.addoption(
        "--d2ldev-leaks-fail",
        metavar="KINDS",
        default="mix,result,move,refusal",
        help="the kinds of leaks that fail a test; default: %(default)s",
    )
    group.addoption(
        "--d2ldev-leaks-json", metavar="FILE", help="write the leaks to this file, as JSON"
    )
    group.addoption(
        "--d2ldev-leaks-as-cuda",
        action="store_true",
        help="let PyTorch's virtual GPUs stand for CUDA devices while a test runs",
    )
    group.addoption(
        "--d2ldev-leaks-baseline",
        metavar="FILE",
        help="accept the leaks in this file; the first run writes it, and fails for none",
    )
    parser.addini(
        "d2ldev_leaks_allow", "as --d2ldev-leaks-allow, a pattern in each line", type="linelist"
    )
    parser.addini(
        "d2ldev_leaks_tests", "as --d2ldev-leaks-tests, a path in each line", type="linelist"
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Let a framework that the command names make its virtual GPUs, before any code uses it."""
    options = early_config.known_args_namespace
    if not options.d2ldev_leaks or not options.d2ldev_leaks_backend:
        return
    from d2ldev.active import get_backend
    from d2ldev.errors import D2LDevError

    _make_virtual_gpus(options.d2ldev_leaks_device)
    try:
        get_backend(options.d2ldev_leaks_backend).devices()
    except D2LDevError as error:
        raise pytest.UsageError(str(error)) from error


def _make_virtual_gpus(device: str) -> None:
    """Ask for virtual GPUs up to a device, unless the environment asks for a number."""
    import d2ldev.settings as settings
    from d2ldev.errors import InvalidDeviceError

    index = device.rpartition(":")[2]
    try:
        if settings.virtual_gpus() is None:
            number = max(2, int(index) + 1 if index.isdecimal() else 0)
            settings.choose_virtual_gpus(
                settings.check_virtual_gpus(
                    number, f"find leaks of {device}", "--d2ldev-leaks-device gpu:1"
                )
            )
    except InvalidDeviceError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the search, if it was asked for."""
    config.addinivalue_line(
        "markers", f"{_ALLOWED}(*patterns): leaks of these lines do not fail; none: all lines"
    )
    config.addinivalue_line(
        "markers", f"{_SKIPPED}(reason): the test runs as without --d2ldev-leaks"
    )
    if not config.getoption("--d2ldev-leaks"):
        return
    search = config.stash[_SEARCH] = _Search(config)
    _make_virtual_gpus(search.device)
    if not hasattr(config, "workerinput"):  # of pytest-xdist: its controller counts
        config.stash[_TABLE] = table = _Table(search)
        config.pluginmanager.register(table)


class _Search:
    """What was asked for, and the frames of the tests.

    Args:
        config: of the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        from d2ldev.contract.leaks import KINDS, Frames

        option = config.getoption
        self.device: str = option("--d2ldev-leaks-device")
        self.root = config.rootpath
        self.allowed = [*option("--d2ldev-leaks-allow"), *config.getini("d2ldev_leaks_allow")]
        self.kinds = [kind.strip() for kind in option("--d2ldev-leaks-fail").split(",") if kind]
        if unknown := set(self.kinds) - set(KINDS):
            raise pytest.UsageError(
                f"--d2ldev-leaks-fail: no such kind: {', '.join(sorted(unknown))}; "
                f"the kinds are {', '.join(KINDS)}"
            )
        self.file: str | None = option("--d2ldev-leaks-json")
        self.as_cuda: bool = option("--d2ldev-leaks-as-cuda")
        baseline: str | None = option("--d2ldev-leaks-baseline")
        self.baseline = None if baseline is None else self.root / baseline
        self._accepted = None if self.baseline is None else _read_baseline(self.baseline)
        self._name: str | None = option("--d2ldev-leaks-backend")
        tests = [*option("--d2ldev-leaks-tests"), *config.getini("d2ldev_leaks_tests")]
        self.frames: Frames = Frames(str(self.root / path) for path in tests)
        self._backend: Backend | None = None

    @property
    def writes_baseline(self) -> bool:
        """Whether there is no file of accepted leaks yet."""
        return self.baseline is not None and self._accepted is None

    def is_accepted(self, row: Mapping[str, Any]) -> bool:
        """Return whether the baseline has the leaks of a line, or will have them."""
        return self.writes_baseline or _identity_of(row) in (self._accepted or ())

    def find_failing(self, leaks: Leaks) -> list[Leak]:
        """Return the first leak of each line that fails a test."""
        found = leaks.find_failing(self.kinds)
        return [leak for leak in found if not self.is_accepted(_row(leak, 1))]

    @property
    def backend(self) -> Backend:
        """The backend, which is imported at its first use."""
        if self._backend is None:
            from d2ldev.active import active_backend, get_backend
            from d2ldev.errors import D2LDevError
            from d2ldev.leaks.finding import Leaks, follow

            try:
                self._backend = get_backend(self._name) if self._name else active_backend()
                with follow(self._backend, self.device, self.frames, Leaks()):
                    pass  # it can
            except D2LDevError as error:  # once, and not for each test
                pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
        return self._backend

    @contextmanager
    def follow(self, item: pytest.Item) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Find the leaks of one phase of a test; yield what moves inputs that were made before."""
        from d2ldev.leaks.finding import Leaks, follow

        if _LEAKS not in item.stash:
            marks = list(item.iter_markers(_ALLOWED))
            patterns = [pattern for mark in marks for pattern in mark.args or ("*",)]
            item.stash[_LEAKS] = Leaks([*self.allowed, *patterns])
        device = _device_of(item) or self.device
        with follow(
            self.backend, device, self.frames, item.stash[_LEAKS], as_cuda=self.as_cuda
        ) as place:
            yield place


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the files of the tests, and the folders of tests that they are in."""
    search = config.stash.get(_SEARCH, None)
    if search is None:
        return
    for folder in {item.path.parent for item in items}:
        for outer in (folder, *folder.parents):
            if outer.name in ("test", "tests", "testing") and outer != search.root.parent:
                search.frames.add_tests(str(outer))
    for path in {item.path for item in items}:
        search.frames.add_tests(str(path))


def _search_of(item: pytest.Item) -> _Search | None:
    """Return the search that a test takes part in."""
    search = item.config.stash.get(_SEARCH, None)
    if search is None or item.get_closest_marker(_SKIPPED) is not None:
        return None
    return None if _device_of(item) == "cpu" else search


def _device_of(item: pytest.Item) -> str | None:
    """Return the device that a test asks for by the fixture ``d2ldev_device``."""
    spec = getattr(item, "callspec", None)
    return str(spec.params["d2ldev_device"]) if spec and "d2ldev_device" in spec.params else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Make the inputs of the fixtures on the device."""
    if (search := _search_of(item)) is None:
        return (yield)
    with search.follow(item) as place:
        if (module := getattr(item, "module", None)) is not None:
            place(vars(module))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run the test, and fail it if it passes and a tensor has left the device of the inputs."""
    if (search := _search_of(item)) is None:
        return (yield)
    with search.follow(item) as place:
        for namespace in _inputs_of(item):
            place(namespace)
            _place_closures(namespace, place)
        result = yield
    if found := search.find_failing(item.stash[_LEAKS]):
        pytest.fail("\n".join(map(str, found)), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Take down the fixtures as they were set up."""
    if (search := _search_of(item)) is None:
        return (yield)
    with search.follow(item):
        return (yield)


def _inputs_of(item: pytest.Item) -> Iterator[dict[str, Any]]:
    """Return the names whose values were made while tests were collected: parameters, globals."""
    yield getattr(item, "funcargs", {})
    module = getattr(item, "module", None)
    if module is not None:
        yield vars(module)


def _is_defined_at_top(function: FunctionType) -> bool:
    """Return whether a module has a function under its name."""
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__name__, None) is function


def _place_closures(namespace: Mapping[str, Any], place: Callable[[dict[str, Any]], None]) -> None:
    """Move what functions of a namespace close over, but not those that a library defines."""
    waiting = [
        value
        for value in list(namespace.values())
        if isinstance(value, FunctionType)
        and (value.__globals__ is namespace or not _is_defined_at_top(value))
    ]
    for function in waiting:  # which grows meanwhile
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                before = cell.cell_contents
                values = {"": before}
                place(values)
                if values[""] is not before:
                    cell.cell_contents = values[""]
                if isinstance(before, FunctionType) and before not in waiting:
                    waiting.append(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the leaks of a test in its report, which goes from worker to controller."""
    report = yield
    search = _search_of(item)
    if search is None or (report.when != "call" and report.passed) or report.when == "teardown":
        return report
    leaks = item.stash.get(_LEAKS, None)
    outcome: str = report.outcome
    if report.passed and leaks is not None and not leaks.has_inputs:
        outcome = "without inputs"
    rows = [_row(leak, count) for leak, count in leaks.by_line()] if leaks is not None else []
    if leaks is not None and (found := search.find_failing(leaks)):
        outcome = "leaking"
        text = "\n".join(map(str, found))
        if text not in report.longreprtext:  # the test itself has failed
            report.sections.append(("d2ldev leaks", text))
    report.user_properties.append((_PROPERTY, [search.backend.name, outcome, rows]))
    return report


def _row(leak: Leak, count: int) -> dict[str, Any]:
    """Return what the JSON file says of the leaks of a line."""
    from d2ldev.contract.leaks import place_of

    line = place_of(leak)
    return {
        "kind": leak.kind,
        "file": line.file if line else None,
        "line": line.number if line else None,
        "function": line.function if line else None,
        "source": linecache.getline(line.file, line.number).strip() if line else None,
        "caller": None if leak.caller is None else str(leak.caller),
        "calling_function": None if leak.caller is None else leak.caller.function,
        "action": leak.action if leak.line else None,
        "device": None if leak.device is None else str(leak.device),
        "expected": str(leak.expected),
        "operation": leak.operation,
        "met_at": None if leak.met_at is None else str(leak.met_at),
        "text": str(leak),
        "count": count,
    }


# What tells a leak from others in the baseline, whose lines may have other numbers.
_IDENTITY = ("kind", "file", "function", "source", "calling_function")


def _identity_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _IDENTITY)


def _read_baseline(path: Path) -> set[tuple[Any, ...]] | None:
    """Return the leaks that a file accepts; None if there is none."""
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {_identity_of(row) for row in data["leaks"]}
    except (ValueError, KeyError, TypeError) as error:
        raise pytest.UsageError(
            f"--d2ldev-leaks-baseline: cannot read leaks from {path}: {error!r}; "
            "delete it, and the next run writes it"
        ) from error


def _write_baseline(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    leaks = [dict(zip(_IDENTITY, one, strict=True)) for one in {_identity_of(row) for row in rows}]
    leaks.sort(key=lambda leak: json.dumps(leak))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": VERSION, "leaks": leaks}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


class _Table:
    """Counts the leaks of all tests by line, those of the workers of pytest-xdist, too.

    Args:
        search: what was asked for.
    """

    def __init__(self, search: _Search) -> None:
        self._search = search
        self._backend: str | None = None
        self._outcomes: dict[str, str] = {}
        self._noted: dict[str, list[dict[str, Any]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what was noted of a test."""
        for name, noted in report.user_properties:
            if name != _PROPERTY:
                continue
            noted = cast("tuple[str, str, list[dict[str, Any]]]", noted)
            self._backend, outcome, rows = noted
            self._outcomes[report.nodeid] = outcome
            self._noted.setdefault(report.nodeid, []).extend(rows)

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines, those of the most tests first.

        Workers end their tests in any order, and the report is the same.
        """
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for name, rows in sorted(self._noted.items()):
            for row in rows:
                known = found.setdefault(
                    (row["kind"], row["file"], row["line"], row["caller"]),
                    {**row, "count": 0, "tests": []},
                )
                known["count"] += row["count"]
                known["tests"].append(name)
        return sorted(
            found.values(),
            key=lambda row: (
                -len(row["tests"]),
                *(str(row["file"]), row["line"] or 0, str(row["caller"]), row["kind"]),
            ),
        )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the JSON file and the baseline."""
        is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._search.writes_baseline and is_whole:
            failing = [row for row in self.rows() if row["kind"] in self._search.kinds]
            _write_baseline(cast("Path", self._search.baseline), failing)
        if self._search.file is None:
            return
        data = {
            "version": VERSION,
            "backend": self._backend,
            "device": self._search.device,
            "outcomes": dict(Counter(self._outcomes.values())),
            "failing_kinds": self._search.kinds,
            "lines": self.rows(),
            "tests": self._outcomes,
        }
        path = Path(self._search.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the lines with their counts."""
        rows = self.rows()
        kinds = self._search.kinds
        found = [row for row in rows if row["kind"] in kinds]
        failing = [row for row in found if not self._search.is_accepted(row)]
        counts = Counter(self._outcomes.values())
        terminalreporter.section(f"d2ldev leaks: inputs on {self._search.device}")
        terminalreporter.line(
            f"{len(self._outcomes)} tests: {counts['leaking']} leak at {len(failing)} lines, "
            f"{counts['passed']} pass, {counts['failed']} fail for another reason, "
            f"{counts['skipped']} are skipped, {counts['without inputs']} make no inputs"
        )
        for row in failing:
            number = len(row["tests"])
            tests = f"{number} test{'' if number == 1 else 's'}"
            terminalreporter.line(f"{tests:>10}, {row['count']:>5} x  {row['text']}")
        if accepted := len(found) - len(failing):
            leaks = "1 leak is" if accepted == 1 else f"{accepted} leaks are"
            done = "written to" if self._search.writes_baseline else "accepted by"
            terminalreporter.line(f"{leaks} {done} {self._search.baseline}")
        others = [row for row in rows if row["kind"] not in kinds]
        if others:
            total = sum(row["count"] for row in others)
            lines = "1 line" if len(others) == 1 else f"{len(others)} lines"
            terminalreporter.line(
                f"{total} more at {lines} fail no test, such as reads of the host: "
                "--d2ldev-leaks-json lists them"
            )


# -- fixtures ---------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test for each installed framework, and on each device.

    The fixtures ``d2ldev_backend`` and ``d2ldev_device`` ask for it. A test that parametrizes one
    of them itself is left alone.
    """
    wanted = {"d2ldev_backend", "d2ldev_device"}.intersection(metafunc.fixturenames)
    if not wanted:
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        given: str | Sequence[str] = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = given.split(",") if isinstance(given, str) else given
        wanted.difference_update(name.strip() for name in names)
    if "d2ldev_backend" in wanted:
        metafunc.parametrize("d2ldev_backend", _frameworks(metafunc.config), indirect=True)
    if "d2ldev_device" in wanted:
        metafunc.parametrize("d2ldev_device", _DEVICES, indirect=True)


def _frameworks(config: pytest.Config) -> list[str]:
    """Return the names of the installed frameworks, without an import of one.

    They are in the order in which one process can load them.
    """
    from d2ldev.registry.discovery import FALLBACK, LOADED_FIRST, available_backends

    chosen = config.getoption("--d2ldev-leaks-backend")
    if chosen:
        return [chosen]
    found = [name for name in available_backends() if name != FALLBACK]
    return sorted(found, key=lambda name: name not in LOADED_FIRST) or [FALLBACK]


@pytest.fixture
def d2ldev_backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return each installed framework's backend in turn, which is the active one in the test."""
    from d2ldev.active import use_backend

    with use_backend(request.param) as backend:
        yield backend


@pytest.fixture
def d2ldev_device(request: pytest.FixtureRequest) -> Any:
    """Return each device in turn: ``cpu``, ``gpu:0`` and ``gpu:1``; skip one that is not there."""
    from d2ldev.active import active_backend
    from d2ldev.device import Device

    if "d2ldev_backend" in request.fixturenames:
        backend = request.getfixturevalue("d2ldev_backend")
    else:
        backend = active_backend()
    device = Device.parse(request.param)
    if device not in backend.devices():
        pytest.skip(f"{backend.name} has no {device} here; D2LDEV_VIRTUAL_GPUS=2 makes it")
    return device
