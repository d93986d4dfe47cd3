"""Every ``D2LDEV_*`` environment variable: read here, and nowhere else.

``import d2ldev`` alone asks whether the second one is set.

| variable | values |
|---|---|
| ``D2LDEV_BACKEND`` | the name of a backend; empty is unset |
| ``D2LDEV_VIRTUAL_GPUS`` | 0 to 8; empty is unset |
| ``D2LDEV_VIRTUAL_CUDA`` | 1 or 0, also yes and no, on and off |
| ``D2LDEV_STRICT`` | 1 or 0, also yes and no, on and off |
| ``D2LDEV_GPU_MEMORY`` | ``grow`` (default) or ``framework`` |
| ``D2LDEV_MATMUL_PRECISION`` | ``highest``, ``high`` or ``medium``; empty is the framework's |
| ``D2LDEV_PEER_TIMEOUT`` | seconds after which a silent process is lost; 60 if unset |

The variables of a launch are torchrun's: https://docs.pytorch.org/docs/stable/elastic/run.html

Held by ``test_virtual.py``, ``test_selection.py`` and ``test_strictness.py`` in ``tests/core/``.
"""

from __future__ import annotations

import math
import operator
import os
from typing import NamedTuple, cast

from d2ldev.errors import InvalidDeviceError, UnsupportedValueError, quote
from d2ldev.options import MATMUL_PRECISIONS, MatmulPrecisionName, nearest, problem_of

BACKEND = "D2LDEV_BACKEND"
VIRTUAL_GPUS = "D2LDEV_VIRTUAL_GPUS"
VIRTUAL_CUDA = "D2LDEV_VIRTUAL_CUDA"
STRICT = "D2LDEV_STRICT"
GPU_MEMORY = "D2LDEV_GPU_MEMORY"
MATMUL_PRECISION = "D2LDEV_MATMUL_PRECISION"
PEER_TIMEOUT = "D2LDEV_PEER_TIMEOUT"

VARIABLES = (
    *(BACKEND, VIRTUAL_GPUS, VIRTUAL_CUDA, STRICT, GPU_MEMORY, MATMUL_PRECISION),
    PEER_TIMEOUT,
)

MAX_VIRTUAL_GPUS = 8

# The number given to ``d2ldev.virtual_gpus(n)``, which goes before the variable.
_chosen_virtual_gpus: int | None = None
# The same for its ``as_cuda``.
_chosen_virtual_cuda: bool | None = None


def backend_name() -> str:
    """Return the backend that ``D2LDEV_BACKEND`` names, as it is written; empty if it is unset."""
    text = os.environ.get(BACKEND, "")
    return text if text.strip() else ""


def virtual_gpus() -> int | None:
    """Return the number of virtual GPUs that was asked for; None if nothing was said.

    Raises:
        InvalidDeviceError: if the variable is not a number from 0 to 8.
    """
    if _chosen_virtual_gpus is not None:
        return _chosen_virtual_gpus
    text = os.environ.get(VIRTUAL_GPUS, "").strip()
    if not text:
        return None
    attempted = f"make {text!r} virtual GPUs (from {VIRTUAL_GPUS})"
    return check_virtual_gpus(number_in(text), attempted, f"{VIRTUAL_GPUS}=2")


def number_in(text: str) -> int:
    """Return the number that a text is, from 0 to nine digits; -1 for any other text.

    Python itself raises an error for very long numbers, and reads digits of any script.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def choose_virtual_gpus(n: int | None) -> int | None:
    """Set the number that overrides the variable, None for the variable; return the old one."""
    global _chosen_virtual_gpus
    before, _chosen_virtual_gpus = _chosen_virtual_gpus, n
    return before


def virtual_cuda() -> bool:
    """Tell whether the program wants virtual GPUs that stand for CUDA devices.

    A framework with functions for CUDA lets them answer for its virtual GPUs then.

    Raises:
        UnsupportedValueError: if ``D2LDEV_VIRTUAL_CUDA`` is neither yes nor no.
    """
    if _chosen_virtual_cuda is not None:
        return _chosen_virtual_cuda
    return _is_yes(VIRTUAL_CUDA, "let virtual GPUs stand for CUDA devices")


def choose_virtual_cuda(wanted: bool | None) -> bool | None:
    """Set the answer that overrides the variable, None for the variable; return the old one."""
    global _chosen_virtual_cuda
    before, _chosen_virtual_cuda = _chosen_virtual_cuda, wanted
    return before


def list_choices() -> dict[str, str]:
    """Return the virtual GPUs that a call asked for, as the variables of another process."""
    number, wanted = _chosen_virtual_gpus, _chosen_virtual_cuda
    return {
        **({} if number is None else {VIRTUAL_GPUS: str(number)}),
        **({} if wanted is None else {VIRTUAL_CUDA: str(int(wanted))}),
    }


def check_virtual_gpus(n: object, attempted: str, fix: str) -> int:
    """Return a number of virtual GPUs as an integer.

    Args:
        n: the user's value.
        attempted: the current operation, for messages.
        fix: a line that works.

    Raises:
        InvalidDeviceError: if it is not an integer from 0 to 8.
    """
    try:
        number = -1 if isinstance(n, bool) else operator.index(n)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_VIRTUAL_GPUS:
        raise InvalidDeviceError(
            attempted, f"the number must be an integer from 0 to {MAX_VIRTUAL_GPUS}", fix
        )
    return number


def is_strict() -> bool:
    """Tell whether ``D2LDEV_STRICT`` puts the whole process under ``strict()``.

    Raises:
        UnsupportedValueError: if its value is neither yes nor no.
    """
    return _is_yes(STRICT, "put the process under strict()")


def _is_yes(variable: str, attempted: str) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise UnsupportedValueError(
        f"{attempted} (from {variable}={text!r})",
        "it must be 1 or 0",
        f"{variable}=1, or unset {variable}",
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
            f"follow {GPU_MEMORY}={quote(os.environ[GPU_MEMORY])}",
            "it must be 'framework' or 'grow'",
            f"{GPU_MEMORY}=framework leaves the framework's memory alone; grow is the default",
        )
    return policy != "framework"


def matmul_precision() -> str | None:
    """Return the precision that ``D2LDEV_MATMUL_PRECISION`` names; None if it is unset.

    Raises:
        UnsupportedValueError: if the name is invalid.
    """
    text = os.environ.get(MATMUL_PRECISION, "").strip().lower()
    attempted = f"set the precision of products (from {MATMUL_PRECISION}={quote(text)})"
    fix = f"{MATMUL_PRECISION}=highest"
    return check_matmul_precision(text, attempted, fix) if text else None


def check_matmul_precision(precision: object, attempted: str, fix: str) -> MatmulPrecisionName:
    """Return one of ``MATMUL_PRECISIONS``.

    Args:
        precision: the value that the user gave.
        attempted: the current operation, for messages.
        fix: the line that is right.

    Raises:
        UnsupportedValueError: if the precision is invalid.
    """
    if problem := problem_of(precision, MATMUL_PRECISIONS):
        problem = f"{quote(precision)} is not a precision: {problem}"
        near = nearest(precision, MATMUL_PRECISIONS)
        fix = fix.replace("highest", near) if near else f"{fix}, which is float32"
        raise UnsupportedValueError(attempted, problem, fix)
    return cast("MatmulPrecisionName", precision)


class Peers(NamedTuple):
    """The launcher's message to one of several processes, in torchrun's variables.

    Args:
        rank: the number of this process, from 0 (``RANK``).
        world_size: how many there are, on all machines; 2 or more (``WORLD_SIZE``).
        local_rank: its number on this machine (``LOCAL_RANK``).
        local_world_size: how many there are on this machine (``LOCAL_WORLD_SIZE``).
        address: the machine of rank 0 (``MASTER_ADDR``).
        port: where rank 0 is to listen on it (``MASTER_PORT``).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say the same."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def peers() -> Peers | None:
    """Return the settings of a launcher; None without a launcher, or with a single process.

    Raises:
        UnsupportedValueError: if a variable is missing, or contradicts another one.
    """
    if not os.environ.get("WORLD_SIZE") and not os.environ.get("RANK"):
        return None
    world_size = _of_launch("WORLD_SIZE", 1, 2**20)
    if world_size == 1:
        return None
    rank = _of_launch("RANK", 0, world_size - 1)
    # Some launchers set no more of these two than the rank, and others none for one process each.
    local_rank = _of_launch("LOCAL_RANK", 0, rank, "0")
    local_world_size = _of_launch(
        "LOCAL_WORLD_SIZE", local_rank + 1, world_size, str(local_rank + 1)
    )
    if not os.environ.get("MASTER_ADDR"):
        raise _launch_refusal("MASTER_ADDR", "it is not set")
    # torchrun listens at MASTER_PORT itself.
    is_taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _of_launch("MASTER_PORT", 1, 65534) + is_taken
    address = os.environ["MASTER_ADDR"]
    return Peers(rank, world_size, local_rank, local_world_size, address, port)


def _of_launch(name: str, least: int, most: int, unset: str = "") -> int:
    text = os.environ.get(name, "").strip() or unset
    if not text:
        raise _launch_refusal(name, "it is not set")
    number = number_in(text)
    if not least <= number <= most:
        raise _launch_refusal(name, f"{quote(text)} is not an integer from {least} to {most}")
    return number


def _launch_refusal(name: str, problem: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"belong to several processes (from {name})",
        problem,
        "d2ldev launch --processes 2 train.py; or unset WORLD_SIZE for a process of its own",
    )


def peer_timeout() -> float:
    """Return after how many seconds without a sign a process of a launch is lost.

    Raises:
        UnsupportedValueError: if ``D2LDEV_PEER_TIMEOUT`` is not a number of seconds.
    """
    text = os.environ.get(PEER_TIMEOUT, "").strip() or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 86400:
        raise UnsupportedValueError(
            f"wait for other processes (from {PEER_TIMEOUT}={quote(text)})",
            "it must be a number of seconds from 1 to 86400",
            f"{PEER_TIMEOUT}=60",
        )
    return seconds


def unknown() -> list[str]:
    """Return unrecognized ``D2LDEV_*`` variables."""
    return [name for name in list_variables() if name not in VARIABLES]


def list_variables() -> dict[str, str]:
    """Return the variables of d2ldev that are set, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("D2LDEV_")}
