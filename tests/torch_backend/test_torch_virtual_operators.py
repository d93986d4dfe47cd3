"""Every operator of torch on a virtual GPU: the CPU's results and gradients, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# What is not to be compared, or refused: memory that nobody wrote, sparse tensors, and lengths
# that CUDA's kernels, too, want on the host.
EXPECTED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("sparse.mm reduce", "sparse.sampled_addmm", "to_sparse", "tensor_split"),
}


@pytest.fixture(scope="module")
def swept():
    """What a sweep over torch's operators found."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "operator_sweep.py"), "2"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout)


def test_results_and_gradients_are_the_cpus(swept):
    different = {name: what for name, what in swept["different"].items() if name not in EXPECTED}
    assert different == {}


def test_hundreds_of_operators_were_compared(swept):
    assert swept["operators"] > 400
    assert swept["compared"] > 2000


def test_sparse_results_are_refused_by_name(swept):
    assert swept["different"]["to_sparse"].startswith("UnsupportedValueError: cannot make")
