"""``examples/images_torch.py`` learns on the CPU and on a virtual GPU, and goes on."""

import pytest
from example_runs import accuracy, run_example


@pytest.fixture(scope="module")
def printed():
    return run_example("images_torch")


@pytest.mark.parametrize(("gpus", "device"), [("0", "cpu"), ("1", "gpu:0")])
def test_the_program_learns_on_the_device_that_it_was_given(printed, gpus, device):
    whole, _, _ = printed[gpus]
    assert [line.partition(": ")[0] for line in whole] == [
        f"epoch {epoch} on {device}" for epoch in range(4)
    ]
    assert accuracy(whole[-1]) > 0.95


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(printed, gpus):
    whole, begun, resumed = printed[gpus]
    assert [*begun, *resumed] == whole
