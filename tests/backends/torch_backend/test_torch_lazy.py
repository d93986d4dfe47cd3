"""Lazy layers, which the book uses everywhere: ``place`` before and after the first input."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from d2ldev import cpu, gpu

# Older versions of torch say so at every lazy layer.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def lazy_net():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))


def test_before_the_first_input_the_parameters_have_a_place(ledger):
    net = lazy_net()
    assert set(ledger.placement(net).values()) == {cpu()}


def test_before_the_first_input_the_parameters_move(ledger):
    net = ledger.place(lazy_net(), gpu(1))
    assert set(ledger.placement(net).values()) == {gpu(1)}


def test_before_the_first_input_the_parameters_stay_the_same_objects(ledger):
    net = lazy_net()
    weight = net[0].weight
    ledger.place(net, gpu())
    assert net[0].weight is weight
    assert isinstance(weight, UninitializedParameter)


def test_moved_before_the_first_input_the_model_is_initialised_by_it(ledger):
    net = ledger.place(lazy_net(), gpu())
    assert net(torch.ones(3, 2)).shape == (3, 1)
    assert net[0].weight.shape == (4, 2)


def test_the_first_input_makes_the_parameters_on_the_device(meta):
    net = meta.place(lazy_net(), "gpu")
    net(meta.ones((3, 2), device="gpu"))
    assert set(meta.placement(net).values()) == {gpu()}
    assert net[0].weight.shape == (4, 2)


def test_an_optimizer_made_before_the_first_input_trains_the_moved_model(ledger):
    net = ledger.place(nn.LazyLinear(1), gpu())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net(torch.ones(1, 2)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    assert torch.equal(net.weight, before - 1)


def test_after_the_first_input_the_parameters_move(ledger):
    net = lazy_net()
    before = net(torch.ones(3, 2))
    ledger.place(net, gpu())
    assert set(ledger.placement(net).values()) == {gpu()}
    assert torch.equal(net(torch.ones(3, 2)), before)


def test_lazy_buffers_move_before_the_first_input(ledger):
    net = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d())
    ledger.place(net, gpu())
    assert set(ledger.placement(net).values()) == {gpu()}


def test_lazy_buffers_that_moved_are_initialised_by_the_first_input(ledger):
    net = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d())
    ledger.place(net, gpu())
    net(torch.rand(2, 1, 5, 5))
    assert net[1].running_mean.shape == (2,)
    assert type(net[1].running_mean) is torch.Tensor


def test_lazy_buffers_are_made_on_the_device(meta):
    net = meta.place(nn.LazyBatchNorm1d(), "gpu")
    net(meta.ones((3, 2), device="gpu"))
    assert net.running_mean.is_meta


def test_placing_a_lazy_model_where_it_is_touches_nothing(torch_backend):
    net = lazy_net()
    parameters = list(net.parameters())
    torch_backend.place(net, "cpu")
    after = list(net.parameters())
    assert all(a is b for a, b in zip(after, parameters, strict=True))
