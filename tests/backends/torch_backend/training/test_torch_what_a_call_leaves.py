"""What torch's modules keep in attributes: on several GPUs, in copies, in runs that end badly."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from d2ldev_torch.provision import Attentive

import d2ldev
from d2ldev import Trainer
from d2ldev.framework.testing import framework_of
from d2ldev.training import trainer as trainer_module
from d2ldev.training.loggers import RunLogger

X = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
DATA = [(X, X.sum(1, keepdims=True))]


class Refusing:
    """A callback that refuses the state that comes back from another process."""

    def on_step_end(self, step, loss):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise RuntimeError("no such state")


def attentive(backend):
    return Attentive(backend.mlp([2, 4, 1]))


@pytest.mark.usefixtures("copied_processes")
def test_what_two_gpus_learned_comes_back_before_a_callback_can_refuse_its_state(virtual):
    net = attentive(virtual)
    before = net.net[0].weight.detach().clone()
    trainer = Trainer(1, num_gpus=2, backend=virtual, callbacks=Refusing())
    with pytest.raises(RuntimeError, match="no such state"):
        trainer.fit(net, DATA, lr=0.1)
    assert not torch.equal(net.net[0].weight.detach().cpu(), before)


@pytest.mark.usefixtures("copied_processes")
def test_what_two_gpus_learned_comes_back_if_the_optimizer_takes_no_state(virtual, monkeypatch):
    def refuse(optimizer, state):
        raise ValueError("no such state")

    # In this process alone: the others are no copies of it.
    monkeypatch.setattr(framework_of(virtual).files, "prepare_state", refuse)
    net = attentive(virtual)
    before = net.net[0].weight.detach().clone()
    with pytest.raises(d2ldev.CheckpointError, match="no such state"):
        Trainer(1, num_gpus=2, backend=virtual).fit(net, DATA, lr=0.1)
    assert not torch.equal(net.net[0].weight.detach().cpu(), before)


@pytest.mark.usefixtures("copied_processes")
def test_the_bars_of_two_gpus_are_not_shown_again_by_the_process_that_started_theirs(
    virtual, monkeypatch
):
    is_shown, show = [], trainer_module.show_progress

    def record(is_wanted, epochs, done):
        is_shown.append(is_wanted)
        return show(is_wanted, epochs, done)

    # In this process alone: the others are no copies of it.
    monkeypatch.setattr(trainer_module, "show_progress", record)
    for number in (2, 1):
        Trainer(1, backend=virtual, num_gpus=number, enable_progress_bar=True).fit(
            attentive(virtual), DATA, lr=0.1
        )
    assert is_shown == [False, True]


class Recording:
    """A view or a service that records its calls."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def __getattr__(self, name):
        def record(*operands, **options):
            self.calls.append((name, *operands))
            if self.error is not None:
                raise self.error

        return record


@pytest.mark.usefixtures("copied_processes")
def test_the_progress_of_two_gpus_is_shown_by_the_process_that_started_theirs(virtual, monkeypatch):
    view = Recording()
    monkeypatch.setattr(trainer_module, "open_view", lambda *_: nullcontext(view))
    trainer = Trainer(2, backend=virtual, num_gpus=2, enable_progress_bar=True)
    trainer.fit(attentive(virtual), DATA, lr=0.1)
    names = [name for name, *_ in view.calls]
    assert (names[0], names.count("begin_epoch"), names[-1]) == ("begin", 2, "show_epoch")
    assert [done for name, done, *_ in view.calls if name == "show_epoch"] == [1, 2]
    # The last batch of each epoch is always shown.
    shown = [
        done for name, done in view.calls[: names.index("show_epoch")] if name == "show_batches"
    ]
    assert shown[-1] == len(DATA)


class Service(RunLogger):
    """A logger of a service that records in the process of the user."""

    def __init__(self, record):
        self.record = record

    def __getstate__(self):
        return {**super().__getstate__(), "record": None}

    def log_epochs(self, first, rows):
        """Record the names of the numbers of each epoch."""
        self.record.log(first, [list(row) for row in rows])


@pytest.mark.usefixtures("copied_processes")
def test_a_service_gets_the_epochs_of_two_gpus_from_the_process_with_the_run(virtual):
    record = Recording()
    trainer = Trainer(2, backend=virtual, num_gpus=2, callbacks=Service(record))
    trainer.fit(attentive(virtual), DATA, lr=0.1)
    assert record.calls == [("log", i, [["loss", "lr"]]) for i in range(2)]


@pytest.mark.usefixtures("copied_processes")
def test_an_error_of_a_service_ends_the_run_with_what_the_model_has_learned(virtual):
    record = Recording(ConnectionError("the service is gone"))
    trainer = Trainer(100, backend=virtual, num_gpus=2, callbacks=Service(record))
    net = attentive(virtual)
    before = net.net[0].weight.detach().clone()
    with pytest.raises(ConnectionError, match="the service is gone"):
        trainer.fit(net, DATA * 20, lr=0.1)
    assert len(record.calls) < 100
    assert not torch.equal(net.net[0].weight.detach().cpu(), before)


class Smoothed(torch.nn.Module):
    """A module whose buffer is None until its first call, and has an effect on each."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.register_buffer("mean", None)

    def forward(self, x):
        y = self.net(x)
        mean = y.detach().mean(0)
        self.mean = mean if self.mean is None else (self.mean + mean) / 2
        return y - self.mean


def smooth(backend):
    return Smoothed(backend.mlp([2, 4, 1]))


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_run_goes_on_with_a_buffer_that_is_none_at_first(virtual, tmp_path, num_gpus):
    path = tmp_path / "run.safetensors"

    def fit_model(epochs, **options):
        net = smooth(virtual)
        trainer = Trainer(epochs, num_gpus=num_gpus, backend=virtual)
        history = trainer.fit(net, DATA, lr=0.1, **options)
        return history["loss"], net.mean.cpu()

    losses, mean = fit_model(3)
    fit_model(1, checkpoint=path)
    resumed, resumed_mean = fit_model(3, checkpoint=path, resume=True)
    assert resumed == losses
    assert torch.equal(resumed_mean, mean)


def test_copies_have_what_the_last_call_has_left(virtual):
    net = attentive(virtual)
    net(torch.ones(3, 2))
    devices = ["gpu:0", "gpu:1"]
    for device, copy in zip(devices, virtual.replicate(net, devices), strict=True):
        assert set(map(str, virtual.placement(copy).values())) == {device}
        np.testing.assert_array_equal(
            virtual.to_numpy(copy.attention_weights), virtual.to_numpy(net.attention_weights)
        )
        assert copy.all_weights[0] is copy.attention_weights


def test_a_parameter_in_a_plain_list_is_still_needed(virtual, tmp_path):
    def build(size):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        net.hidden = [torch.nn.Linear(2, size)]
        return net

    class Holder(torch.nn.Module):
        def __init__(self, names):
            super().__init__()
            self.weights = {name: torch.ones(2, requires_grad=True) for name in names}

    virtual.save(Holder(["a"]), tmp_path / "holder")
    with pytest.raises(d2ldev.CheckpointError, match=r"it lacks weights\.b"):
        virtual.load_into(Holder(["a", "b"]), tmp_path / "holder")
    virtual.save(build(2), tmp_path / "net")
    with pytest.raises(d2ldev.CheckpointError, match=r"hidden\.0\.weight"):
        virtual.load_into(build(3), tmp_path / "net")
