"""Modules whose weights are computed from others: copied for each GPU, and sent to processes."""

import threading

import pytest
import torch
from processes import send
from processes_program import batches
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from d2ldev import Trainer, UnsupportedValueError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, weight):
        return weight * self.scale


class Counted(nn.Linear):
    """A layer that leaves something out when it is pickled."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}


class Attention(nn.Linear):
    """A layer that leaves what it computes in an attribute."""

    def forward(self, x):
        self.weights = super().forward(x)
        return self.weights


def used(layer):
    """Return a layer that has computed something, which has a history."""
    layer(torch.ones(1, 4))
    return layer


def scale(layer):
    parametrize.register_parametrization(layer, "weight", Scaled())
    return layer


def half(gradient):
    return 0.5 * gradient


class Halved(nn.Linear):
    """A layer with hooks on its gradients, one of which is its own method."""

    def __init__(self, features, outputs):
        super().__init__(features, outputs)
        self.factor = 0.5
        self.weight.register_hook(self.times)
        self.bias.register_hook(half)

    def times(self, gradient):
        return self.factor * gradient


def halve(layer):
    made = Halved(layer.in_features, layer.out_features)
    made.load_state_dict(layer.state_dict())
    return made


COMPUTED = {
    "weight_norm of hooks": nn.utils.weight_norm,
    "weight_norm of hooks, used": lambda layer: used(nn.utils.weight_norm(layer)),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm of hooks": nn.utils.spectral_norm,
    "spectral_norm of hooks, used": lambda layer: used(nn.utils.spectral_norm(layer)),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": scale,
    "two": lambda layer: scale(parametrizations.weight_norm(layer)),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 3),
    "hooks on gradients": halve,
    "left in an attribute": lambda layer: used(Attention(4, 4)),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


def network(kind):
    torch.manual_seed(0)
    return nn.Sequential(COMPUTED[kind](nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


def losses(net, x):
    """Return the losses of a few steps."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_copy_for_a_gpu_learns_like_the_model(virtual, kind):
    net = network(kind)
    state = {name: x.clone() for name, x in net.state_dict().items()}
    copies = virtual.replicate(net, ["gpu:0", "gpu:1"])
    found = [losses(one, virtual.to(X, f"gpu:{i}")) for i, one in enumerate(copies)]
    for name, x in net.state_dict().items():
        assert torch.equal(x, state[name])
    assert found == [losses(net, X)] * 2


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_copy_is_wholly_on_its_gpu(virtual, kind):
    for i, one in enumerate(virtual.replicate(network(kind), ["gpu:0", "gpu:1"])):
        one(virtual.to(X, f"gpu:{i}"))
        assert {str(place) for place in virtual.placement(one).values()} == {f"gpu:{i}"}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_pickled_model_learns_like_the_model(virtual, kind):
    net = network(kind)
    other = send(virtual, net)
    assert losses(other, X) == losses(net, X)
    assert not {id(x) for x in net.parameters()} & {id(x) for x in other.parameters()}


def test_a_class_still_says_what_of_it_is_sent(virtual):
    net = parametrizations.spectral_norm(Counted(4, 4))
    net.lock = threading.Lock()
    assert not hasattr(send(virtual, net), "lock")


@pytest.mark.usefixtures("copied_processes")
def test_two_gpus_learn_like_one_gpu(virtual):
    def fit(number):
        torch.manual_seed(0)
        names = ("weight_norm of hooks, used", "weight_norm", "spectral_norm of hooks")
        names = (*names, "spectral_norm", "own", "hooks on gradients")
        layers = [COMPUTED[name](nn.Linear(4, 4)) for name in names]
        net = nn.Sequential(*layers, nn.Linear(4, 3))
        data = batches(features=4)
        history = Trainer(2, number, backend=virtual).fit(net, data, loss="cross_entropy", lr=0.1)
        return history["loss"], {name: x.cpu() for name, x in net.state_dict().items()}

    (losses_of_two, two), (losses_of_one, one) = fit(2), fit(1)
    assert losses_of_two == pytest.approx(losses_of_one, rel=1e-5)
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_the_method_of_a_copy_is_its_hook(virtual):
    net = network("hooks on gradients")
    (other,) = virtual.replicate(net, ["gpu:0"])
    other[0].factor = 0.0
    other(virtual.to(X, "gpu:0")).sum().backward()
    assert not other[0].weight.grad.any()
    assert other[0].bias.grad.any()


def after_sum(x):
    x.grad = None


@pytest.mark.usefixtures("copied_processes")
def test_a_hook_that_two_gpus_call_too_early_is_refused(virtual):
    net = network("own")
    net[2].weight.register_post_accumulate_grad_hook(after_sum)
    trainer = Trainer(1, 2, backend=virtual)
    with pytest.raises(UnsupportedValueError, match=r"2\.weight has a hook of register_post"):
        trainer.fit(net, batches(features=4))


def test_an_object_that_cannot_be_copied_is_named(virtual):
    net = network("weight_norm of hooks")
    net[0].lock = threading.Lock()
    with pytest.raises(UnsupportedValueError, match=r"fails at _modules\.0\.lock: .*lock"):
        virtual.replicate(net, ["gpu:0"])


def test_an_object_that_cannot_be_pickled_is_named(virtual):
    net = network("weight_norm of hooks")
    net[0].lock = threading.Lock()
    trainer = Trainer(1, 2, backend=virtual)
    with pytest.raises(UnsupportedValueError, match=r"lock.*, at model\._modules\.0\.lock"):
        trainer.fit(net, batches(features=4))
