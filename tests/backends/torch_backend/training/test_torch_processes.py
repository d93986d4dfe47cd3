"""PyTorch in several processes: what DDP is told, and the processes that ``fit`` starts."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import several_gpus
import torch
from launched import variables
from processes import searched
from processes_program import RUNS, batches, mlp

from d2ldev import Trainer
from d2ldev.processes.join import free_port

# Processes add up in another order, and in bfloat16 and float16 with few digits.
TOLERANCES = dict.fromkeys(
    ("bf16", "shared: bf16", "fp16 with a step left out", "fp16, accumulated"), 2e-3
)
TOLERANCE = 2e-6


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]
)
def together(request, tmp_path_factory):
    """What each of several processes has found in the runs of ``processes_program``."""
    number = request.param
    folder = tmp_path_factory.mktemp("together")
    program = Path(__file__).with_name("processes_program.py")
    kept = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    kept |= {"PYTHONPATH": searched([Path(several_gpus.__file__).parent]), "OMP_NUM_THREADS": "1"}
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, program, folder / "found"],
            env=kept | variables(rank, number, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * number, said
    assert said == [""] * number
    return [pickle.loads((folder / f"found{rank}").read_bytes()) for rank in range(number)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_learn_what_one_learns(together, name):
    values, history = RUNS[name]()
    tolerance = TOLERANCES.get(name, TOLERANCE)
    for found in together:
        assert list(found[name][0]) == list(values)
        for key, x in values.items():
            np.testing.assert_allclose(found[name][0][key], x, rtol=tolerance, atol=tolerance)
        for key, curve in history.items():
            np.testing.assert_allclose(found[name][1][key], curve, rtol=tolerance, atol=tolerance)


def test_all_processes_end_with_the_same_parameters(together):
    for name in RUNS:
        for found in together[1:]:
            for key, x in together[0][name][0].items():
                assert np.array_equal(found[name][0][key], x), (name, key)


def test_running_means_are_those_of_the_part_of_rank_0(together):
    values, history = zip(*(found["batch_norm"] for found in together), strict=True)
    for found in values[1:]:
        for key, x in values[0].items():
            assert np.array_equal(found[key], x), key
    assert history[1:] == history[:-1]


def test_each_process_has_masks_of_its_own(together):
    assert len(set(map(tuple, together[0]["masks"]))) == 12


def test_a_run_with_dropout_goes_on_within_an_epoch_with_the_same_numbers(together):
    for found in together:
        unbroken, resumed = found["resumed"]
        for key, x in unbroken.items():
            np.testing.assert_array_equal(resumed[key], x)


def test_an_error_leaves_the_model_that_was_shared_as_it_was_whole_at_last(together):
    assert [found["left"] for found in together] == [(True, True, [True] * 4)] * len(together)


# -- processes that fit starts --------------------------------------------------------------------


def test_an_optimizer_of_the_user_s_has_the_state_of_the_run(virtual):
    def fit(number):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        trainer = Trainer(2, number, backend=virtual)
        trainer.fit(net, batches(), loss="cross_entropy", optimizer=optimizer)
        assert {x.device for x in net.parameters()} == {torch.device("vgpu:0")}
        return [optimizer.state[x]["momentum_buffer"].cpu() for x in net.parameters()]

    for x, y in zip(fit(2), fit(1), strict=True):
        torch.testing.assert_close(x, y)


def test_processes_on_virtual_gpus_print_nothing(virtual, capfd):
    Trainer(1, 2, backend=virtual).fit(mlp(), batches(), loss="cross_entropy")
    assert capfd.readouterr() == ("", "")


def test_a_model_with_lazy_modules_comes_back_built(virtual):
    def fit(number):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 3))
        Trainer(1, number, backend=virtual).fit(net, batches(), loss="cross_entropy")
        return net[0].weight.detach().cpu()

    torch.testing.assert_close(fit(2), fit(1))
