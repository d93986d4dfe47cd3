"""Optimizers of the user's own: placed, never replaced, and stepped as torch wants it."""

import pytest
import torch
from torch import nn


def data(device="cpu"):
    torch.manual_seed(1)
    return (torch.randn(8, 2).to(device),), torch.randn(8, 1).to(device)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta"])
def test_one_that_was_built_before_the_model_was_placed_trains_it(virtual, vgpu, name):
    def losses(device):
        model = net()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.03)
        learner = virtual.learner(virtual.place(model, device), optimizer=optimizer)
        assert learner.parts["optimizer"] is optimizer
        return [learner.step(*data(device))[0].item() for _ in range(3)]

    found = losses(vgpu)
    assert found == losses(torch.device("cpu"))
    assert found[-1] < found[0]


def test_one_that_has_stepped_already_is_placed_with_its_state(virtual, vgpu):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    learner = virtual.learner(model, optimizer=optimizer)
    learner.step(*data())
    model = virtual.place(model, vgpu)
    learner = virtual.learner(model, optimizer=optimizer)
    learner.step(*data(vgpu))
    averages = {state["exp_avg"].device for state in optimizer.state.values()}
    assert averages == {vgpu}


def test_its_learning_rate_is_its_own(torch_backend):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch_backend.learner(model, optimizer=optimizer, lr=0.01).step(*data())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_a_schedule_of_its_learning_rate_goes_on(torch_backend):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    learner = torch_backend.learner(model, optimizer=optimizer)
    learner.step(*data())
    schedule.step()
    before = model[0].weight.clone()
    learner.step(*data())
    assert torch.equal(model[0].weight, before)


def test_its_hooks_are_called(torch_backend):
    model, called = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: called.append("stepped"))
    torch_backend.learner(model, optimizer=optimizer).step(*data())
    assert called == ["stepped"]


def test_the_norm_is_that_of_what_it_trains(torch_backend):
    """The gradients of the rest are nobody's to zero, and would go on growing."""
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    learner = torch_backend.learner(model, optimizer=optimizer, gradient_clip_val=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    learner.step(*data())
    first = [p.detach().clone() for p in model.parameters()]
    moved = torch.cat([(b - a).flatten() for a, b in zip(before, first, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0)
    assert torch.equal(first[0], before[0])


@pytest.mark.parametrize("largest", [0, 0.1])
def test_lbfgs_steps_as_by_hand(virtual, vgpu, largest):
    model, (inputs, y) = net().to(vgpu), data(vgpu)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(*inputs), y)
        loss.backward()
        if largest:
            nn.utils.clip_grad_norm_(model.parameters(), largest)
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    model = net().to(vgpu)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    learner = virtual.learner(model, optimizer=optimizer, gradient_clip_val=largest)
    assert [learner.step(inputs, y)[0].item() for _ in range(3)] == losses
    assert losses[-1] != losses[0]
