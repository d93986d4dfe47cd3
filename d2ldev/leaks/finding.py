"""``find_leaks``: a block in which the leaks of a library are found, for notebooks and tests.

Held by ``tests/backends/torch_backend/test_torch_leaks.py``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, overload

from d2ldev._backend import Backend, framework_of
from d2ldev.active import active_backend
from d2ldev.contract.abilities import require
from d2ldev.contract.leaks import FAILING, Frames, Leak, Line, Watch, place_of
from d2ldev.device import CPU
from d2ldev.display import format_html_table
from d2ldev.errors import UnsupportedValueError
from d2ldev.operations.devices import resolve
from d2ldev.registry.discovery import packages_of
from d2ldev.typing import DeviceLike

ABILITY = "find leaks"
_NO_INPUTS = "no leaks, because no input was on the device: create the inputs in the block"


class Leaks(Sequence[Leak]):
    """The leaks of a block, in the order in which they were found.

    Args:
        allowed: patterns of lines and functions whose leaks are left out, with ``*`` for any text:
            ``'ot/backend.py:1034'``, ``'ot/backend.py'``, ``'ot.backend.TorchBackend.*'``.

    Attributes:
        has_inputs: whether the blocks that have ended had a tensor on the device.

    >>> import torch, library                            # doctest: +SKIP
    >>> with d2ldev.find_leaks('gpu:1') as leaks:        # doctest: +SKIP
    ...     Y, Z = library.f(torch.ones(3)), library.g(torch.ones(3))
    >>> leaks                                            # doctest: +SKIP
    <2 leaks of 2 lines>
    >>> [(str(leak.line), count) for leak, count in leaks.by_line()]    # doctest: +SKIP
    [('library.py:12', 1), ('library.py:17', 1)]
    >>> len(leaks.find_failing())                        # doctest: +SKIP
    2
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = tuple(allowed)
        self._leaks: list[Leak] = []
        self._verdicts: dict[Leak, bool] = {}
        self.has_inputs = False

    def add(self, leak: Leak) -> None:
        """Add a leak, unless its line is allowed.

        Args:
            leak: what a block has found.

        >>> from d2ldev.contract.leaks import Leak, Line
        >>> leaks = Leaks(['library.py'])
        >>> line = Line('library.py', 12, 'library.f')
        >>> leaks.add(Leak('mix', line, 'creates', d2ldev.cpu(), d2ldev.gpu(1), 'add', None))
        >>> len(leaks)
        0
        """
        if not (self._allowed and self._is_allowed(leak)):
            self._leaks.append(leak)

    def _is_allowed(self, leak: Leak) -> bool:
        known = self._verdicts.get(leak)
        if known is None:
            known = self._verdicts[leak] = is_allowed(leak, self._allowed)
        return known

    def find_failing(self, kinds: Iterable[str] = FAILING) -> list[Leak]:
        """Return the first leak of each line and its caller, of the kinds that fail a test.

        Args:
            kinds: the kinds; the default leaves out what the host reads.
        """
        wanted = set(kinds)
        return [leak for leak in self._first_by_line().values() if leak.kind in wanted]

    def by_line(self) -> list[tuple[Leak, int]]:
        """Return the first leak of each kind, line and caller, and the count; the most first."""
        counts: Counter[tuple[str, Line | None, Line | None]] = Counter()
        for leak, count in self._distinct():
            counts[_place_of(leak)] += count
        first = self._first_by_line()
        return [(first[key], count) for key, count in counts.most_common()]

    def _first_by_line(self) -> dict[tuple[str, Line | None, Line | None], Leak]:
        first: dict[tuple[str, Line | None, Line | None], Leak] = {}
        for leak, _ in self._distinct():
            first.setdefault(_place_of(leak), leak)
        return first

    def _distinct(self) -> list[tuple[Leak, int]]:
        """Return each object once with its count: a loop adds the same one many thousand times."""
        known = {id(leak): leak for leak in self._leaks}
        return [(known[key], count) for key, count in Counter(map(id, self._leaks)).items()]

    def __len__(self) -> int:
        return len(self._leaks)

    @overload
    def __getitem__(self, index: int) -> Leak: ...

    @overload
    def __getitem__(self, index: slice) -> list[Leak]: ...

    def __getitem__(self, index: int | slice) -> Leak | list[Leak]:
        return self._leaks[index]

    def __repr__(self) -> str:
        return f"<{len(self)} leaks of {len(self.by_line())} lines>"

    def __str__(self) -> str:
        if not self._leaks:
            return "no leaks" if self.has_inputs else _NO_INPUTS
        return "\n".join(f"{count} x {leak}" for leak, count in self.by_line())

    def _repr_html_(self) -> str:
        """Return a table of the lines, which a notebook shows."""
        if not self._leaks:
            return f"<p>{self}</p>"
        rows = [(count, leak.kind, leak) for leak, count in self.by_line()]
        return format_html_table(("times", "kind", "leak"), rows, numbers=["times"])


def _place_of(leak: Leak) -> tuple[str, Line | None, Line | None]:
    return leak.kind, place_of(leak), leak.caller


def is_allowed(leak: Leak, patterns: Iterable[str]) -> bool:
    """Return whether a pattern names the line of a leak, its file or its function.

    The caller of that function serves as well. A leak whose line is unknown is allowed by the line
    of the operation.
    """
    lines = [line for line in (place_of(leak), leak.caller) if line is not None]
    names = [name for line in lines for name in (str(line), line.file, line.function)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


@contextmanager
def find_leaks(
    device: DeviceLike = "gpu:1",
    *,
    allow: Iterable[str] = (),
    tests: Iterable[str] = (),
    backend: Backend[Any, Any] | None = None,
) -> Iterator[Leaks]:
    """Find the tensors that libraries create on, or move to, another device than their inputs'.

    In the block, tensors that the file of the caller creates are on ``device``. So are tensors that
    a library creates in a function that got no tensor. Where a library creates a tensor elsewhere
    and it meets an input, the block notes the line of the library. It moves the tensor then and
    goes on.

    Args:
        device: the device of the inputs. It is not the one that the framework takes by default.
        allow: lines and functions whose leaks are left out: see ``Leaks``.
        tests: further files and folders of the caller, whose tensors are inputs.
        backend: the backend; None for the active one.

    Yields:
        The leaks found so far.

    Raises:
        DeviceUnavailableError: if the device does not exist.
        UnsupportedValueError: if the device is the CPU, or the framework cannot find leaks.
        NotBegunError: if the author of the backend has not written ``Strict.follow``.

    >>> import torch, library                            # doctest: +SKIP
    >>> with find_leaks("gpu:1") as leaks:               # doctest: +SKIP
    ...     Y = library.f(torch.ones(3))
    >>> print(leaks)                                     # doctest: +SKIP
    1 x library.py:12 creates on the CPU a tensor that meets one on gpu:1 in add at library.py:13
    """
    caller = sys._getframe(2)  # of the function of ``contextlib`` that enters the block
    leaks = Leaks(allow)
    file = caller.f_code.co_filename
    # Python gives ``<string>`` to any code without a file.
    own = [] if file.startswith("<") else [file]
    frames = Frames([*own, *tests], namespace=caller.f_globals)
    with follow(backend or active_backend(), device, frames, leaks):
        yield leaks


@contextmanager
def follow(
    backend: Backend[Any, Any],
    device: DeviceLike,
    frames: Frames,
    leaks: Leaks,
    *,
    as_cuda: bool = False,
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Add the leaks of a block to those found so far.

    Args:
        backend: the backend.
        device: the device of the inputs.
        frames: tells tests from libraries.
        leaks: takes each leak.
        as_cuda: whether PyTorch's virtual GPUs stand for CUDA devices in the block.

    Yields:
        A function that moves the tensors among the values of a dict to the device.

    Raises:
        DeviceUnavailableError, NotBegunError, UnsupportedValueError: as ``find_leaks``.
    """
    framework = framework_of(backend)
    attempted = f"find leaks of {device}"
    tried = resolve(framework, device, attempted)
    require(framework, ABILITY, attempted)
    if tried is CPU:
        raise UnsupportedValueError(
            attempted,
            "libraries create on the CPU by default, so that nothing differs from it there",
            "find_leaks('gpu:1'), with D2LDEV_VIRTUAL_GPUS=2 on a machine without GPUs",
        )
    frames.add_modules(packages_of(backend.name))
    kinds, device_of = framework.state.kinds, framework.tensors.device_of
    be_strict = framework.state.strictness.block
    watch = Watch(kinds, device_of, be_strict, tried, frames, leaks.add, as_cuda=as_cuda)
    with framework.strict.follow(watch) as place:
        try:
            yield place
        finally:
            leaks.has_inputs |= watch.has_inputs
            watch.end()
