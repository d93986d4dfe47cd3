"""Processes that stop together, whichever of them wants it, and hand back one model."""

import numpy as np
import pytest
from launched import together

import d2ldev
from d2ldev import PeerLostError, Trainer

SIZE = 3
STEPS = 200
"""In an epoch, more than any test waits for."""


class AtStep:
    """A callback that acts after a step, in one process or in all."""

    trainer = None

    def __init__(self, rank, wanting, step, act):
        self.is_asked = wanting in (rank, "all")
        self.step, self.act, self.steps = step, act, 0

    def on_step_end(self, step, loss):
        self.steps += 1
        if self.is_asked and step == self.step:
            self.act(self.trainer)


class AfterEpoch(AtStep):
    def on_step_end(self, step, loss):
        self.steps += 1

    def on_epoch_end(self, epoch, history):
        if self.is_asked and epoch == self.step:
            self.act(self.trainer)


class OwnError(Exception):
    pass


def stop(trainer):
    trainer.should_stop = True


def fail(trainer):
    raise OwnError


def train(callback, length=STEPS, path=None):
    """Train; return the steps, the parameters and the history, and what was raised."""
    backend = d2ldev.get_backend("reference")
    batch = (np.ones((6, 2), "float32"), np.ones((6, 1), "float32"))
    trainer = Trainer(3, backend=backend, callbacks=callback)
    raised = ""
    try:
        trainer.fit(backend.mlp([2, 1], seed=0), [batch] * length, lr=1e-3, checkpoint=path)
    except (OwnError, PeerLostError) as error:
        raised = type(error).__name__
    values = [backend.to_numpy(x).tolist() for x in backend.named_tensors(trainer.model).values()]
    return callback.steps, values, trainer.history, raised


def end_processes(body, size=SIZE):
    found = together(body, size)
    assert [each.text for each in found] == [""] * size
    return [each.value for each in found]


@pytest.mark.parametrize("kind", [AtStep, AfterEpoch])
def test_all_processes_know_that_one_has_stopped_them(kind):
    def body(rank):
        callback = kind(rank, 1, 1, stop)
        train(callback, 4)
        return callback.trainer.should_stop

    assert end_processes(body) == [True] * SIZE


@pytest.mark.parametrize("wanting", [0, 2, "all"])
def test_all_processes_stop_after_the_same_epoch(wanting):
    found = end_processes(lambda rank: train(AfterEpoch(rank, wanting, 1, stop), 4))
    assert found[1:] == found[:-1]
    steps, _, history, _ = found[0]
    assert (steps, len(history["loss"])) == (8, 2)


def test_a_stop_in_the_last_step_ends_the_epoch():
    found = end_processes(lambda rank: train(AtStep(rank, 1, 3, stop), 4))
    assert found[1:] == found[:-1]
    assert 1 <= len(found[0][2]["loss"]) <= 2


@pytest.mark.parametrize("wanting", [0, 2, "all"])
@pytest.mark.parametrize("kind", [AtStep, AfterEpoch])
def test_an_error_in_a_callback_leaves_one_model_in_all_processes(kind, wanting, tmp_path):
    path = tmp_path / "run"
    found = end_processes(lambda rank: train(kind(rank, wanting, 1, fail), 4, path))
    raised = [each[3] for each in found]
    expected = ["OwnError" if wanting in (rank, "all") else "PeerLostError" for rank in range(SIZE)]
    assert raised == expected
    assert all(each[1:3] == found[0][1:3] for each in found)
    lengths = {AtStep: 0, AfterEpoch: 2}
    assert len(found[0][2]["loss"]) == lengths[kind]
    # The file is that of the epoch before.
    saved = d2ldev.get_backend("reference").load(path)["run"]["epoch"]
    assert saved == {AtStep: 0, AfterEpoch: 1}[kind]


def test_a_group_stops_again_in_the_next_run():
    def body(rank):
        return [train(AtStep(rank, wanting, 2, stop))[0] for wanting in (1, 0, "all", 2)]

    found = end_processes(body)
    assert found[1:] == found[:-1]
    assert found[0][2] == 3
    assert all(3 <= steps <= 5 for steps in found[0])
