"""What is one object before ``place`` is one object afterwards, and is copied once."""

import pytest
import torch
from torch import nn

from d2ldev import gpu


def test_a_tied_weight_stays_tied(ledger):
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    net[1].weight = net[0].weight
    ledger.place(net, gpu())
    assert net[1].weight is net[0].weight
    assert len(ledger.copied) == 1


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


def test_a_shared_submodule_is_moved_once(ledger):
    shared = nn.Linear(2, 2)
    ledger.place(nn.Sequential(shared, nn.ReLU(), shared), gpu())
    assert len(ledger.copied) == 2


def test_two_models_placed_together_stay_tied(ledger):
    table = torch.ones(2)
    first, second = nn.Module(), nn.Module()
    first.table = second.table = table
    ledger.place([first, second], gpu())
    assert first.table is second.table


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


@pytest.mark.parametrize("where", ["list", "dict", "tuple"])
def test_a_model_in_a_container_leaves_the_container_as_it_is(ledger, where):
    net = nn.Linear(1, 1)
    batch = {"list": [net], "dict": {"net": net}, "tuple": (net,)}[where]
    assert ledger.place(batch, gpu()) is batch


def test_plain_values_beside_a_model_stay(ledger):
    net = nn.Linear(1, 1)
    placed = ledger.place([net, "name", 3, None, torch.ones(1)], gpu())
    assert placed[:4] == [net, "name", 3, None]
    assert ledger.device_of(placed[4]) is gpu()


def test_an_unknown_object_is_refused_and_named(ledger):
    class Scheduler:
        pass

    net = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"(?s)Scheduler.* at rest\.1 is no tensor, model or"):
        ledger.place({"net": net, "rest": [1, Scheduler()]}, gpu())
    assert ledger.copied == []


def test_a_list_that_two_modules_share_stays_shared(ledger):
    nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
    nets[0].masks = nets[1].masks = [torch.ones(2)]
    placed = ledger.place({"nets": nets, "masks": nets[0].masks}, gpu())
    assert nets[0].masks is nets[1].masks
    assert placed["masks"] is nets[0].masks
    assert ledger.device_of(nets[0].masks[0]) is gpu()
