"""What a framework cannot do: the errors about ``Framework.cannot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d2ldev.errors import UnsupportedValueError

if TYPE_CHECKING:
    from d2ldev.contract import Framework


def require(framework: Framework, ability: str, attempted: str, fix: str | None = None) -> None:
    """Raise an ``UnsupportedValueError`` if a framework lacks an ability.

    Args:
        framework: the framework.
        ability: its name in ``cannot``.
        attempted: the current operation.
        fix: the line that works; None is another backend.
    """
    if ability in framework.cannot:
        other = "use another backend for it: D2LDEV_BACKEND=torch"
        problem = describe_inability(framework, ability)
        raise UnsupportedValueError(attempted, problem, fix or other)


def describe_inability(framework: Framework, ability: str) -> str:
    """Return a sentence that says what a framework cannot do, and why."""
    return f"the {framework.name} backend cannot {ability}: {framework.cannot[ability]}"
