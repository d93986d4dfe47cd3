"""``DeviceLog``: the scalars of a training loop, kept on the device until you read them.

To read one number from a GPU, Python waits for all the work in its queue. A log that keeps the
numbers on the device, and transfers them together, waits once. It answers the third exercise of
D2L's section 6.7.5. ``benchmarks/device_log.py`` compares it with reading each number.

Held by the requirements ``log.*`` of the conformance suite.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from d2ldev._backend import Backend, framework_of
from d2ldev.device import Device
from d2ldev.errors import CheckpointError, UnsupportedValueError, describe, quote
from d2ldev.locks import Lock
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations.arguments import flag, whole_number
from d2ldev.operations.creation import shape_of
from d2ldev.training.functions import write_mean
from d2ldev.typing import DeviceLike, NativeDeviceT, TensorT

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The dtypes with values that float32 cannot hold.
_WIDE = frozenset({"float64", "int32", "uint32", "int64", "uint64"})

_BLOCK = 16  # calls

_ONE = 1.0  # the usual weight, which needs no check


class DeviceLog(Generic[TensorT]):
    """Log named scalars on a device, with their means and last values.

    Any number of threads may add to a log, and it loses nothing. The device holds at most
    ``max_pending`` scalars, without the tensors that they come from. For each name, the host holds
    a mean and the last value. For each value since the last ``flush`` it holds 8 bytes.

    Args:
        backend: the backend of the tensors.
        device: the device of the tensors, where they stay. None is the device of the first one.
        every: keep every n-th call of ``add``, beginning with the first. The other calls cost
            little, and count in no mean.
        max_pending: how many scalars may wait on the device. ``add`` then brings them to the host,
            in one transfer.
        values: whether the host keeps all values for ``flush``. False is for logs without an end:
            the host keeps means and last values alone.

    Raises:
        UnsupportedValueError: if ``every`` or ``max_pending`` is not an integer from 1.

    >>> from d2ldev import get_backend
    >>> backend = get_backend('reference')
    >>> log = DeviceLog(backend)
    >>> for value in (3.0, 1.0):
    ...     log.add(loss=backend.full((), value, device='gpu:0'))
    >>> log.means(), log.last(), log.flush()
    ({'loss': 2.0}, {'loss': 1.0}, {'loss': [3.0, 1.0]})
    >>> other = DeviceLog(backend)
    >>> other.load_state_dict(log.state_dict())
    >>> other.means()
    {'loss': 2.0}
    """

    def __init__(
        self,
        backend: Backend[TensorT, NativeDeviceT],
        device: DeviceLike[NativeDeviceT] | None = None,
        *,
        every: int = 1,
        max_pending: int = 1024,
        values: bool = True,
    ) -> None:
        if not isinstance(backend, Backend):
            raise UnsupportedValueError(
                f"log with {quote(backend)}",
                "it is not a backend",
                "DeviceLog(d2ldev.get_backend('torch'))",
            )
        self._backend = backend
        self._device = None if device is None else backend.device(device)
        self._every = whole_number("log", "every", every, least=1, fix="every=1")
        self._max_pending = whole_number(
            "log", "max_pending", max_pending, least=1, fix="max_pending=1024"
        )
        self._connect()
        self._calls = 0
        # The name, the weight and the tensor or ``float`` of each scalar, one after the other. An
        # object for each would cost more than the scalar. ``add`` appends without the lock, so it
        # has to stay the same list.
        self._pending: list[Any] = []
        self._totals: dict[str, tuple[float, float]] = {}
        self._last: dict[str, float] = {}
        self._values: dict[str, array[float]] | None = {} if flag("log", "values", values) else None

    def _connect(self) -> None:
        framework = framework_of(self._backend)
        self._tensors, self._kinds = framework.tensors, framework.state.kinds
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._bring_over()  # a copy holds numbers of the host, and shares none of them
            state = {**vars(self), "_pending": [], "_totals": {**self._totals}}
            state["_last"] = {**self._last}
            if self._values is not None:
                state["_values"] = {name: column[:] for name, column in self._values.items()}
        for name in ("_tensors", "_kinds", "_lock"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def __repr__(self) -> str:
        pending = self._pending[:]  # without a wait, and without a transfer
        names = ", ".join(dict.fromkeys([*self._totals, *pending[::3]])) or "nothing yet"
        place = "" if self._device is None else f" on {self._device}"
        waiting = f"{len(pending) // 3} of {self._max_pending} scalars wait"
        return f"<{type(self).__name__} of {names}{place}: {waiting}>"

    def add(
        self,
        weight: TensorT | float = _ONE,
        /,
        **scalars: TensorT | float | np.generic | NDArray[Any],
    ) -> None:
        """Keep scalars, without a wait for the device.

        MXNet's queue has no bound of its own. A learner of d2ldev waits now and then. Another loop
        takes a small ``max_pending``, or waits itself.

        Args:
            weight: their weight in the means, such as the number of examples. A number, or a
                scalar tensor as ``learner.weight``.
            scalars: name -> scalar tensor on the log's device, or a number of Python or NumPy. The
                log does not copy a tensor: do not write into it.

        Raises:
            UnsupportedValueError: for any other value, such as a traced tensor, and for a negative
                weight. Nothing is added then.
        """
        if self._every > 1 and self._is_to_skip():
            return
        if self._device is None:
            with self._lock:  # one of several threads is the first
                self._device = self._keep(weight, scalars)
        else:
            self._keep(weight, scalars)

    def _is_to_skip(self) -> bool:
        with self._lock:
            self._calls += 1
            return (self._calls - 1) % self._every > 0

    def _keep(self, weight: Any, scalars: Mapping[str, Any]) -> Device | None:
        """Check and keep the scalars of one call; return the device of the log's tensors."""
        kinds, device = self._kinds, self._device
        if weight is not _ONE and kinds[type(weight)] is TENSOR:
            device, weight = self._take_scalar("weight", weight, device)
        elif weight is not _ONE:
            if not _is_weight(weight):
                raise UnsupportedValueError(
                    f"log with the weight {describe(weight)}",
                    "a weight is a number from 0",
                    "log.add(len(y), loss=loss)",
                )
            weight = float(weight)
        entries: list[Any] = []
        for name, x in scalars.items():
            if kinds[type(x)] is not TENSOR:
                entries += name, weight, _number(name, x)
                continue
            device, scalar = self._take_scalar(name, x, device)
            entries += name, weight, scalar
        self._pending += entries  # one operation of a list is safe between threads
        if len(self._pending) >= 3 * self._max_pending:
            with self._lock:
                self._bring_over()
        return device

    def _take_scalar(self, name: str, x: Any, device: Device | None) -> tuple[Device, Any]:
        """Return the device of a scalar tensor, and the scalar alone."""
        tensors = self._tensors
        try:
            is_fine = tensors.device_of(x) is device and not len(x.shape)
            is_fine = is_fine and "complex" not in tensors.dtype_of(x)
        except Exception:  # each kind of tensor raises its own error
            is_fine = False
        if device is None or not is_fine:
            device = self._check_tensor(name, x, device)
        return device, tensors.detach(x)

    def flush(self) -> dict[str, list[float]]:
        """Return all values since the last ``flush``; one transfer brings them from the device.

        Returns:
            Name -> the values, in the order of the calls of ``add``.

        Raises:
            UnsupportedValueError: for a log with ``values=False``.
        """
        with self._lock:
            if self._values is None:
                raise UnsupportedValueError(
                    "flush a log", "it keeps no values (values=False)", "log.means(), or log.last()"
                )
            self._bring_over()
            columns, self._values = self._values, {}
            return {name: values.tolist() for name, values in columns.items()}

    def means(self) -> dict[str, float]:
        """Return name -> the weighted mean of all its values; NaN if all weights are 0."""
        with self._lock:
            self._bring_over()
            return means_of(self._totals)

    def last(self) -> dict[str, float]:
        """Return name -> its last value."""
        with self._lock:
            self._bring_over()
            return dict(self._last)

    def _bring_over(self) -> None:
        """Bring all waiting scalars from the device to the host, in one transfer."""
        entries = self._pending[:]
        if not entries:
            return
        names, weights, values = entries[::3], entries[1::3], entries[2::3]
        if {*map(type, weights)} == {float}:  # the usual weights, which need no transfer
            values = self._numbers(values)
        else:
            numbers = self._numbers([*weights, *values])
            weights, values = numbers[: len(weights)], numbers[len(weights) :]
        # Only now, so that an error in the transfer loses nothing.
        del self._pending[: len(entries)]
        for name, column in _columns(names, weights, values):
            total, sum_of_weights = self._totals.get(name, (0.0, 0.0))
            for weight, value in column:
                if weight:  # a weight of 0 also removes infinity
                    total += weight * value
                    sum_of_weights += weight
            self._totals[name] = total, sum_of_weights
            self._last[name] = value
            if self._values is not None:
                self._values.setdefault(name, array("d")).extend([value for _, value in column])

    def state_dict(self) -> dict[str, Any]:
        """Return the means and the last values so far, for ``load_state_dict``."""
        with self._lock:
            self._bring_over()
            totals = {name: list(total) for name, total in self._totals.items()}
            return {"totals": totals, "last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the means and the last values by those of another log's ``state_dict``.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            CheckpointError: for any other object.
        """
        try:
            totals = {
                str(name): (_number(name, total), _number(name, weights))
                for name, (total, weights) in state["totals"].items()
            }
            last = {str(name): _number(name, value) for name, value in state["last"].items()}
            if totals.keys() != last.keys():
                raise ValueError("the means and the last values have different names")
        except Exception as error:  # a wrong state may raise anything
            raise CheckpointError(
                "restore the means of a log",
                f"{describe(state)} is not the state of a log",
                "log.load_state_dict(other.state_dict())",
            ) from error
        with self._lock:
            self._totals, self._last = totals, last

    def _numbers(self, values: Sequence[Any]) -> list[float]:
        """Return the numbers of tensors and floats; one transfer brings the tensors."""
        xs = [x for x in values if type(x) is not float]
        if not xs:
            return list(values)
        dtypes = set(map(self._tensors.dtype_of, xs))
        if len(dtypes) > 1 or any(name.startswith("float8") for name in dtypes):
            # A dtype for all values, if the framework can stack it.
            is_wide = dtypes & _WIDE and "float64" in self._backend.dtype_names
            common = "float64" if is_wide else "float32"
            xs = [self._backend.asarray(x, dtype=common) for x in xs]
        found: list[float] = self._backend.to_numpy(self._tensors.stack(xs)).astype(float).tolist()
        if len(found) == len(values):
            return found
        numbers = iter(found)
        return [x if type(x) is float else next(numbers) for x in values]

    def _check_tensor(self, name: str, x: TensorT, device: Device | None) -> Device:
        """Return the device of a tensor that can be logged."""
        attempted = f"log {name}"
        try:
            there = self._backend.device_of(x)
        except UnsupportedValueError as error:
            fix = f"return {name} from the compiled function, and log the result"
            raise UnsupportedValueError(attempted, error.problem, fix) from error
        if shape := shape_of(x, attempted):
            raise UnsupportedValueError(
                attempted,
                f"it is of shape {shape}, and not a scalar",
                f"log.add({name}={write_mean(x, name)})",
            )
        if device is not None and there is not device:
            raise UnsupportedValueError(
                attempted,
                f"it is on {there}, and the log on {device}",
                f"log.add({name}=backend.to({name}, {str(device)!r})), or another log",
                [there, device],
            )
        if self._backend.dtype_of(x).startswith("complex"):
            raise UnsupportedValueError(
                attempted, "it is a complex number", f"log.add({name}=abs({name}))"
            )
        return there


class BatchedDeviceLog(DeviceLog[TensorT]):
    """Log the means of a loop over batches, from one thread, in blocks of calls.

    A step leaves little of Python in the processor's caches. One call of ``add`` after it takes as
    long as twenty in a row. Only the first call is checked at once. An error in a later call comes
    with its block: a learner returns scalars.

    Args:
        backend: the backend of the tensors.
    """

    def __init__(self, backend: Backend[TensorT, Any]) -> None:
        super().__init__(backend, values=False)
        self._block: list[tuple[Any, dict[str, Any]]] = []

    def add(self, weight: Any = _ONE, /, **scalars: Any) -> None:
        self._block.append((weight, scalars))
        self._calls += 1
        if self._calls == 1 or not self._calls % _BLOCK:
            self._add_block()

    def _bring_over(self) -> None:
        self._add_block()
        super()._bring_over()

    def _add_block(self) -> None:
        block, self._block = self._block, []
        with self._lock:
            for weight, scalars in block:
                self._device = self._keep(weight, scalars)


def means_of(
    totals: Mapping[str, Sequence[float]], of_nothing: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return name -> weighted sum / sum of weights; NaN or ``of_nothing`` if that sum is 0."""
    others = of_nothing or {}
    return {
        name: total / weights if weights else others.get(name, float("nan"))
        for name, (total, weights) in totals.items()
    }


def _columns(
    names: Sequence[str], weights: Sequence[float], values: Sequence[float]
) -> Iterable[tuple[str, list[tuple[float, float]]]]:
    """Return each name with its weights and values, in order."""
    pairs = list(zip(weights, values, strict=True))
    if len(set(names)) == 1:
        return [(names[0], pairs)]
    columns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name, pair in zip(names, pairs, strict=True):
        columns[name].append(pair)
    return columns.items()


def _is_weight(value: Any) -> bool:
    # ``int`` and ``float`` come first: the check of ``Real`` is slow, and each step needs one.
    is_number = isinstance(value, (int, float, Real, np.number))
    return is_number and 0 <= value <= sys.float_info.max


def _number(name: str, x: Any) -> float:
    """Return a number of the host as a float."""
    is_array = isinstance(x, np.ndarray) and x.shape == () and x.dtype.kind in "biuf"
    if is_array or isinstance(x, (Real, np.number, np.bool_)):
        try:
            return float(x)
        except (TypeError, OverflowError):
            pass  # a complex number of NumPy, or an integer with too many digits
    raise UnsupportedValueError(
        f"log {name}",
        f"{describe(x)} is neither a scalar tensor nor a number",
        f"log.add({name}={name}.mean())",
    )
