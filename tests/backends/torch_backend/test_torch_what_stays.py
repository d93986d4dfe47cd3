"""What ``place`` cannot move, or cannot keep as it is: it is refused or named."""

import copy
import operator
import warnings

import numpy as np
import pytest
import torch
from d2ldev_conformance.suite.data import room_for
from torch import nn

from d2ldev import D2LDevWarning, UnsupportedValueError, cpu, gpu
from d2ldev.framework.testing import framework_of
from d2ldev.operations import inventory


class Viewed(nn.Module):
    """A parameter, and a tensor that is a view of it."""

    def __init__(self, keep):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))
        keep(self)


class Marked(torch.Tensor):
    """A tensor of another class."""


class Wrapper(torch.Tensor):
    """A tensor around another one, which torch's compiler knows nothing of."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def inner(x):
            return x.inner if isinstance(x, Wrapper) else x

        named = {name: inner(x) for name, x in (kwargs or {}).items()}
        made = function(*map(inner, args), **named)
        return Wrapper(made) if isinstance(made, torch.Tensor) else made


class Detector(nn.Module):
    """As SSD of torchvision: it keeps sizes for the host, which ``Module.to`` leaves there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.sizes = [torch.ones(2), torch.ones(2)]

    def forward(self, x):
        assert all(size.is_cpu for size in self.sizes)
        return self.linear(x * torch.stack(self.sizes).prod(0).tolist()[0])


class Metric(nn.Module):
    """As the metrics of torchmetrics: ``_apply`` moves its states, and notes the device."""

    def __init__(self):
        super().__init__()
        self.seen, self.device = [torch.ones(2), torch.ones(3)], torch.device("cpu")

    def _apply(self, function):
        super()._apply(function)
        self.seen = [function(x) for x in self.seen]
        self.device = function(torch.zeros(1, device=self.device)).device
        return self


class Hiding(Metric):
    """A metric that keeps a state in an object, too."""

    def __init__(self):
        super().__init__()
        self.inner = type("Inner", (), {})()
        self.inner.state = self.seen[0]

    def _apply(self, function):
        self.inner.state = function(self.inner.state)
        return super()._apply(function)


def test_a_model_with_tensors_for_the_host_computes_as_after_to(virtual):
    net = Detector()
    with pytest.warns(
        D2LDevWarning, match=r"Detector\.sizes\.1 is on cpu, and stays there"
    ) as found:
        virtual.place(net, gpu(1))
    assert "self.register_buffer('sizes_1', x) registers it" in str(found[0].message)
    assert virtual.device_of(net(virtual.ones((1, 2), device=gpu(1)))) is gpu(1)
    assert virtual.placement(net)["sizes.0"] is cpu()


@pytest.mark.parametrize("make", [Metric, Hiding])
def test_what_a_module_moves_itself_moves(virtual, make, recwarn):
    net = nn.Sequential(nn.Linear(1, 1), make())
    assert virtual.place(net, gpu(1)) is net
    assert {*virtual.placement(net).values()} == {gpu(1)}
    assert [x.device for x in net[1].seen] == [net[1].device] * 2 == [torch.device("vgpu:1")] * 2
    before = list(net[1].seen)
    virtual.place(net, gpu(1))
    assert all(map(operator.is_, net[1].seen, before))
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]
    if make is Hiding:
        assert net[1].inner.state is net[1].seen[0]


def test_a_failure_leaves_what_a_module_moves_itself(virtual, monkeypatch):
    net = nn.Sequential(nn.Linear(1, 1), Metric())
    before = list(net[1].seen)
    tensors = framework_of(virtual).tensors
    monkeypatch.setattr(tensors, "transfer", room_for(3, tensors.transfer))
    with pytest.raises(MemoryError):
        virtual.place(net, gpu(0))
    assert all(map(operator.is_, net[1].seen, before))
    assert net[0].weight.is_cpu
    assert net[1].device == torch.device("cpu")


def test_a_method_that_moves_and_fails_is_named(virtual):
    class Failing(nn.Linear):
        def _apply(self, function):
            raise KeyError("never")

    net = nn.Sequential(Failing(1, 1))
    with pytest.raises(
        UnsupportedValueError, match="by which it moves its tensors raised KeyError"
    ):
        virtual.place(net, gpu(0))
    assert net[0].weight.is_cpu


def test_no_view_is_named_that_the_next_call_makes_anew(virtual):
    net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", D2LDevWarning)
        virtual.place(net, gpu(1))
    assert {*virtual.placement(net).values()} == {gpu(1)}
    assert virtual.device_of(net(virtual.ones((1, 2), device=gpu(1)))) is gpu(1)


def test_the_device_of_a_generator_is_named(virtual):
    net = nn.Linear(1, 1)
    net.noise = torch.Generator()
    with pytest.warns(D2LDevWarning, match=r"Linear\.noise names cpu, and stays"):
        virtual.place(net, gpu(0))
    assert "noise" not in virtual.placement(net)


def test_a_warning_that_is_an_error_moves_nothing(virtual):
    net = nn.Linear(1, 1)
    net.other_noise = torch.Generator()
    with warnings.catch_warnings():
        warnings.simplefilter("error", D2LDevWarning)
        with pytest.raises(D2LDevWarning, match="other_noise"):
            virtual.place(net, gpu(0))
    assert net.weight.is_cpu


def test_a_device_that_a_model_has_noted_is_named(virtual):
    net = nn.Linear(1, 1)
    net.noted, net.elsewhere = torch.device("cpu"), torch.device("vgpu:1")
    with pytest.warns(D2LDevWarning, match=r"Linear\.noted names cpu") as found:
        virtual.place(net, gpu(0))
    assert "elsewhere" not in str(found[0].message)


@pytest.mark.parametrize(
    "keep",
    [
        lambda net: net.register_buffer("view", net.weight.detach()[2:4]),
        lambda net: net.register_parameter("view", nn.Parameter(net.weight.detach()[::2])),
        lambda net: net.register_buffer("view", net.weight.detach().view(2, 4).t()),
        lambda net: net.register_buffer("view", net.weight.detach().view(torch.int32)[1:]),
        lambda net: setattr(net, "view", net.weight.detach()[:4]),
    ],
)
def test_a_view_of_a_weight_is_a_view_after_the_move(virtual, keep, recwarn):
    net = Viewed(keep)
    like = copy.deepcopy(net)
    for device in (gpu(0), gpu(1), cpu()):
        virtual.place(net, device)
        assert {*virtual.placement(net).values()} == {device}
        assert net.view.untyped_storage().data_ptr() == net.weight.untyped_storage().data_ptr()
        assert net.view.tolist() == like.view.tolist()
    with torch.no_grad():
        net.weight.zero_()
    assert not net.view.any()
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]


def test_tensors_over_memory_of_numpy_share_it_after_the_move(virtual):
    net, x = nn.Module(), np.arange(10, dtype="float32")
    net.first, net.whole = (nn.Parameter(torch.from_numpy(part)) for part in (x[:4], x))
    virtual.place(net, gpu(0))
    with torch.no_grad():
        net.first.zero_()
    assert net.whole.tolist() == [0, 0, 0, 0, *range(4, 10)]


def test_a_view_with_a_history_is_copied_and_named(virtual):
    net = Viewed(lambda net: setattr(net, "half", net.weight[:4]))
    with pytest.warns(D2LDevWarning, match=r"shares memory with(.|\n)*make the view in forward"):
        virtual.place(net, gpu(0))
    assert virtual.device_of(net.half) is gpu(0)


def test_tensors_of_one_memory_move_as_one_copy(virtual):
    net = nn.ParameterList([nn.Parameter(torch.arange(8.0)) for _ in range(2)])
    net[1].data = net[0].data
    net.plain, net.other = net[0].detach(), net[0].detach().as_subclass(Marked)
    net.register_buffer("turned", torch.ones(2, 2))
    net.register_buffer("turned_again", net.turned.detach())
    before = [*net.parameters(), *net.buffers()]
    virtual.place(net, gpu(1))
    assert net[0] is before[0]
    assert net[1] is before[1]
    assert net[0].data_ptr() == net[1].data_ptr() == net.plain.data_ptr() == net.other.data_ptr()
    assert net.turned.data_ptr() == net.turned_again.data_ptr()
    assert type(net.other) is Marked
    assert {*virtual.placement(net).values()} == {gpu(1)}


def test_what_a_parameter_shares_with_a_plain_tensor_has_no_graph_after_the_move(virtual):
    net = nn.Embedding(3, 2)
    net.table = net.weight.detach()
    net.register_buffer("turned", net.weight.detach())
    virtual.place(net, gpu(1))
    assert net.table.is_leaf
    assert not net.table.requires_grad
    assert copy.deepcopy(net).turned.is_leaf


def test_a_conjugate_is_one_after_the_move(virtual):
    net = nn.Module()
    net.wave = torch.ones(2, dtype=torch.complex64) * 1j
    net.back = net.wave.conj()
    virtual.place(net, gpu(0))
    assert net.back.data_ptr() == net.wave.data_ptr()
    assert (net.wave.tolist(), net.back.tolist()) == ([1j, 1j], [-1j, -1j])


def test_neighbours_in_one_storage_are_copied_apart(virtual):
    whole = torch.arange(8.0)
    net = nn.ParameterList([nn.Parameter(whole[:4]), nn.Parameter(whole[4:])])
    virtual.place(net, gpu(0))
    assert net[1].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert net[1].untyped_storage().nbytes() == 16


def test_views_are_found_behind_a_smaller_one(virtual):
    whole = torch.arange(8.0)
    net = nn.Module()
    net.whole, net.begin, net.end, net.alone = whole, whole[:2], whole[6:], torch.ones(3)
    virtual.place(net, gpu(0))
    net.whole.zero_()
    assert not net.end.any()
    assert net.alone.all()
    assert {*virtual.placement(net).values()} == {gpu(0)}


def test_the_memory_of_a_wrapper_moves_with_it(virtual):
    net = nn.Module()
    net.weight = weight = nn.Parameter(Wrapper(torch.ones(3)))
    virtual.place(net, gpu(1))
    assert net.weight is weight
    assert virtual.device_of(weight) is virtual.device_of(weight.inner) is gpu(1)


@pytest.mark.parametrize("method", ["place", "placement"])
def test_plain_values_of_a_configuration_are_not_named(virtual, monkeypatch, method):
    """To name each of a hundred words takes ten times as long as to look at its type."""

    def leaves(x, *arguments):
        for found in original(x, *arguments):
            named.append(found[0])
            yield found

    named, original = [], inventory.leaves
    monkeypatch.setattr(inventory, "leaves", leaves)
    net = nn.Linear(2, 1)
    net.words, net.labels = ["a"] * 100, {i: ("a", [i]) for i in range(100)}
    net.beside = ["a", torch.ones(3, requires_grad=True)]
    getattr(virtual, method)(net, *[gpu(1)][: method == "place"])
    assert named == ["beside.0", "beside.1"]


def test_a_list_that_contains_itself_hides_no_tensor(virtual):
    net = nn.Linear(2, 1)
    net.words = ["a"]
    net.words += [net.words, torch.ones(3)]
    assert list(virtual.placement(net)) == ["weight", "bias", "words.2"]


def test_a_tensor_that_stays_and_has_no_bytes_is_passed_over(virtual, recwarn):
    net = nn.Linear(2, 1)
    net.shapes = [torch.ones(3, device="meta")]
    virtual.place(net, gpu(1))
    assert {*virtual.placement(net).values()} == {gpu(1)}
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]
