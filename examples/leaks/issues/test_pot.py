"""https://github.com/PythonOT/POT/issues/783 in POT 0.9.6.post1."""

import ot
import torch


def test_solve_sample_batch():
    """The weights are created on the CPU."""
    x, y = torch.rand(4, 10, 2), torch.rand(4, 10, 2)
    ot.solve_sample_batch(x, y, reg=1)
