"""Two trainers at once, in two threads: each learns what it learns alone.

They wait for each other before every batch, so that the steps of both take turns whatever the
machine does; nothing is asserted of how long it takes.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import d2ldev
from d2ldev import Trainer, gpu

NAMES = ("torch", "jax", "tensorflow", "mxnet", "reference")
EPOCHS = 3


class TakingTurns(d2ldev.ArrayLoader):
    """Batches that wait for their turn."""

    def __init__(self, *arrays, take_turns, **options):
        super().__init__(*arrays, **options)
        self.take_turns = take_turns

    def __iter__(self):
        for batch in super().__iter__():
            self.take_turns()
            yield batch


def trainer_on(backend, number):
    """Return a trainer on any one of the GPUs, where it would take the first."""
    trainer = Trainer(EPOCHS, 1, gradient_clip_val=0.5, backend=backend)
    trainer.device = gpu(number)
    trainer.gpus = [trainer.device]
    return trainer


def train(name, number, take_turns=lambda: None):
    """Return the history, the parameters and their devices; each number has its own model."""
    backend = d2ldev.get_backend(name)
    draw = np.random.default_rng(number)
    inputs = draw.standard_normal((22, 4)).astype("float32")
    labels = (inputs.sum(1) > 0).astype("int32")
    data = TakingTurns(
        inputs, labels, take_turns=take_turns, batch_size=6, shuffle=True, seed=number
    )
    trainer = trainer_on(backend, number)
    history = trainer.fit(
        backend.mlp([4, 6 + 2 * number, 2], seed=number),
        data,
        data,
        loss="cross_entropy",
        optimizer="adam",
        lr=0.05,
        metrics=["accuracy"],
    )
    values = {
        key: backend.to_numpy(x).tolist() for key, x in backend.named_tensors(trainer.model).items()
    }
    return history, values, set(backend.placement(trainer.model).values())


def at_once(*runs):
    """Return what ``trained`` returns for each, with all of them in threads of their own."""
    barrier = threading.Barrier(len(runs), timeout=60)

    def one(run):
        try:
            return train(*run, barrier.wait)
        except BaseException:
            barrier.abort()  # the others would wait for it
            raise

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(one, runs))


@pytest.fixture(scope="module")
def alone():
    """What each learns while nothing else is trained."""
    return {(name, number): train(name, number) for name in NAMES for number in (0, 1)}


@pytest.fixture(autouse=True)
def _all_have_trained(alone):
    """The first training leaves its own traces, which are no test's leaks."""


@pytest.mark.parametrize("name", NAMES)
def test_two_models_of_one_framework_on_two_gpus(alone, name):
    found = at_once((name, 0), (name, 1))
    assert found == [alone[name, 0], alone[name, 1]]
    assert [places for *_, places in found] == [{gpu(0)}, {gpu(1)}]


@pytest.mark.parametrize("name", NAMES)
def test_two_models_of_one_framework_on_one_gpu(alone, name):
    assert at_once((name, 1), (name, 1)) == [alone[name, 1]] * 2


@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)), ids="-".join)
def test_two_frameworks(alone, pair):
    runs = (pair[0], 0), (pair[1], 1)
    assert at_once(*runs) == [alone[run] for run in runs]


def test_all_frameworks(alone):
    runs = [(name, number % 2) for number, name in enumerate(NAMES)]
    assert at_once(*runs) == [alone[run] for run in runs]


def test_what_two_gpus_learn_is_not_the_same(alone):
    for name in NAMES:
        assert alone[name, 0][0] != alone[name, 1][0]
