"""``PartSampler``: one process's numbers of each batch, whatever holds the numbers."""

import numpy as np
import pytest

from d2ldev.operations.parallel import PartSampler


@pytest.mark.parametrize("held", [list, tuple, np.array], ids=lambda held: held.__name__)
def test_each_process_has_its_numbers_and_one_without_any_the_first(held):
    batches = [held([4, 2, 6]), held([5])]
    samplers = [PartSampler(batches, rank, 2) for rank in range(2)]
    assert [[list(numbers) for numbers in sampler] for sampler in samplers] == [
        [[4, 2], [5]],
        [[6], [5]],
    ]
    assert [list(sampler.counts) for sampler in samplers] == [[(2, 3), (1, 1)], [(1, 3), (0, 1)]]
