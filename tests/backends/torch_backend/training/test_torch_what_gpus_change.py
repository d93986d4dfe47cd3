"""Several GPUs: what they change beyond rounding."""

import pytest
import torch
from torch import nn
from what_changes import ROWS, compare, read_column

from d2ldev import Trainer, UnsupportedValueError


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize("row", ROWS)
def test_two_gpus_change_what_the_page_says(virtual, row):
    assert compare(virtual, row) == read_column("PyTorch")[row]


@pytest.mark.usefixtures("copied_processes")
def test_a_parameter_that_a_layer_changes_by_itself_is_named(virtual):
    net = nn.Sequential(nn.Embedding(8, 3, max_norm=0.5), nn.Linear(3, 1))
    data = [(torch.arange(6), torch.ones(6, 1))]
    with pytest.raises(UnsupportedValueError, match=r"0\.weight is not the same"):
        Trainer(1, 2, backend=virtual).fit(net, data, lr=0.1)
    Trainer(1, 1, backend=virtual).fit(net, data, lr=0.1)
    net[0].max_norm = None
    Trainer(1, 2, backend=virtual).fit(net, data, lr=0.1)


def test_the_page_has_these_rows():
    assert [*read_column("PyTorch")] == [*ROWS]
