"""``place`` as a whole: optimizers, ties, odd modules, torch's modes, and interruptions."""

import copy

import pytest
import torch
from torch import nn, optim

from d2ldev import UnsupportedValueError, cpu, gpu

# -- optimizers ------------------------------------------------------------------------------------


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
    """Return a model, and data that it can learn."""
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
    """Return two equal models with their optimizers, and the data."""
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


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_a_learning_rate_that_the_kernel_reads_moves(ledger, flag):
    _, optimizer, *_ = twins("adam-tensor-lr")
    optimizer.param_groups[0][flag] = True
    ledger.place(optimizer, gpu())
    assert ledger.device_of(optimizer.param_groups[0]["lr"]) is gpu()


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


def test_tensors_of_a_group_move_except_numbers_on_the_host(ledger):
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


# -- modes and interruptions -----------------------------------------------------------------------


def build_model():
    """Return a model with buffers, gradients, a plain tensor and an optimizer with state."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net.table = [torch.ones(2, requires_grad=True)]
    optimizer = optim.Adam(net.parameters())
    net(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return net, optimizer


def everything(net, optimizer):
    """Return for each tensor what must not change: its id, memory, version and values."""
    tensors = [*net.parameters(), *net.buffers(), *net.table]
    tensors += [parameter.grad for parameter in net.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [(id(x), x.data_ptr(), x._version, x.tolist()) for x in tensors]


def test_an_interruption_leaves_everything_where_it_was(ledger, copies):
    def interrupt(number):
        if number == 5:
            raise KeyboardInterrupt

    net, optimizer = build_model()
    before = everything(net, optimizer)
    copies.before_copy = interrupt
    with pytest.raises(KeyboardInterrupt):
        ledger.place((net, optimizer), gpu())
    assert everything(net, optimizer) == before


def test_an_attribute_that_cannot_be_rebuilt_leaves_everything_in_place(ledger):
    class Table(dict):
        def __copy__(self):
            raise RuntimeError("one of a kind")

    net, optimizer = build_model()
    net.kept = Table(x=torch.ones(1, requires_grad=True), y=torch.ones(1))
    before = everything(net, optimizer)
    with pytest.raises(TypeError, match="one of a kind"):
        ledger.place((net, optimizer), gpu())
    assert everything(net, optimizer) == before


def test_a_list_without_tensors_stays_the_same_object(ledger):
    net = nn.Linear(1, 1)
    net.names = names = ["a", "b"]
    ledger.place(net, gpu())
    assert net.names is names


def test_the_gradient_mode_is_left_as_it_was(ledger):
    with torch.no_grad():
        ledger.place(nn.Linear(1, 1), gpu())
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_a_model_placed_without_gradients_trains_afterwards(ledger):
    net = nn.Linear(1, 1)
    with torch.no_grad():
        ledger.place(net, gpu())
    net(torch.ones(1, 1)).sum().backward()
    assert net.bias.grad.tolist() == [1]


def test_a_model_placed_in_inference_mode_trains_afterwards(ledger):
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.rand(4, 1)).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        ledger.place((net, optimizer), gpu())
    before = net[1].num_batches_tracked.item()
    net(torch.rand(4, 1)).sum().backward()
    optimizer.step()
    assert net[1].num_batches_tracked.item() == before + 1


def test_a_model_made_in_inference_mode_moves(ledger):
    with torch.inference_mode():
        net = nn.Linear(2, 1)
        before = net.weight.tolist()
    ledger.place(net, gpu())
    assert net.weight.tolist() == before
    assert ledger.device_of(net.weight) is gpu()


# -- ties and cycles -------------------------------------------------------------------------------


def test_a_tied_buffer_stays_tied(ledger):
    net = nn.Sequential(nn.Module(), nn.Module())
    table = torch.ones(2)
    net[0].register_buffer("table", table)
    net[1].register_buffer("table", table)
    ledger.place(net, gpu())
    assert net[1].table is net[0].table
    assert ledger.device_of(net[0].table) is gpu()


def test_a_buffer_that_is_a_plain_attribute_as_well_stays_tied(ledger):
    net = nn.Module()
    net.register_buffer("table", torch.ones(2))
    net.also = [net.table]
    ledger.place(net, gpu())
    assert net.also[0] is net.table


def test_a_shared_submodule_is_moved_once(ledger, copies):
    shared = nn.Linear(2, 2)
    ledger.place(nn.Sequential(shared, nn.ReLU(), shared), gpu())
    assert len(copies.copied) == 2


def test_a_tensor_beside_a_model_stays_tied_to_it(ledger):
    net = nn.Module()
    net.table = torch.ones(2)
    placed = ledger.place({"net": net, "table": net.table}, gpu())
    assert placed["table"] is net.table


def test_a_cycle_of_modules_by_a_plain_attribute_is_followed_once(ledger):
    net = nn.Module()
    net.child = nn.Linear(1, 1)
    net.child.__dict__["parent"] = net
    ledger.place(net, gpu())
    assert ledger.device_of(net.child.weight) is gpu()


def test_a_module_that_is_its_own_submodule_is_followed_once(ledger):
    net = nn.Linear(1, 1)
    net._modules["itself"] = net
    ledger.place(net, gpu())
    assert ledger.device_of(net.weight) is gpu()


def test_a_cycle_through_a_list_is_followed_once(ledger):
    net = nn.Linear(1, 1)
    net.neighbours = [net]
    ledger.place(net, gpu())
    assert ledger.device_of(net.weight) is gpu()
    assert net.neighbours[0] is net


def test_a_list_that_two_modules_share_stays_shared(ledger):
    nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
    nets[0].masks = nets[1].masks = [torch.ones(2)]
    placed = ledger.place({"nets": nets, "masks": nets[0].masks}, gpu())
    assert nets[0].masks is nets[1].masks
    assert placed["masks"] is nets[0].masks
    assert ledger.device_of(nets[0].masks[0]) is gpu()


# -- modules that misbehave ------------------------------------------------------------------------


class Half(torch.nn.Module):
    """A module that does not call its parent's ``__init__``."""

    def __init__(self):
        pass


class Locked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.mask = torch.ones(2)
        self.__dict__["locked"] = True

    def __setattr__(self, name, value):
        if "locked" in self.__dict__:
            raise RuntimeError("nothing is set here")
        super().__setattr__(name, value)


class Unwalkable(dict):
    def values(self):
        raise RuntimeError("no values today")


def test_a_module_that_is_not_made_whole_is_refused_by_name(ledger):
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedValueError, match="the Half at odd cannot be looked through"):
        ledger.place({"layer": layer, "odd": Half()}, "gpu:0")
    assert set(map(str, ledger.placement(layer).values())) == {"cpu"}


def test_a_module_that_lets_nothing_be_set_is_placed(ledger):
    placement = ledger.placement(ledger.place(Locked(), "gpu:0"))
    assert {name: str(place) for name, place in placement.items()} == {
        "layer.weight": "gpu:0",
        "layer.bias": "gpu:0",
        "mask": "gpu:0",
    }


def test_a_module_with_a_container_that_cannot_be_walked_is_refused_by_name(ledger):
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].kept = Unwalkable(a=1)
    with pytest.raises(UnsupportedValueError, match=r"the Unwalkable at 0\.kept cannot be taken"):
        ledger.place(module, "gpu:0")


def test_a_cycle_in_a_module_is_told_by_the_attribute_that_holds_it(ledger):
    module = torch.nn.Linear(1, 1)
    module.kept = [torch.ones(1)]
    module.kept.append(module.kept)
    with pytest.raises(UnsupportedValueError, match=r"the list at kept\.1 contains itself"):
        ledger.place(module, "gpu:0")
    assert set(map(str, ledger.placement(module).values())) == {"cpu"}


def test_modules_nested_deeper_than_python_follows_are_refused(ledger):
    module = torch.nn.Linear(1, 1)
    for _ in range(2000):
        module = torch.nn.Sequential(module)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        ledger.place(module, "gpu:0")
