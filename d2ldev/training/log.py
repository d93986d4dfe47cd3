"""``DeviceLog``: the scalars of a training loop, kept on the device until someone wants them.

Reading one number of a GPU makes Python wait for everything that is queued there. A log that keeps
them where they are and brings them over together waits once. It is the answer to the third exercise
of D2L's section 6.7.5, and ``benchmarks/device_log.py`` measures it against logging one at a time.

Held by the requirements ``log.*`` of the conformance suite.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from d2ldev.backend_class import Backend
from d2ldev.device import Device
from d2ldev.errors import CheckpointError, UnsupportedValueError, describe, shown
from d2ldev.framework import DeviceLike, Tensor
from d2ldev.locks import Lock
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations.arguments import flag, whole_number
from d2ldev.operations.creation import shape_of

# The dtypes with values that float32 cannot hold.
_WIDE = frozenset({"float64", "int32", "uint32", "int64", "uint64"})

_BLOCK = 16  # calls


class DeviceLog:
    """Scalars by name, on a device, with their means and last values.

    Any number of threads may add to it, and nothing that was added is lost. The device holds at
    most ``max_pending`` scalars, without what they were computed from. The host holds a mean and a
    last value for each name, and all values since the last ``flush``, 8 bytes each.

    Args:
        backend: whose tensors they are.
        device: where they are and stay; None is the device of the first one.
        every: only each ``every``-th call of ``add`` is kept, from the first; the others cost
            next to nothing, and count in no mean.
        max_pending: how many scalars wait on the device. When there are as many, ``add`` brings
            them to the host, in one transfer.
        values: whether the host keeps all values for ``flush``; without them it keeps only means
            and last values, for logs that run for ever.

    Raises:
        UnsupportedValueError: if ``every`` or ``max_pending`` is no integer from 1.

    >>> from d2ldev import get_backend
    >>> backend = get_backend('reference')
    >>> log = DeviceLog(backend)
    >>> for value in (3.0, 1.0):
    ...     log.add(loss=backend.full((), value, device='gpu:0'))
    >>> log.means(), log.last()
    ({'loss': 2.0}, {'loss': 1.0})
    """

    def __init__(
        self,
        backend: Backend,
        device: DeviceLike = None,
        *,
        every: int = 1,
        max_pending: int = 1024,
        values: bool = True,
    ) -> None:
        if not isinstance(backend, Backend):
            raise UnsupportedValueError(
                f"log with {shown(backend)}",
                "it is no backend",
                "DeviceLog(d2ldev.get_backend('torch'))",
            )
        self._backend = backend
        self._device = None if device is None else backend.device(device)
        self._every = whole_number("log", "every", every, least=1, fix="every=1")
        self._max_pending = whole_number(
            "log", "max_pending", max_pending, least=1, fix="max_pending=1024"
        )
        self._lock = Lock()
        self._calls = 0
        self._waiting = 0
        self._pending: list[_Entry] = []
        self._totals: dict[str, tuple[float, float]] = {}
        self._last: dict[str, float] = {}
        self._values: dict[str, array[float]] | None = {} if flag("log", "values", values) else None

    def add(self, weight: float = 1, /, **scalars: Any) -> None:
        """Keep scalars, without waiting for the device.

        Where the framework's queue has no bound, as MXNet's, each fourth call waits for the scalars
        of four calls before, so that at most eight steps are queued.

        Args:
            weight: how much they count in the means, such as the number of examples.
            scalars: name -> scalar tensor on the log's device, or a number of Python's or NumPy's.
                A tensor is not copied: do not write into it.

        Raises:
            UnsupportedValueError: for anything else, a tensor that is only traced included, and a
                weight that is negative. Nothing was added then.
        """
        with self._lock:
            self._calls += 1
            if not (self._calls - 1) % self._every:
                self._keep(weight, scalars)

    def _keep(self, weight: float, scalars: Mapping[str, Any]) -> None:
        """Check and keep the scalars of one call, by the thread that holds the lock."""
        if not _is_weight(weight):
            raise UnsupportedValueError(
                f"log with the weight {describe(weight)}",
                "it is a number that is not negative",
                "log.add(len(y), loss=loss)",
            )
        framework, device, entries, waiting = self._backend.framework, self._device, [], 0
        weight, tensors, kinds = float(weight), framework.tensors, framework.kinds
        for name, x in scalars.items():
            if kinds[type(x)] is TENSOR:
                device = self._checked(name, x, device)
                entries.append(_Entry(name, weight, tensors.detached(x), True))
                waiting += 1
            else:
                entries.append(_Entry(name, weight, _number(name, x), False))
        self._device = device
        self._pending += entries
        self._waiting += waiting
        if entries and (limit := tensors.in_flight) is not None:
            self._bound(limit, len(entries))
        if self._waiting >= self._max_pending or len(self._pending) >= 2 * self._max_pending:
            self._bring_over()

    def _bound(self, limit: int, size: int) -> None:
        """Wait at each ``limit``-th step, which has ``size`` scalars, for the one that long ago."""
        late = len(self._pending) - limit * size
        if late > 0 and not late % (limit * size):
            for entry in self._pending[late - size : late]:
                if entry.is_tensor:
                    self._backend.framework.tensors.wait(entry.value)

    def flush(self) -> dict[str, list[float]]:
        """Return all values that were added since the last ``flush``.

        Those that are waiting on the device are brought over in one transfer.

        Returns:
            Name -> the values, in the order in which they were added.

        Raises:
            UnsupportedValueError: if the log was made with ``values=False``.
        """
        with self._lock:
            if self._values is None:
                raise UnsupportedValueError(
                    "flush a log", "it keeps no values (values=False)", "log.means(), or log.last()"
                )
            self._bring_over()
            found, self._values = self._values, {}
            return {name: values.tolist() for name, values in found.items()}

    def means(self) -> dict[str, float]:
        """Return name -> the weighted mean of all that was added; NaN if nothing has a weight."""
        with self._lock:
            self._bring_over()
            return means_of(self._totals)

    def last(self) -> dict[str, float]:
        """Return name -> the value that was added last."""
        with self._lock:
            self._bring_over()
            return dict(self._last)

    def _bring_over(self) -> None:
        """Bring what is waiting on the device to the host, all of it in one transfer."""
        pending = self._pending
        tensors = iter(self._numbers([entry.value for entry in pending if entry.is_tensor]))
        # Cleared only now, so that an error in the transfer loses nothing.
        self._pending, self._waiting = [], 0
        for entry in pending:
            value = next(tensors) if entry.is_tensor else entry.value
            if self._values is not None:
                self._values.setdefault(entry.name, array("d")).append(value)
            total, weights = self._totals.get(entry.name, (0.0, 0.0))
            # A weight of 0 leaves a value out, also one that is infinite.
            part = entry.weight * value if entry.weight else 0.0
            self._totals[entry.name] = total + part, weights + entry.weight
            self._last[entry.name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the means and the last values so far, for ``load_state_dict``."""
        with self._lock:
            self._bring_over()
            totals = {name: list(total) for name, total in self._totals.items()}
            return {"totals": totals, "last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the means of another log.

        Raises:
            CheckpointError: if it is no such state.
        """
        try:
            found = {
                str(name): (_number(name, total), _number(name, weights))
                for name, (total, weights) in state["totals"].items()
            }
            last = {str(name): _number(name, value) for name, value in state["last"].items()}
            if found.keys() != last.keys():
                raise ValueError("a mean and a last value of other names")
        except Exception as error:  # whatever is in its place
            raise CheckpointError(
                "go on with the means of another log",
                f"{describe(state)} is no state of a log",
                "log.load_state_dict(other.state_dict())",
            ) from error
        with self._lock:
            self._totals, self._last = found, last

    def _numbers(self, xs: list[Tensor]) -> list[float]:
        if not xs:
            return []
        dtypes = {self._backend.dtype_of(x) for x in xs}
        if len(dtypes) > 1 or any(name.startswith("float8") for name in dtypes):
            # A dtype that holds all values, if the framework has one that it can stack.
            is_wide = dtypes & _WIDE and "float64" in self._backend.dtype_names
            common = "float64" if is_wide else "float32"
            xs = [self._backend.asarray(x, dtype=common) for x in xs]
        stacked = self._backend.framework.tensors.stack(xs)
        return [float(value) for value in self._backend.to_numpy(stacked)]

    def _checked(self, name: str, x: Tensor, device: Device | None) -> Device:
        """Return the device of a tensor that can be logged."""
        attempted = f"log {name}"
        try:
            there = self._backend.device_of(x)
        except UnsupportedValueError as error:
            fix = f"return {name} from what is compiled, and log what it returns"
            raise UnsupportedValueError(attempted, error.problem, fix) from error
        if shape := shape_of(x, attempted):
            raise UnsupportedValueError(
                attempted,
                f"it is of shape {shape}, and no scalar",
                f"log.add({name}={name}.mean())",
            )
        if device is not None and there is not device:
            raise UnsupportedValueError(
                attempted,
                f"it is on {there}, and the log on {device}",
                f"log.add({name}=backend.to({name}, {str(device)!r})), or a log of its own",
                [there, device],
            )
        if self._backend.dtype_of(x).startswith("complex"):
            raise UnsupportedValueError(
                attempted, "it is a complex number", f"log.add({name}=abs({name}))"
            )
        return there


class LogOfLoop(DeviceLog):
    """The means of a loop over batches, which one thread adds to, in blocks of calls.

    A step leaves little of Python in the processor's caches, so that one call of ``add`` after it
    takes as long as twenty in a row. Only the first call is checked at once; what is wrong with a
    later one is said with its block. Later losses are scalars, as a learner returns them.

    Args:
        backend: whose tensors they are.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, values=False)
        # No longer than the framework's queue may be.
        self._length = backend.framework.tensors.in_flight or _BLOCK
        self._block: list[tuple[float, dict[str, Any]]] = []

    def add(self, weight: float = 1, /, **scalars: Any) -> None:
        self._block.append((weight, scalars))
        self._calls += 1
        if self._calls == 1 or not self._calls % self._length:
            self._add_block()

    def _bring_over(self) -> None:
        self._add_block()
        super()._bring_over()

    def _checked(self, name: str, x: Tensor, device: Device | None) -> Device:
        # Only the device of a learner's loss can change: when a hook moves the model.
        if name == "loss" and self._backend.framework.tensors.device_of(x) is device:
            return device
        return super()._checked(name, x, device)

    def _add_block(self) -> None:
        block, self._block = self._block, []
        with self._lock:
            for weight, scalars in block:
                self._keep(weight, scalars)


def means_of(totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each name's weighted sum and sum of weights; NaN without any weight."""
    return {
        name: total / weights if weights else float("nan")
        for name, (total, weights) in totals.items()
    }


class _Entry(NamedTuple):
    """A scalar that was added: a tensor, or a number."""

    name: str
    weight: float
    value: Any
    is_tensor: bool


def _is_weight(value: Any) -> bool:
    # ``int`` and ``float`` come first, because checking ``Real`` takes longer, and this runs in
    # every step.
    is_number = isinstance(value, (int, float, Real, np.number))
    return is_number and 0 <= value <= sys.float_info.max


def _number(name: str, x: Any) -> float:
    """Return a number that is on the host already."""
    is_array = isinstance(x, np.ndarray) and x.shape == () and x.dtype.kind in "biuf"
    if is_array or isinstance(x, (Real, np.number, np.bool_)):
        try:
            return float(x)
        except (TypeError, OverflowError):
            pass  # a complex number of NumPy's, or one with too many digits
    raise UnsupportedValueError(
        f"log {name}",
        f"{describe(x)} is neither a scalar tensor nor a number",
        f"log.add({name}={name}.mean())",
    )
