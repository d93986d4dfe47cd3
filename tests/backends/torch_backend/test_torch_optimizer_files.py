"""What torch's optimizers have learned, in files: training goes on to the same last bit."""

from functools import partial

import pytest
import torch

from d2ldev import CheckpointError

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "AMSGrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "Adam with a tensor as its rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def make_optimizer(request):
    return request.param


def made(backend, make_optimizer, seed, device="cpu"):
    net = backend.mlp([3, 4, 1], activation="tanh", seed=seed, device=device)
    return {"net": net, "optimizer": make_optimizer(net.parameters())}


def train(backend, net, optimizer, steps=3):
    x = backend.rand((8, 3), seed=9, device=backend.device_of(net[0].weight))

    def closure():
        optimizer.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def values(net):
    return [x.cpu().numpy().tobytes() for x in net.state_dict().values()]


def test_training_goes_on_as_if_it_had_not_been_interrupted(torch_backend, path, make_optimizer):
    whole = made(torch_backend, make_optimizer, 1)
    train(torch_backend, **whole)
    torch_backend.save(whole, path)
    train(torch_backend, **whole)
    resumed = torch_backend.load_into(made(torch_backend, make_optimizer, 2), path)
    train(torch_backend, **resumed)
    assert values(resumed["net"]) == values(whole["net"])


def test_training_goes_on_on_another_device(virtual, path):
    whole = made(virtual, OPTIMIZERS["Adam"], 1, "gpu:0")
    train(virtual, **whole)
    virtual.save(whole, path)
    train(virtual, **whole)
    resumed = virtual.load_into(made(virtual, OPTIMIZERS["Adam"], 2, "gpu:1"), path)
    assert set(map(str, virtual.placement(resumed).values())) == {"gpu:1"}
    train(virtual, **resumed)
    assert values(resumed["net"]) == values(whole["net"])


def test_settings_are_those_of_the_file(torch_backend, path):
    whole = made(torch_backend, OPTIMIZERS["Adam"], 1)
    whole["optimizer"].param_groups[0]["lr"] = 0.025
    torch_backend.save(whole, path)
    resumed = torch_backend.load_into(made(torch_backend, OPTIMIZERS["Adam"], 2), path)
    assert resumed["optimizer"].param_groups[0]["lr"] == 0.025


def test_the_state_of_narrow_parameters_keeps_its_own_dtype(torch_backend):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((3,), 1 / 3)
    state = torch_backend._state(optimizer)
    torch_backend._state_put(optimizer, state)()
    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda state: {**state, "class": "SGD"}, "its class"),
        (lambda state: {**state, "shapes": [[[1]]]}, "its shapes"),
        (lambda state: {**state, "param_groups": [{"params": [0]}]}, "other settings"),
        (lambda state: {**state, "param_groups": None}, "other settings"),
        (lambda state: {**state, "state": {9: {}}}, "not what it keeps"),
        (lambda state: {**state, "state": [1]}, "not what it keeps"),
        (lambda state: {}, "no state"),
        (lambda state: 3, "no state"),
    ],
)
def test_what_is_no_state_of_the_optimizer_is_refused(torch_backend, spoil, problem):
    optimizer = made(torch_backend, OPTIMIZERS["Adam"], 1)["optimizer"]
    with pytest.raises(ValueError, match=problem):
        torch_backend._state_put(optimizer, spoil(torch_backend._state(optimizer)))


def test_nothing_is_changed_if_the_optimizer_in_the_file_is_another(torch_backend, path):
    torch_backend.save(made(torch_backend, OPTIMIZERS["Adam"], 1), path)
    other = made(torch_backend, OPTIMIZERS["SGD"], 2)
    before = values(other["net"])
    with pytest.raises(CheckpointError, match="class"):
        torch_backend.load_into(other, path)
    assert values(other["net"]) == before
