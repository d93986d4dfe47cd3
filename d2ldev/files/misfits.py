"""What does not fit between a file and what it is read into, collected for one message."""

from __future__ import annotations

from collections.abc import Sequence

from d2ldev.errors import CheckpointError

_SHOWN = 10


class Misfits:
    """The names that are missing in a file, unexpected there, or of another shape or dtype."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []

    def error(self, attempted: str, hint: str) -> CheckpointError | None:
        """The error that says all of it; None if everything fits."""
        told = [
            f"{what} {_some(names)}"
            for what, names in (
                ("it lacks", self.missing),
                ("it has unexpected", self.unexpected),
                ("misfits:", self.different),
            )
            if names
        ]
        if not told:
            return None
        return CheckpointError(attempted, f"{'; '.join(told)}; nothing was changed", hint)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
