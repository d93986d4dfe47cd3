"""Which torch a test needs: what an older one cannot do is skipped with that reason."""

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def needs_torch(major, minor, why):
    """Return a mark that skips a test with an older torch."""
    reason = f"torch {torch.__version__} {why}: needs torch {major}.{minor}"
    return pytest.mark.skipif((major, minor) > VERSION, reason=reason)


needs_other_memory = needs_torch(
    2, 12, "cannot give other memory to a storage of a backend in Python"
)
"""Marks a test of virtual GPUs whose tensors get other memory, as FSDP's do."""
