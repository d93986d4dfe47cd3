"""A learning rate on torch's schedule goes on where it was when a run is resumed.

A schedule of torch is no part of the optimizer: the user's callback steps it, and its count is the
user's. The rate that it has set, and the one that it began with, are in the optimizer's groups, and
so in the checkpoint, which is kept after the callback.
"""

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import d2ldev
from d2ldev.training.trainer import Trainer

EPOCHS, BROKEN_OFF_AFTER = 4, 2


class Run:
    """A run of ``fit`` whose callback steps a schedule.

    Args:
        backend: with virtual GPUs.
        num_gpus: the trainer's.
        seed: of the model and of the order of the batches.
    """

    def __init__(self, backend, num_gpus, seed=0):
        self.net = backend.mlp([2, 4, 1], seed=seed)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.backend, self.num_gpus, self.seed = backend, num_gpus, seed

    def counting_on(self, done):
        """The optimizer as torch wants it for a schedule that is made for ``last_epoch``."""
        for group in self.optimizer.param_groups:
            group["initial_lr"] = 0.1
        return {"optimizer": self.optimizer, "last_epoch": done - 1}

    def fit(self, epochs, schedule, **options):
        """The history, the parameters, and the learning rate at the end."""
        inputs = np.linspace(-1, 1, 28, dtype="float32").reshape(14, 2)
        data = d2ldev.ArrayLoader(
            inputs, inputs[:, :1] ** 2, batch_size=4, shuffle=True, seed=self.seed
        )
        trainer = Trainer(
            epochs, self.num_gpus, backend=self.backend, callback=lambda *_: schedule.step()
        )
        history = trainer.fit(self.net, data, optimizer=self.optimizer, **options)
        values = self.backend.named_tensors(self.net)
        found = {name: self.backend.to_numpy(x).tolist() for name, x in values.items()}
        return history, found, self.optimizer.param_groups[0]["lr"]


@pytest.fixture(params=[0, 1])
def run(virtual, request):
    """Makes a run on the CPU, and on a virtual GPU."""
    return lambda seed=0: Run(virtual, request.param, seed)


def broken_off(run, make, path):
    """Leave the checkpoint of a run that ended early."""
    first = run()
    first.fit(BROKEN_OFF_AFTER, make(optimizer=first.optimizer), checkpoint=path)


def unbroken(run, make):
    whole = run()
    return whole.fit(EPOCHS, make(optimizer=whole.optimizer))


SCHEDULES = {
    "every epoch": lambda **options: StepLR(step_size=1, gamma=0.5, **options),
    "every second epoch": lambda **options: StepLR(step_size=2, gamma=0.5, **options),
    "every third epoch": lambda **options: StepLR(step_size=3, gamma=0.5, **options),
    "cosine": lambda **options: CosineAnnealingLR(T_max=5, **options),
    "lambda": lambda **options: LambdaLR(lr_lambda=lambda epoch: 1 / (1 + epoch), **options),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_that_is_made_for_the_epochs_that_are_done_goes_on(run, path, schedule):
    """``last_epoch`` is one less than their number: making a schedule is a step of it.

    What it then makes of the learning rate, of an optimizer that has not its state yet, does not
    matter: that of the checkpoint takes its place.
    """
    make = SCHEDULES[schedule]
    broken_off(run, make, path)
    second = run(9)
    resumed = make(**second.counting_on(BROKEN_OFF_AFTER))
    found = second.fit(EPOCHS, resumed, checkpoint=path, resume=True)
    assert found == unbroken(run, make)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_whose_own_state_the_user_has_kept_goes_on(run, path, schedule):
    make = SCHEDULES[schedule]
    first, second = run(), run(9)
    stepped = make(optimizer=first.optimizer)
    first.fit(BROKEN_OFF_AFTER, stepped, checkpoint=path)
    resumed = make(optimizer=second.optimizer)
    resumed.load_state_dict(stepped.state_dict())
    found = second.fit(EPOCHS, resumed, checkpoint=path, resume=True)
    assert found == unbroken(run, make)


def test_one_that_only_multiplies_the_rate_needs_no_count(run, path):
    """``StepLR`` in every epoch reads the rate from the optimizer's groups, which is restored."""
    make = SCHEDULES["every epoch"]
    broken_off(run, make, path)
    second = run(9)
    resumed = make(optimizer=second.optimizer)
    found = second.fit(EPOCHS, resumed, checkpoint=path, resume=True)
    assert found == unbroken(run, make)


def test_one_that_is_made_anew_begins_to_count_anew(run, path):
    """The checkpoint has the rate, and not the count: so it is with every third epoch."""
    make = SCHEDULES["every third epoch"]
    broken_off(run, make, path)
    second = run(9)
    resumed = make(optimizer=second.optimizer)
    *_, rate = second.fit(EPOCHS, resumed, checkpoint=path, resume=True)
    assert (rate, unbroken(run, make)[-1]) == (0.1, 0.05)
