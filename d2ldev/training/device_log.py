"""``DeviceLog``: the scalars of a training loop, kept on the device until someone wants them.

Reading one number of a GPU makes Python wait for everything that is queued there. A log that keeps
them where they are and brings them over together waits once. It is the answer to the third exercise
of D2L's section 6.7.5, and is measured against logging one at a time in ``benchmarks/``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2ldev.errors import UnsupportedValueError, describe

if TYPE_CHECKING:
    from d2ldev.interface import Backend, DeviceLike, Tensor


class DeviceLog:
    """Scalars by name, on a device, with their means and last values.

    Args:
        backend: whose tensors they are.
        device: where they are and stay; None is the device of the first one.
        every: keep each so-manieth call of ``add``, from the first; the others cost nothing.
        max_pending: so many scalars of a name are kept on the device; one more is a ``flush``.

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
    ) -> None:
        for name, number in (("every", every), ("max_pending", max_pending)):
            if not isinstance(number, int) or number < 1:
                raise UnsupportedValueError(
                    f"log with {name}={describe(number)}",
                    "it is an integer, 1 or more",
                    f"{name}=1",
                )
        self._backend = backend
        self._device = None if device is None else backend.device(device)
        self._every = every
        self._max_pending = max_pending
        self._calls = 0
        self._pending: dict[str, list[tuple[float, Tensor]]] = {}
        self._totals: dict[str, tuple[float, float]] = {}
        self._last: dict[str, float] = {}

    def add(self, weight: float = 1, /, **scalars: Any) -> None:
        """Keep scalars, without waiting for the device.

        Args:
            weight: how much they count in the means, such as the number of examples.
            scalars: name -> scalar tensor, which is not copied: do not write into it.

        Raises:
            UnsupportedValueError: for what is no scalar tensor of the device.
        """
        self._calls += 1
        if (self._calls - 1) % self._every:
            return
        for name, x in scalars.items():
            self._check(name, x)
        for name, x in scalars.items():
            pending = self._pending.setdefault(name, [])
            pending.append((weight, x))
        if any(len(pending) >= self._max_pending for pending in self._pending.values()):
            self.flush()

    def flush(self) -> dict[str, list[float]]:
        """Bring what is pending to the host in one transfer.

        Returns:
            Name -> the values since the last flush, in order.
        """
        named = [(name, weight, x) for name, xs in self._pending.items() for weight, x in xs]
        self._pending = {}
        if not named:
            return {}
        values = self._values([x for _, _, x in named])
        found: dict[str, list[float]] = {}
        for (name, weight, _), value in zip(named, values, strict=True):
            found.setdefault(name, []).append(value)
            total, weights = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = total + weight * value, weights + weight
            self._last[name] = value
        return found

    def means(self) -> dict[str, float]:
        """Name -> the weighted mean of everything that was added."""
        self.flush()
        return {name: total / weights for name, (total, weights) in self._totals.items()}

    def last(self) -> dict[str, float]:
        """Name -> the value that was added last."""
        self.flush()
        return dict(self._last)

    def _values(self, xs: list[Tensor]) -> list[float]:
        dtypes = {self._backend.dtype_of(x) for x in xs}
        if len(dtypes) > 1:  # stacked in the one that holds them all
            xs = [self._backend.asarray(x, dtype="float32") for x in xs]
        stacked = self._backend.to_numpy(self._backend._stack(xs))
        return [float(value) for value in stacked]

    def _check(self, name: str, x: Any) -> None:
        self._backend._require_tensor(x, f"log {name}")
        device = self._backend.device_of(x)
        if self._device is None:
            self._device = device
        if device is not self._device or tuple(x.shape) != ():
            raise UnsupportedValueError(
                f"log {name} on {self._device}",
                f"it is of shape {tuple(x.shape)} on {device}, and no scalar there",
                f"log.add({name}={name}.mean()), where the model is",
            )
