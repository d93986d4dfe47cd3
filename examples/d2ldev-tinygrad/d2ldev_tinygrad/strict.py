"""Strict: operations that mix devices are errors."""

from __future__ import annotations

from collections.abc import Callable

from d2ldev.framework import NotBegunError, Strict


class TinygradStrict(Strict):
    """The operations of tinygrad."""

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        raise NotBegunError("Strict.refuse_mixing")
