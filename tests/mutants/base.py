"""What the mutants have in common, and the sound backend with a queue."""

from __future__ import annotations

from typing import Any, ClassVar

from d2ldev_reference.backend import ReferenceBackend

from d2ldev import Device

MUTANTS: list[type[Mutant]] = []


class Mutant(ReferenceBackend):
    """The reference backend with one thing broken."""

    caught_by: ClassVar[str]
    """The requirement that has to fail."""
    asked_virtual_gpus: ClassVar[int] = 2

    def __init_subclass__(cls, caught_by: str = "") -> None:
        cls.name = cls.__name__.lower()
        if caught_by:
            cls.caught_by = caught_by
            MUTANTS.append(cls)


class Queued(Mutant):
    """A sound backend in which a product is only queued until someone waits for it.

    Every tensor it makes is asked about: once there was one, its device is busy until
    ``synchronize``.
    """

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        self._queued: set[Device] = set()

    def _random(self, distribution, shape, seed, dtype, native) -> Any:
        self._queued.add(self._from_native(native))
        return super()._random(distribution, shape, seed, dtype, native)

    def _synchronize(self, device: Device) -> None:
        self._queued.discard(device)

    def is_idle(self, device: Any = None) -> bool:
        if device is None:
            return not self._queued
        return self._existing(device, "ask whether there is work")[0] not in self._queued
