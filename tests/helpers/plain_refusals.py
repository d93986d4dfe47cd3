"""A plugin of pytest's: virtual GPUs of torch that refuse as CUDA's do, with torch's own error.

``pytest -p plain_refusals``: where an operator raised d2ldev's error, it raises a ``RuntimeError``.
"""

import pytest
from d2ldev_torch.virtual import kernels, random


def refusal(*_operation):
    """Return an error as torch's operators raise it, without a word about devices."""
    return RuntimeError("no")


def refuse_plainly(patch):
    """Let virtual GPUs refuse as CUDA's do, until the patch is undone."""
    patch.setattr(kernels.Schema, "mismatch", refusal)
    patch.setattr(random, "generator_mismatch", refusal)


def pytest_configure(config):
    patch = pytest.MonkeyPatch()
    refuse_plainly(patch)
    config.add_cleanup(patch.undo)
