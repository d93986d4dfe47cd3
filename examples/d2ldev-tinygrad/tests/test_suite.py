"""d2ldev's conformance suite on this backend, one module after the other."""

import pytest
from d2ldev.framework.testing import MODULES, check_conformance


@pytest.mark.parametrize("module", MODULES)
def test_conformance(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one module in a process of its own."""
    # tinygrad's cache of kernels on the disk belongs to the thread that opened it.
    monkeypatch.setenv("CACHELEVEL", "0")
    check_conformance("tinygrad", module, "--virtual-gpus=2")
