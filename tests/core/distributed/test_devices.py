"""Where processes train together: an error on every rank for what their library cannot do."""

import os
import socket

import numpy as np
import pytest
from launched import together

import d2ldev
from d2ldev import Trainer
from d2ldev.framework import Portion
from d2ldev.framework.testing import framework_of

HOST = socket.gethostname()
BATCHES = [(np.ones((2, 3), "float32"), np.ones((2, 2), "float32"))]


def train(uuids, library="NCCL", num_gpus=(1, 1), others=None):
    """Train in two processes, of which each has a GPU with a UUID; how they ended."""

    def body(rank):
        framework = framework_of(d2ldev.get_backend("reference"))
        framework.parallel.gpu_library = lambda device: (library, library and uuids[rank])
        trainer = Trainer(1, num_gpus[rank], backend="reference")
        return len(trainer.fit(trainer.backend.mlp([3, 2]), BATCHES)["loss"])

    return together(body, others=others)


def test_all_processes_name_the_ranks_that_share_a_gpu_before_training():
    for each in train(["GPU-1", "GPU-1"]):
        assert each.error == "UnsupportedValueError"
        assert (
            f"cannot train in 2 processes: gpu:0 of rank 0 on {HOST} and gpu:1 of rank 1 on {HOST} "
            "are one GPU (GPU-1), and NCCL needs a GPU of its own for each process"
        ) in each.text
        for fix in ("d2ldev launch --processes 1", "gpu(LOCAL_RANK)", "num_gpus=0"):
            assert fix in each.text


@pytest.mark.parametrize(
    ("uuids", "library"),
    [
        pytest.param(["GPU-1", "GPU-2"], "NCCL", id="a GPU for each"),
        pytest.param([None, None], "NCCL", id="nobody knows which GPUs"),
        pytest.param(["GPU-1", "GPU-1"], "", id="the host's memory is in between"),
    ],
)
def test_training_works_where_it_is_possible(uuids, library):
    assert [each.value for each in train(uuids, library)] == [1, 1]


def test_an_unused_gpu_is_not_asked_for_its_uuid():
    def body(rank):
        framework = framework_of(d2ldev.get_backend("reference"))
        framework.parallel.gpu_library = None
        trainer = Trainer(1, 0, backend="reference")
        return len(trainer.fit(trainer.backend.mlp([3, 2]), BATCHES)["loss"])

    assert [each.value for each in together(body)] == [1, 1]


@pytest.mark.parametrize(("value", "outcomes"), [("1", [1, 1]), ("0", [None, None])])
def test_a_library_that_may_share_a_gpu_trains(value, outcomes):
    others = {rank: {"NCCL_MULTI_RANK_GPU_ENABLE": value} for rank in (0, 1)}
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
    assert [each.value for each in train(["GPU-1", "GPU-1"], others=others)] == outcomes


@pytest.mark.parametrize("gpu_of", [0, 1])
def test_all_processes_name_the_ranks_on_the_cpu_among_gpus(gpu_of):
    for each in train(["GPU-1", "GPU-2"], num_gpus=(1 - gpu_of, gpu_of)):
        assert each.error == "UnsupportedValueError"
        assert (
            f"rank {gpu_of} on {HOST} trains on gpu:{gpu_of} and rank {1 - gpu_of} on {HOST} on "
            "cpu, and NCCL sends between GPUs alone"
        ) in each.text
        assert "num_gpus=0" in each.text


def test_the_place_of_a_model_counts_where_no_devices_are_given():
    def body(rank):
        backend = d2ldev.get_backend("reference")
        framework_of(backend).parallel.gpu_library = lambda device: ("NCCL", "GPU-1")
        net = backend.place(backend.mlp([3, 2]), "gpu:0")
        backend.learner(net, group=backend.join_group())

    for each in together(body):
        assert "gpu:0 of rank 0" in each.text
        assert "gpu:0 of rank 1" in each.text


def test_a_step_of_several_processes_needs_to_know_its_shard():
    def body(rank):
        backend = d2ldev.get_backend("reference")
        learner = backend.learner(backend.mlp([2, 1]), group=backend.join_group())
        x, y = backend.ones((4, 2)), backend.zeros((4, 1))
        with pytest.raises(d2ldev.UnsupportedValueError, match="shard of the batch"):
            learner.step((x,), y)
        learner.portion = Portion(2, 4)
        losses = [float(learner.step((x,), y)[0]) for _ in range(2)]
        return losses[1] < losses[0]

    assert [each.value for each in together(body)] == [True, True]
