"""Every ``D2LDEV_*`` environment variable: read here, and nowhere else.

| variable | values |
|---|---|
| ``D2LDEV_BACKEND`` | the name of a backend; empty is unset |
| ``D2LDEV_VIRTUAL_GPUS`` | 0 to 8; empty is unset |
| ``D2LDEV_STRICT`` | 1 or 0, also yes and no, on and off |
| ``D2LDEV_GPU_MEMORY`` | ``grow`` (default) or ``framework`` |

Held by ``test_virtual.py``, ``test_selection.py`` and ``test_strictness.py`` in ``tests/core/``.
"""

from __future__ import annotations

import operator
import os

from d2ldev.errors import InvalidDeviceError, UnsupportedValueError, shown

BACKEND = "D2LDEV_BACKEND"
VIRTUAL_GPUS = "D2LDEV_VIRTUAL_GPUS"
STRICT = "D2LDEV_STRICT"
GPU_MEMORY = "D2LDEV_GPU_MEMORY"

VARIABLES = (BACKEND, VIRTUAL_GPUS, STRICT, GPU_MEMORY)

MAX_VIRTUAL_GPUS = 8

# The number given to ``d2ldev.virtual_gpus(n)``, which goes before the variable.
_chosen_virtual_gpus: int | None = None


def backend_name() -> str:
    """Return the backend that ``D2LDEV_BACKEND`` names, as it is written; empty if it is unset."""
    text = os.environ.get(BACKEND, "")
    return text if text.strip() else ""


def virtual_gpus() -> int | None:
    """Return the number of virtual GPUs that was asked for; None if nothing was said.

    Raises:
        InvalidDeviceError: if the variable is no number from 0 to 8.
    """
    if _chosen_virtual_gpus is not None:
        return _chosen_virtual_gpus
    text = os.environ.get(VIRTUAL_GPUS, "").strip()
    if not text:
        return None
    attempted = f"make {text!r} virtual GPUs (from {VIRTUAL_GPUS})"
    # Python does not read numbers of any length.
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return checked_virtual_gpus(int(text) if is_number else text, attempted)


def choose_virtual_gpus(n: int | None) -> int | None:
    """Let a number go before the variable, None for the variable; return what it was before."""
    global _chosen_virtual_gpus
    before, _chosen_virtual_gpus = _chosen_virtual_gpus, n
    return before


def checked_virtual_gpus(n: object, attempted: str) -> int:
    """Return a number of virtual GPUs as an integer.

    Raises:
        InvalidDeviceError: if it is no integer from 0 to 8.
    """
    try:
        number = -1 if isinstance(n, bool) else operator.index(n)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_VIRTUAL_GPUS:
        raise InvalidDeviceError(
            attempted, f"the number is an integer from 0 to {MAX_VIRTUAL_GPUS}", f"{VIRTUAL_GPUS}=2"
        )
    return number


def is_strict() -> bool:
    """Tell whether ``D2LDEV_STRICT`` puts the whole process under ``strict()``.

    Raises:
        UnsupportedValueError: if its value is neither yes nor no.
    """
    text = os.environ.get(STRICT, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise UnsupportedValueError(
        f"put the process under strict() (from {STRICT}={text!r})",
        "it is neither 1 nor 0",
        f"{STRICT}=1, or unset {STRICT}",
    )


def memory_grows() -> bool:
    """Tell whether frameworks are asked to take GPU memory as they need it.

    Raises:
        UnsupportedValueError: if ``D2LDEV_GPU_MEMORY`` is neither ``framework`` nor ``grow`` nor
            empty.
    """
    policy = os.environ.get(GPU_MEMORY, "").strip().lower()
    if policy not in ("", "framework", "grow"):
        raise UnsupportedValueError(
            f"follow {GPU_MEMORY}={shown(os.environ[GPU_MEMORY])}",
            "the policies are 'framework' and 'grow'",
            f"{GPU_MEMORY}=framework leaves the framework's memory alone; grow is the default",
        )
    return policy != "framework"


def unknown() -> list[str]:
    """Return the variables that are set, begin as d2ldev's do, and are none."""
    return [name for name in given() if name not in VARIABLES]


def given() -> dict[str, str]:
    """Return the variables of d2ldev that are set, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("D2LDEV_")}
