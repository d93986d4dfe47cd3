"""d2ldev's conformance suite on this backend: each module that is written."""

import pytest
from d2ldev.framework.testing import check_conformance


@pytest.mark.parametrize("module", ["devices"])  # add each module that you have written
def test_conformance(module: str) -> None:
    check_conformance("tinygrad", module)
