"""Places other than the CPU that a torch without a GPU really has.

- ``LedgerBackend``: two GPUs that are a list of storages. What was copied there computes on, so
  that values, gradients and training can be followed; where a tensor is, is looked up by the
  memory it has now. A parameter that was given other memory is therefore where that memory is.
- ``MetaBackend``: torch's own ``meta`` device as the one GPU: another ``torch.device`` to torch
  as well, with its own errors and creation calls, but without values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d2ldev_torch.accelerator import Accelerator
from d2ldev_torch.backend import TorchBackend

from d2ldev.device import CPU, Device, gpu


class CountedAccelerator(Accelerator):
    """An accelerator that is there without a driver: it has a type and a number.

    Args:
        type: the ``type`` of its ``torch.device``.
        number: how many there are.
    """

    def __init__(self, type: str, number: int) -> None:  # noqa: A002
        super().__init__(type, type, torch.cpu)
        self._number = number
        self.synchronized: list[int] = []

    def count(self) -> int:
        return self._number

    def current(self) -> int:
        return 0

    def synchronize(self, index: int) -> None:
        self.synchronized.append(index)

    def is_idle(self, index: int) -> bool:
        return index in self.synchronized


class LedgerBackend(TorchBackend):
    """Two GPUs whose memory is a list of the CPU's storages."""

    def __init__(self) -> None:
        super().__init__()
        self._accelerator = CountedAccelerator("cuda", 2)
        # The storages are kept, so that no address is given to another one.
        self._ledger: dict[int, tuple[torch.UntypedStorage, Device]] = {}
        self.copied: list[torch.Tensor] = []
        self.before_copy: Callable[[int], object] = lambda number: None

    def device_of(self, x: Any) -> Device:
        super().device_of(x)
        return self._ledger.get(_storage(x)._cdata, (None, CPU))[1]

    def _copy_all(self, xs: list[torch.Tensor], native: torch.device) -> list[torch.Tensor]:
        return [self._ledgered(x, native) for x in xs]

    def _ledgered(self, x: torch.Tensor, native: torch.device) -> torch.Tensor:
        self.before_copy(len(self.copied))
        self.copied.append(x)
        (new,) = super()._copy_all([x], torch.device("cpu"))
        if native.type != "cpu":
            storage = _storage(new)
            self._ledger[storage._cdata] = storage, gpu(native.index)
        return new


class MetaBackend(TorchBackend):
    """One GPU, which is torch's ``meta`` device."""

    def __init__(self) -> None:
        super().__init__()
        self._accelerator = CountedAccelerator("meta", 1)

    def _random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> torch.Tensor:
        # The meta device has no generator, as it has no numbers.
        seed = None if native.type == "meta" else seed
        return super()._random(distribution, shape, seed, dtype, native)

    def _refill(self, x: torch.Tensor, new: torch.Tensor) -> None:
        # torch gives a CPU parameter a GPU's memory, but not the meta device's: here the two
        # tensors change places instead, and whoever holds the parameter holds it still.
        if torch.nn.parameter.is_lazy(x):
            moved: torch.Tensor = torch.nn.UninitializedParameter(x.requires_grad, new.device)
        else:
            moved = torch.nn.Parameter(new.detach(), x.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(x, moved)


def _storage(x: torch.Tensor) -> torch.UntypedStorage:
    # A parameter that is not initialised refuses the question, but has a storage.
    with torch._C.DisableTorchFunctionSubclass():
        return x.untyped_storage()
