"""The guides about several GPUs and processes, with PyTorch."""

import pytest
from pages import run_page
from safetensors.torch import load_file
from shells import FOR_ANY, GUIDES, make_shell, on_loopback, read_blocks, read_commands, run


@pytest.mark.parametrize("page", FOR_ANY)
def test_a_guide_for_any_framework_runs(page, tmp_path):
    run_page(GUIDES / page, "reference", tmp_path, active="torch")


def test_torchrun_trains_in_two_processes(tmp_path):
    alone, _ = read_commands("several-machines.md", "torchrun")
    given = make_shell(tmp_path) | {"D2LDEV_BACKEND": "torch", "D2LDEV_VIRTUAL_GPUS": "2"}
    first, second = run([alone], tmp_path, given)
    assert first == second
    assert len(first) == 3


@pytest.mark.parametrize("virtual_gpus", ["0", "2"])
def test_a_loop_of_the_users_own_trains_in_two_processes(tmp_path, virtual_gpus):
    (line,) = read_commands("existing-loop.md", "d2ldev launch")
    given = make_shell(tmp_path, "existing-loop.md", "torch")
    first, second = run([line], tmp_path, given | {"D2LDEV_VIRTUAL_GPUS": virtual_gpus})
    assert first == second == sorted(first, reverse=True)
    assert len(first) == 3


def test_a_sharded_model_trains_in_two_processes(tmp_path):
    (line,) = read_commands("large-models.md", "d2ldev launch")
    for first, last in run([line], tmp_path, make_shell(tmp_path, "large-models.md", "torch")):
        assert last < first
    assert load_file(tmp_path / "net.safetensors")["0.weight"].shape == (256, 64)


@pytest.mark.nightly
def test_torchrun_trains_on_two_machines(tmp_path):
    _, together = read_commands("several-machines.md", "torchrun")
    given = make_shell(tmp_path) | {"D2LDEV_BACKEND": "torch"}
    first, second = run([on_loopback(together)] * 2, tmp_path, given)
    assert first == second
    assert len(first) == 3


@pytest.mark.nightly
def test_a_program_trains_on_two_gpus(tmp_path):
    (line,) = read_blocks("several-gpus.md", "sh")
    given = make_shell(tmp_path, "several-gpus.md") | {"D2LDEV_BACKEND": "torch"}
    (losses,) = run([line], tmp_path, given | {"D2LDEV_VIRTUAL_GPUS": "2"})
    assert losses == sorted(losses, reverse=True)
