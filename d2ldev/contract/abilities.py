"""What a framework cannot do: the errors about ``Framework.cannot``, and precisions of products."""

from __future__ import annotations

from collections.abc import Mapping

from d2ldev.contract.framework import ABILITIES, Framework
from d2ldev.contract.precision import MatmulPrecision
from d2ldev.errors import UnsupportedValueError, quote
from d2ldev.options import nearest
from d2ldev.settings import check_matmul_precision


def check_cannot(cannot: object) -> str:
    """Return what is wrong with ``Framework.cannot``; empty if nothing is.

    >>> check_cannot({"trains": "it has no gradients"})
    "cannot has 'trains', which is no ability: did you mean 'train'?"
    """
    if not isinstance(cannot, Mapping):
        return f"cannot is {quote(cannot)}, and no mapping from a name to the reason"
    for name, reason in cannot.items():
        if name not in ABILITIES:
            near = nearest(name, [*ABILITIES])
            meant = f"did you mean {near!r}?" if near else f"there are {', '.join(ABILITIES)}"
            return f"cannot has {quote(name)}, which is no ability: {meant}"
        if not isinstance(reason, str) or not reason:
            return f"cannot has {name!r} without the reason, a text"
    return ""


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


def check_precision(framework: Framework, precision: object, attempted: str, fix: str) -> str:
    """Return a precision of products that a framework supports.

    Args:
        framework: the framework.
        precision: the user's argument.
        attempted: the current operation, for messages.
        fix: the line that sets ``'highest'``.

    Raises:
        UnsupportedValueError: if the precision is invalid, or the framework cannot use it.
    """
    precision = check_matmul_precision(precision, attempted, fix)
    if precision == "highest":
        require(framework, "multiply in float32", attempted, fix.replace("highest", "high"))
    return precision


def set_precision(framework: Framework, precision: str) -> MatmulPrecision:
    """Set the precision of products, which was checked, and return the block that ends it."""
    return MatmulPrecision(framework.state.matmul_switch, precision)
