"""What ``place`` cannot move, or cannot keep as it is: it is refused or named."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from d2ldev import D2LDevWarning, UnsupportedValueError, cpu, gpu
from d2ldev._backend import framework_of
from d2ldev.operations import placing


class WithPrior(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        self.mixture = torch.distributions.Independent(
            torch.distributions.Categorical(logits=torch.ones(2, 3)), 1
        )


class Viewed(nn.Module):
    """A parameter, and a tensor that is a view of it."""

    def __init__(self, keep):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))
        keep(self)


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


def test_distributions_of_a_model_move(virtual):
    net = virtual.place(WithPrior(), gpu(1))
    assert {*virtual.placement(net).values()} == {gpu(1)}
    assert virtual.device_of(net.prior.sample()) is gpu(1)
    assert virtual.device_of(net.mixture.sample()) is gpu(1)


def test_no_view_is_named_that_the_next_call_makes_anew(virtual):
    net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", D2LDevWarning)
        virtual.place(net, gpu(1))
    assert {*virtual.placement(net).values()} == {gpu(1)}
    assert virtual.device_of(net(virtual.ones((1, 2), device=gpu(1)))) is gpu(1)


def test_a_generator_is_named_and_listed(virtual):
    net = nn.Linear(1, 1)
    net.noise = torch.Generator()
    with pytest.warns(D2LDevWarning, match=r"Linear\.noise is on cpu"):
        virtual.place(net, gpu(0))
    assert virtual.placement(net)["noise"] is cpu()


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
    ],
)
def test_weights_that_are_tied_by_a_view_are_refused(virtual, keep):
    net = Viewed(keep)
    with pytest.raises(UnsupportedValueError, match="share memory") as error:
        virtual.place(net, gpu(0))
    assert "weight" in str(error.value)
    assert "view" in str(error.value)
    assert net.weight.is_cpu


def test_a_view_that_is_not_a_weight_is_named(virtual):
    net = Viewed(lambda net: setattr(net, "half", net.weight.detach()[:4]))
    with pytest.warns(D2LDevWarning, match="shares memory with") as found:
        virtual.place(net, gpu(0))
    assert "half" in str(found[0].message)
    assert virtual.device_of(net.half) is gpu(0)


def test_neighbours_in_one_storage_are_no_views_of_each_other(virtual, recwarn):
    whole = torch.arange(8.0)
    net = nn.ParameterList([nn.Parameter(whole[:4]), nn.Parameter(whole[4:])])
    virtual.place(net, gpu(0))
    assert net[1].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]


def test_overlaps_are_found_behind_a_smaller_view(virtual):
    whole = torch.arange(8.0)
    views = [whole, whole[:2], whole[6:], torch.ones(3), torch.ones(2).to_sparse()]
    pairs = [(x, y) for x, y in framework_of(virtual).models.overlaps(views)]
    assert any(y is views[2] for _, y in pairs)
    assert all(id(views[3]) not in map(id, pair) for pair in pairs)


def test_the_memory_of_a_wrapper_moves_with_it(virtual):
    net = nn.Module()
    net.weight = weight = nn.Parameter(Wrapper(torch.ones(3)))
    virtual.place(net, gpu(1))
    assert net.weight is weight
    assert virtual.device_of(weight) is virtual.device_of(weight.inner) is gpu(1)


class Node:
    """An element of a chain."""

    def __init__(self, following=None):
        self.following, self.x = following, torch.ones(1)


def test_a_search_that_is_too_deep_is_named_and_ends_nothing(virtual):
    net = nn.Linear(1, 1)
    for _ in range(3000):
        net.chain = Node(vars(net).get("chain"))
    with pytest.warns(D2LDevWarning, match=r"following and others were not looked through"):
        virtual.place(net, gpu(0))
    assert virtual.device_of(net.weight) is virtual.device_of(net.chain.x) is gpu(0)


def test_a_search_among_too_many_objects_is_named_and_ends_nothing(virtual):
    net = nn.Linear(1, 1)
    net.many = [Node() for _ in range(11_000)]
    with pytest.warns(D2LDevWarning, match=r"many\.\d+ and others were not looked through"):
        virtual.place(net, gpu(0))
    assert virtual.device_of(net.many[0].x) is gpu(0)
    assert net.many[-1].x.is_cpu


@pytest.mark.parametrize("method", ["place", "placement"])
def test_plain_values_of_a_configuration_are_not_named(virtual, monkeypatch, method):
    """To name each of a hundred words takes ten times as long as to look at its type."""

    def leaves(x, *arguments):
        for found in original(x, *arguments):
            named.append(found[0])
            yield found

    named, original = [], placing.leaves
    monkeypatch.setattr(placing, "leaves", leaves)
    net = nn.Linear(2, 1)
    net.settings = SimpleNamespace(words=["a"] * 100, labels={i: ("a", [i]) for i in range(100)})
    net.settings.beside = ["a", torch.ones(3)]
    getattr(virtual, method)(net, *[gpu(1)][: method == "place"])
    assert "settings.beside.1" in named
    assert not [name for name in named if name.startswith(("settings.words", "settings.labels"))]


def test_a_list_that_contains_itself_hides_no_tensor(virtual):
    net = nn.Linear(2, 1)
    net.words = ["a"]
    net.words += [net.words, torch.ones(3)]
    assert list(virtual.placement(net)) == ["weight", "bias", "words.2"]
