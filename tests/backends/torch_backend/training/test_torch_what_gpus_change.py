"""Several GPUs: what they change beyond rounding."""

import pytest
from what_changes import ROWS, compare, read_column


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize("row", ROWS)
def test_two_gpus_change_what_the_page_says(virtual, row):
    assert compare(virtual, row) == read_column("PyTorch")[row]


def test_the_page_has_these_rows():
    assert [*read_column("PyTorch")] == [*ROWS]
