"""What objects of a training say of themselves: one line, for which no device is waited."""

import numpy as np
import pytest

from d2ldev import (
    ArrayLoader,
    CSVLogger,
    DeviceLog,
    EarlyStopping,
    Schedule,
    Timer,
    Trainer,
)
from d2ldev.framework.testing import framework_of


class Scheduler:
    def step(self):
        pass


def log_values(reference):
    log = DeviceLog(reference, max_pending=8)
    log.add(loss=reference.full((), 1.0, device="gpu:0"), accuracy=0.5)
    return log


def timed(reference):
    timer = Timer(reference)
    timer.times = [0.25, 0.5]
    return timer


LINES = {
    "a trainer": (
        lambda b: Trainer(3, num_gpus=1, backend=b),
        "<Trainer(max_epochs=3, on gpu:0) of the reference backend>",
    ),
    "options": (
        lambda b: Trainer(3, 2, 0.5, backend=b, accumulate_grad_batches=4),
        "<Trainer(max_epochs=3, on gpu:0, gpu:1, gradient_clip_val=0.5, "
        "accumulate_grad_batches=4) of the "
        "reference backend>",
    ),
    "a loader": (
        lambda _: ArrayLoader(np.ones((5, 2)), np.ones(5), batch_size=2, shuffle=True),
        "ArrayLoader(2 arrays of 5 examples, batch_size=2, shuffle=True, seed=0)",
    ),
    "a loader of full batches": (
        lambda _: ArrayLoader(np.ones(5), batch_size=2, shuffle=True, seed=7, drop_last=True),
        "ArrayLoader(1 array of 5 examples, batch_size=2, shuffle=True, seed=7, drop_last=True)",
    ),
    "a shard": (
        lambda _: ArrayLoader(np.ones(5), batch_size=2).shard(1, 2),
        "ArrayLoader(1 array of 5 examples, batch_size=2, shuffle=False, shard 1 of 2)",
    ),
    "a log": (log_values, "<DeviceLog of loss, accuracy on gpu:0: 2 of 8 scalars wait>"),
    "an empty log": (
        lambda b: DeviceLog(b),
        "<DeviceLog of nothing yet: 0 of 1024 scalars wait>",
    ),
    "a timer": (timed, "<Timer of the reference backend: 2 times, 0.75 s in all>"),
    "a learner": (
        lambda b: b.learner(b.mlp([1, 1]), optimizer="adam", lr=0.5, gradient_clip_val=1),
        "ReferenceLearner(loss='mse', optimizer='adam', lr=0.5, gradient_clip_val=1.0)",
    ),
    "a learner by functions": (
        lambda b: b.learner(b.mlp([1, 1]), loss="mse", is_trained=False),
        "ReferenceLearner(loss='mse', optimizer=None, lr=0.01)",
    ),
    "EarlyStopping": (
        lambda _: EarlyStopping("loss", 2, 0.1, "max"),
        "EarlyStopping(monitor='loss', patience=2, min_delta=0.1, mode='max')",
    ),
    "a schedule": (
        lambda _: Schedule(Scheduler(), metric="loss"),
        "Schedule(Scheduler, per='epoch', metric='loss')",
    ),
    "a logger": (lambda _: CSVLogger("run.csv"), "CSVLogger('run.csv')"),
}


@pytest.mark.parametrize("name", LINES)
def test_repr_is_one_line_and_computes_nothing(reference, monkeypatch, name):
    make, line = LINES[name]
    made = make(reference)
    monkeypatch.setattr(framework_of(reference).tensors, "to_numpy", None)
    monkeypatch.setattr(framework_of(reference).devices, "synchronize", None)
    assert repr(made) == line


def test_a_trainer_that_has_nothing_yet_says_so(reference):
    class Own(Trainer):
        def __init__(self):
            self.said = repr(self)

    Own.backend = reference
    assert Own().said == "<Own(max_epochs=None, on cpu) of the reference backend>"
