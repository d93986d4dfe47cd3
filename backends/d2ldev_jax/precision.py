"""The precision of float32 products and convolutions: ``jax_default_matmul_precision``.

JAX's key of a compiled function contains it. So JAX compiles again after a change.
https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import jax

from d2ldev import ScopeError

# None is JAX's default: TensorFloat-32 on NVIDIA's GPUs, bfloat16 on TPUs.
_THEIRS = {"highest": "highest", "high": "high", "medium": "bfloat16"}
_HIGHEST = ("highest", "float32", "F32_F32_F32", "F64_F64_F64")
# An algorithm with three or more terms of bfloat16 is as precise.
_HIGH = (
    *("high", "tensorfloat32", "bfloat16_3x", "TF32_TF32_F32", "TF32_TF32_F32_X3"),
    *("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"),
)


def matmul_precision() -> str:
    """Return the precision in force in this thread."""
    theirs = jax.config.jax_default_matmul_precision
    if theirs in _HIGHEST:
        return "highest"
    return "high" if theirs in _HIGH else "medium"


def set_matmul_precision(precision: str) -> Callable[[], None]:
    """Set the default of all threads, and return a function that restores the former one.

    Raises:
        ScopeError: if JAX's own context in this thread is less precise. It overrides the default.
    """
    before = _get_default()
    _set_default(_THEIRS[precision])
    names = [*_THEIRS]
    if names.index(matmul_precision()) > names.index(precision):
        theirs = jax.config.jax_default_matmul_precision
        _set_default(before)
        raise ScopeError(
            f"set the precision of products to {precision!r}",
            f"jax.default_matmul_precision({theirs!r}) is in force in this thread and overrides it",
            "end that block of JAX's first, or use backend.matmul_precision for both",
        )
    return lambda: _set_default(before)


def _get_default() -> str | None:
    """Return the default of all threads."""
    found: list[str | None] = []
    # A new thread has no context of its own, which would override it.
    thread = Thread(target=lambda: found.append(jax.config.jax_default_matmul_precision))
    thread.start()
    thread.join()
    return found[0]


def _set_default(theirs: str | None) -> None:
    configure: Callable[[str, object], None] = jax.config.update
    configure("jax_default_matmul_precision", theirs)
