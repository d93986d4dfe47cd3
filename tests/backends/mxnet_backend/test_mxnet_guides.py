"""The guides for any framework, with MXNet."""

import pytest
from pages import run_page
from shells import FOR_ANY, GUIDES


@pytest.mark.parametrize("page", FOR_ANY)
def test_a_guide_for_any_framework_runs(page, tmp_path):
    run_page(GUIDES / page, "reference", tmp_path, active="mxnet")
