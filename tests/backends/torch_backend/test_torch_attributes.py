"""``place`` of what a module keeps outside of its parameters, buffers and submodules."""

import dataclasses
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from d2ldev_torch.backend import TorchBackend
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from d2ldev import gpu

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Cache:
    keys: torch.Tensor
    size: int


def keeping(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_a_plain_tensor_attribute_moves(ledger):
    net = ledger.place(keeping(mask=torch.tensor([1, 2])), gpu(1))
    assert ledger.device_of(net.mask) is gpu(1)
    assert net.mask.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("kept", "tensor"),
    [
        ([torch.ones(1)], lambda kept: kept[0]),
        ((torch.ones(1), 2), lambda kept: kept[0]),
        ({"a": {"b": torch.ones(1)}}, lambda kept: kept["a"]["b"]),
        (OrderedDict(a=torch.ones(1)), lambda kept: kept["a"]),
        (deque([torch.ones(1)], maxlen=3), lambda kept: kept[0]),
        (Pair(torch.ones(1), None), lambda kept: kept.first),
        (Cache(torch.ones(1), 1), lambda kept: kept.keys),
    ],
    ids=lambda value: type(value).__name__,
)
class TestContainerAttribute:
    def test_its_tensor_moves(self, ledger, kept, tensor):
        net = ledger.place(keeping(kept=kept), gpu())
        assert ledger.device_of(tensor(net.kept)) is gpu()

    def test_its_type_stays(self, ledger, kept, tensor):
        net = ledger.place(keeping(kept=kept), gpu())
        assert type(net.kept) is type(kept)

    def test_the_container_that_was_there_is_not_changed(self, ledger, kept, tensor):
        before = tensor(kept)
        ledger.place(keeping(kept=kept), gpu())
        assert tensor(kept) is before


def test_modules_in_a_plain_list_move(ledger):
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    net = ledger.place(keeping(layers=layers), gpu())
    assert ledger.device_of(layers[1].weight) is gpu()
    assert net.layers is layers


def test_modules_in_a_plain_dictionary_move(ledger):
    heads = {"mean": nn.Linear(1, 1)}
    ledger.place(keeping(heads=heads), gpu())
    assert ledger.device_of(heads["mean"].weight) is gpu()


@pytest.mark.parametrize(
    "kept",
    [
        nn.ModuleList([nn.Linear(1, 1)]),
        nn.ModuleDict({"a": nn.Linear(1, 1)}),
        nn.ParameterList([nn.Parameter(torch.ones(1)), torch.ones(1)]),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": torch.ones(1)}),
    ],
    ids=lambda kept: type(kept).__name__,
)
def test_torch_s_own_containers_move_with_all_they_hold(ledger, kept):
    ledger.place(keeping(kept=kept), gpu())
    assert set(ledger.placement(kept).values()) == {gpu()}


def test_a_scratch_parameter_stays_the_same_object(ledger):
    # As the book writes a model from scratch: tensors with gradients in a list.
    w, b = torch.ones(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    net = keeping(params=[w, b])
    ledger.place(net, gpu())
    assert net.params[0] is w
    assert ledger.device_of(w) is gpu()


def test_a_scratch_parameter_still_needs_gradients(ledger):
    w = torch.ones(2, requires_grad=True)
    ledger.place(keeping(w=w), gpu())
    (w * 3).sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_frozen_parameter_stays_the_same_object_and_frozen(ledger):
    net = nn.Linear(2, 3).requires_grad_(False)
    weight = net.weight
    ledger.place(net, gpu())
    assert net.weight is weight
    assert not weight.requires_grad


def test_a_gradient_moves_with_its_parameter(ledger):
    net = nn.Linear(2, 1)
    net(torch.tensor([[2.0, 3.0]])).sum().backward()
    ledger.place(net, gpu(1))
    assert ledger.device_of(net.weight.grad) is gpu(1)
    assert net.weight.grad.tolist() == [[2, 3]]


def test_gradients_accumulate_on_the_moved_ones(ledger):
    net = nn.Linear(2, 1)
    x = torch.tensor([[2.0, 3.0]])
    net(x).sum().backward()
    ledger.place(net, gpu())
    net(x).sum().backward()
    assert net.weight.grad.tolist() == [[4, 6]]


def test_the_gradient_of_a_tensor_that_stays_is_moved_to_it(ledger):
    net = ledger.place(nn.Linear(2, 1), gpu())
    net.weight.grad = torch.ones(1, 2)
    ledger.place(net, gpu())
    assert ledger.device_of(net.weight.grad) is gpu()


def test_gradient_hooks_stay(ledger):
    w = torch.ones(2, requires_grad=True)
    w.register_hook(lambda gradient: gradient * 10)
    ledger.place(keeping(w=w), gpu())
    w.sum().backward()
    assert w.grad.tolist() == [10, 10]


def test_a_parameter_of_a_subclass_keeps_its_type_and_attributes(ledger):
    class Named(nn.Parameter):
        pass

    net = nn.Module()
    net.weight = Named(torch.ones(2))
    net.weight.axis = "rows"
    ledger.place(net, gpu())
    assert type(net.weight) is Named
    assert net.weight.axis == "rows"


def test_a_parameter_that_wraps_tensors_takes_them_with_it(meta):
    net = nn.Module()
    net.weight = weight = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    TorchBackend._refill(meta, weight, meta._copy(weight, meta.native("gpu")))
    assert net.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.a.is_meta


def test_a_property_is_not_evaluated(ledger):
    class Counting(nn.Linear):
        asked = 0

        @property
        def scale(self):
            type(self).asked += 1
            return torch.ones(1)

    ledger.place(Counting(1, 1), gpu())
    assert Counting.asked == 0


def test_an_overridden_setattr_is_not_called(ledger):
    class Refusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.__dict__["table"] = torch.ones(1)

        def __setattr__(self, name, value):
            if name == "table":
                raise AttributeError("read-only")
            super().__setattr__(name, value)

    net = ledger.place(Refusing(), gpu())
    assert ledger.device_of(net.table) is gpu()


def test_a_tensor_in_a_slot_moves(ledger):
    class Slotted(nn.Module):
        __slots__ = ("never_set", "table")

    net = Slotted()
    net.table = torch.ones(1)
    ledger.place(net, gpu())
    assert ledger.device_of(net.table) is gpu()


def test_an_attribute_of_an_unknown_type_is_passed_over(ledger):
    unknown = object()
    net = ledger.place(keeping(unknown=unknown, x=torch.ones(1)), gpu())
    assert net.unknown is unknown


def test_on_a_device_of_torch_itself_a_plain_attribute_moves(meta):
    net = meta.place(keeping(mask=torch.ones(2), tables=[torch.ones(3)]), "gpu")
    assert net.mask.is_meta
    assert net.tables[0].is_meta
