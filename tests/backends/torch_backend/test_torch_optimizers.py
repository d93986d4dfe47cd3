"""``place`` of optimizers: the state follows, and training goes on as if nothing had moved."""

import copy

import pytest
import torch
from torch import nn, optim

from d2ldev import cpu, gpu

OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nesterov": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.1),
    "adam-tensor-lr": lambda parameters: optim.Adam(
        parameters, lr=torch.tensor(0.1), foreach=False
    ),
    "adamw-amsgrad": lambda parameters: optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda parameters: optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: optim.ASGD(parameters, lr=0.1),
    "adam-fused": lambda parameters: optim.Adam(parameters, lr=0.1, fused=True),
    "rprop": lambda parameters: optim.Rprop(parameters, lr=0.1),
    "lbfgs": lambda parameters: optim.LBFGS(parameters, lr=0.1, history_size=3),
}


def regression():
    """A model, and data that it can learn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, generator=generator)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net, x, x.sum(1, keepdim=True)


def train(net, optimizer, x, y, steps):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        return loss

    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


def twins(name):
    """Two equal models with their optimizers, and the data."""
    net, x, y = regression()
    twin = copy.deepcopy(net)
    make = OPTIMIZERS[name]
    return net, make(net.parameters()), twin, make(twin.parameters()), x, y


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_exactly_the_losses_of_an_unmoved_twin(ledger, name):
    net, optimizer, twin, twins_optimizer, x, y = twins(name)
    train(net, optimizer, x, y, 3)
    ledger.place((net, optimizer), gpu(1))
    losses = train(net, optimizer, x, y, 3)
    assert losses == train(twin, twins_optimizer, x, y, 6)[3:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_there_and_back(ledger, name):
    net, optimizer, twin, twins_optimizer, x, y = twins(name)
    train(net, optimizer, x, y, 2)
    ledger.place([optimizer, net], gpu())
    train(net, optimizer, x, y, 2)
    ledger.place([optimizer, net], cpu())
    losses = train(net, optimizer, x, y, 2)
    assert losses == train(twin, twins_optimizer, x, y, 6)[4:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_made_before_the_move_trains_the_model(ledger, name):
    net, optimizer, twin, twins_optimizer, x, y = twins(name)
    ledger.place((net, optimizer), gpu())
    assert train(net, optimizer, x, y, 3) == train(twin, twins_optimizer, x, y, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_where_the_parameters_are(ledger, name):
    net, optimizer, _, _, x, y = twins(name)
    train(net, optimizer, x, y, 2)
    ledger.place((net, optimizer), gpu(1))
    state = {
        key: ledger.device_of(value)
        for values in optimizer.state.values()
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and key != "step"
    }
    assert set(state.values()) <= {gpu(1)}


def test_adagrad_s_state_made_with_the_optimizer_moves(ledger):
    net, *_ = regression()
    optimizer = ledger.place(optim.Adagrad(net.parameters()), gpu())
    assert ledger.device_of(optimizer.state[net[0].weight]["sum"]) is gpu()


def test_lists_in_the_state_move(ledger):
    net, optimizer, _, _, x, y = twins("lbfgs")
    train(net, optimizer, x, y, 1)
    ledger.place(optimizer, gpu())
    directions = optimizer.state[net[0].weight]["old_dirs"]
    assert {ledger.device_of(direction) for direction in directions} == {gpu()}


def test_the_step_stays_on_the_host(ledger):
    net, optimizer, _, _, x, y = twins("adam")
    train(net, optimizer, x, y, 1)
    ledger.place(optimizer, gpu())
    assert ledger.device_of(optimizer.state[net[0].weight]["step"]) is cpu()


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_a_step_that_the_kernel_reads_moves(ledger, flag):
    net, optimizer, _, _, x, y = twins("adam")
    train(net, optimizer, x, y, 1)
    optimizer.param_groups[0][flag] = True
    ledger.place(optimizer, gpu())
    assert ledger.device_of(optimizer.state[net[0].weight]["step"]) is gpu()


def test_a_learning_rate_on_the_host_stays_there(ledger):
    _, optimizer, *_ = twins("adam-tensor-lr")
    lr = optimizer.param_groups[0]["lr"]
    ledger.place(optimizer, gpu())
    assert optimizer.param_groups[0]["lr"] is lr
    assert ledger.device_of(lr) is cpu()


def test_an_optimizer_alone_takes_its_parameters_with_it(ledger):
    net, *_ = regression()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    assert ledger.place(optimizer, gpu()) is optimizer
    assert ledger.device_of(net[0].weight) is gpu()


def test_an_optimizer_keeps_its_parameters(ledger):
    net, *_ = regression()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    ledger.place(net, gpu())
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, net.parameters(), strict=True))


def test_the_state_stays_under_its_parameter(ledger):
    net, optimizer, _, _, x, y = twins("sgd")
    train(net, optimizer, x, y, 1)
    ledger.place((net, optimizer), gpu())
    assert list(map(id, optimizer.state)) == list(map(id, net.parameters()))


def test_a_dictionary_of_model_and_optimizer_comes_back_itself(ledger):
    net, optimizer, _, _, x, y = twins("adam")
    train(net, optimizer, x, y, 1)
    training = {"net": net, "optimizer": optimizer, "epoch": 3}
    assert ledger.place(training, gpu()) is training
    assert ledger.device_of(optimizer.state[net[0].weight]["exp_avg"]) is gpu()


def test_parameter_groups_keep_their_settings(ledger):
    net, *_ = regression()
    optimizer = optim.SGD(
        [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}], lr=0.1
    )
    ledger.place((net, optimizer), gpu())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def test_a_schedule_goes_on(ledger):
    net, *_ = regression()
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ledger.place((net, optimizer), gpu())
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_dict_of_a_moved_optimizer_has_the_same_values(ledger):
    net, optimizer, _, _, x, y = twins("adam")
    train(net, optimizer, x, y, 1)
    before = copy.deepcopy(optimizer.state_dict())
    ledger.place(optimizer, gpu())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][1]["exp_avg_sq"], before["state"][1]["exp_avg_sq"])


def test_asking_for_the_placement_of_an_optimizer_adds_no_state(torch_backend):
    net, *_ = regression()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch_backend.placement(optimizer)
    assert len(optimizer.state) == 0


def test_on_a_device_of_torch_itself_the_state_moves(meta):
    net, *_ = regression()
    optimizer = optim.Adagrad(net.parameters())
    meta.place((net, optimizer), "gpu")
    assert optimizer.state[net[0].weight]["sum"].is_meta
    assert optimizer.param_groups[0]["params"][0] is net[0].weight


def test_what_a_group_keeps_moves_but_for_numbers_on_the_host(ledger):
    net, *_ = regression()
    optimizer = optim.Adam(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    optimizer.param_groups[0]["weights"] = torch.ones(2)
    placement = ledger.placement(ledger.place(optimizer, gpu()))
    assert placement["param_groups.0.weights"] is gpu()
    assert "param_groups.0.lr" not in placement
    assert ledger.device_of(optimizer.param_groups[0]["lr"]) is cpu()


def test_a_step_that_is_no_number_on_the_host_moves(ledger):
    net, optimizer, _, _, x, y = twins("adam")
    train(net, optimizer, x, y, 1)
    state = optimizer.state[net[0].weight]
    state["step"] = torch.ones(1)
    ledger.place(optimizer, gpu())
    assert ledger.device_of(state["step"]) is gpu()
