"""d2ldev's conformance suite on this backend, one module after the other."""

import pytest
from d2ldev.framework.testing import MODULES, check_conformance


@pytest.mark.parametrize("module", MODULES)
def test_conformance(module: str) -> None:
    """Run one module in a process of its own."""
    check_conformance("tinygrad", module, "--virtual-gpus=2")
