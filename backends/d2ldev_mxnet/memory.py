"""Which of MXNet's exceptions say that memory ran out: it has none of its own for that."""

from __future__ import annotations

import os

from d2ldev_mxnet.framework import mx

# Those of the CPU's storage, of the C++ library, and of the GPU's.
_WORDS = (
    "Failed to allocate CPU Memory",
    "std::bad_alloc",
    "cudaMalloc failed",
    "out of memory",
    "ALLOC_FAILED",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception of MXNet's, or of Python's, says so."""
    if not isinstance(error, mx.base.MXNetError):
        return isinstance(error, MemoryError)
    return any(words in str(error) for words in _WORDS)


def memory_of_the_machine() -> int:
    """The size of the machine's own memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
