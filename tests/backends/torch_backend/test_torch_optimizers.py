"""Optimizers that keep more than ``state``: they move, are saved and go on, or are refused."""

import random
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from d2ldev_torch.optimizers import is_simple
from d2ldev_torch.provision import Around, Listed
from processes import send
from torch.optim import SGD, Adam, Optimizer

from d2ldev import CheckpointError, Trainer, UnsupportedValueError
from d2ldev._backend import framework_of

pytestmark = pytest.mark.filterwarnings("ignore:place .* leaves behind")
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
BATCHES = [(x, x[:, :2]) for x in X.split(4)]


class Momenta(Optimizer):
    """SGD with a momentum that ``begin`` makes, and that ``momentum_of`` finds again."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.begin()

    def begin(self):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for number, x in enumerate(self.parameters):
            momentum = self.momentum_of(number, x)
            momentum.mul_(0.9).add_(x.grad)
            x.sub_(momentum, alpha=self.param_groups[0]["lr"])


class ByParameter(Momenta):
    def begin(self):
        self.momenta = defaultdict(dict)

    def momentum_of(self, number, x):
        return self.momenta[x].setdefault("momentum", torch.zeros_like(x))


class ById(Momenta):
    def begin(self):
        self.momenta = {}

    def momentum_of(self, number, x):
        return self.momenta.setdefault(id(x), torch.zeros_like(x))


class InPairs(Momenta):
    def begin(self):
        self.pairs = [(x, torch.zeros_like(x)) for x in self.parameters]

    def momentum_of(self, number, x):
        return self.pairs[number][1]


class InAnObject(Momenta):
    def begin(self):
        self.kept = SimpleNamespace(momenta=[torch.zeros_like(x) for x in self.parameters])

    def momentum_of(self, number, x):
        return self.kept.momenta[number]


class OfAll(Momenta):
    """Keeps something in the state that belongs to no parameter."""

    def momentum_of(self, number, x):
        momenta = self.state.setdefault("all", {})
        return momenta.setdefault(str(number), torch.zeros_like(x))


class InAQueue(Momenta):
    """Goes along the sum of the last gradients."""

    def begin(self):
        self.last = deque(maxlen=6)

    def momentum_of(self, number, x):
        self.last.append((number, x.grad.clone()))
        return sum(y for i, y in self.last if i == number) - x.grad


class Noisy(Momenta):
    def begin(self):
        self.generator = torch.Generator().manual_seed(3)

    def momentum_of(self, number, x):
        return torch.randn(x.shape, generator=self.generator).to(x.device)


class Sharp(Optimizer):
    """Sharpness-aware minimization, whose inner momenta are in no ``state_dict``."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups, 0.1, 0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure):
        loss = closure()
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            for x in parameters:
                self.state[x]["old"] = x.clone()
                x.add_(x.grad, alpha=self.param_groups[0]["rho"])
        closure()
        with torch.no_grad():
            for x in parameters:
                x.copy_(self.state[x]["old"])
        self.base_optimizer.step()
        return loss


class Older(Around):
    """Asks for what it has not, as wrappers do that call no ``__init__`` of torch's."""

    def state_dict(self):
        return {"inner": self.inner.missing()}

    def load_state_dict(self, state):
        self.inner.missing(state)


class Hidden(Momenta):
    """Has its momenta in the variables of a function."""

    def begin(self):
        momenta = [torch.zeros_like(x) for x in self.parameters]
        self.momentum_of = lambda number, x: momenta[number]


class Told(Hidden):
    """Says itself what is hidden."""

    def state_dict(self):
        return {"momenta": [self.momentum_of(i, None) for i in range(len(self.parameters))]}

    def load_state_dict(self, state):
        for number, x in enumerate(state["momenta"]):
            self.momentum_of(number, None).copy_(x)


class Entry:
    def __init__(self, x):
        self.momentum = torch.zeros_like(x)


class OfObjects(Momenta):
    """Has objects as the entries of its state."""

    def momentum_of(self, number, x):
        if x not in self.state:
            self.state[x] = Entry(x)
        return self.state[x].momentum


class WithHostNumbers(Noisy):
    def begin(self):
        super().begin()
        self.numbers = np.random.default_rng(0)


class WithMoreHostNumbers(Noisy):
    def begin(self):
        super().begin()
        self.numbers = random.Random(0)


def with_hooks(parameters):
    """Return one of torch's own whose state a program changes before it is saved and read."""
    optimizer = Adam(parameters, 0.05)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": torch.ones(2)})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {key: x for key, x in state.items() if key != "more"}
    )
    return optimizer


MAKERS = {
    "in a list": Listed,
    "around another": lambda parameters: Around(Adam(parameters, 0.05)),
    "around one around another": lambda parameters: Around(Around(SGD(parameters, 0.1, 0.9))),
    "by parameter": ByParameter,
    "by id": ById,
    "in pairs": InPairs,
    "in an object": InAnObject,
    "of all parameters": OfAll,
    "in a queue": InAQueue,
    "a generator": Noisy,
    "sharpness-aware": Sharp,
    "a state_dict that fails": lambda parameters: Older(Adam(parameters, 0.05)),
    "hooks": with_hooks,
}
WITH_MOMENTA = [name for name in MAKERS if name not in ("a generator", "hooks")]


def build(make):
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return net, make(net.parameters())


def train(backend, net, optimizer, epochs=2, num_gpus=0, **options):
    """Train, and return the losses and the parameters."""
    trainer = Trainer(epochs, num_gpus, backend=backend)
    history = trainer.fit(net, BATCHES, loss="mse", optimizer=optimizer, **options)
    return history["loss"], [x.detach().cpu() for x in net.parameters()]


def assert_equal(found, expected):
    assert found[0] == expected[0]
    for x, y in zip(found[1], expected[1], strict=True):
        assert torch.equal(x, y)


# -- what goes on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("make", [*MAKERS.values()], ids=[*MAKERS])
def test_a_resumed_run_ends_like_an_uninterrupted_one(virtual, tmp_path, make, num_gpus):
    expected = train(virtual, *build(make), 4, num_gpus)
    path = tmp_path / "run.safetensors"
    train(virtual, *build(make), 2, num_gpus, checkpoint=path)
    found = train(virtual, *build(make), 4, num_gpus, checkpoint=path, resume=True)
    assert_equal(found, expected)


@pytest.mark.parametrize("make", [*MAKERS.values()], ids=[*MAKERS])
def test_what_is_loaded_goes_on_as_what_was_saved(virtual, tmp_path, make):
    net, optimizer = build(make)
    train(virtual, net, optimizer)
    virtual.save((net, optimizer), tmp_path / "both.safetensors")
    other = virtual.load_into(build(make), tmp_path / "both.safetensors")
    assert_equal(train(virtual, *other), train(virtual, net, optimizer))


@pytest.mark.parametrize("make", [*MAKERS.values()], ids=[*MAKERS])
def test_what_was_placed_goes_on_as_what_was_not(virtual, make):
    expected = build(make)
    train(virtual, *expected)
    net, optimizer = build(make)
    train(virtual, net, optimizer)
    net, optimizer = virtual.place((net, optimizer), "gpu:1")
    found = train(virtual, net, optimizer, num_gpus=1)
    assert_equal(found, train(virtual, *expected))


@pytest.mark.parametrize("name", WITH_MOMENTA)
def test_all_that_it_keeps_is_listed_where_it_is(virtual, name):
    net, optimizer = build(MAKERS[name])
    train(virtual, net, optimizer)
    optimizer = virtual.place(optimizer, "gpu:0")
    places = virtual.placement(optimizer)
    assert {str(place) for place in places.values()} == {"gpu:0"}
    assert len(places) > len(list(net.parameters()))


def test_shared_tensors_stay_shared(virtual, tmp_path):
    net, optimizer = build(MAKERS["sharpness-aware"])
    train(virtual, net, optimizer)
    virtual.save(optimizer, tmp_path / "state.safetensors")
    _, other = build(MAKERS["sharpness-aware"])
    virtual.load_into(other, tmp_path / "state.safetensors")
    assert other.param_groups is other.base_optimizer.param_groups


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "hooks"])
def test_training_goes_on_in_another_process(virtual, name):
    net, optimizer = build(MAKERS[name])
    train(virtual, net, optimizer)
    other = send(virtual, (net, optimizer))
    assert_equal(train(virtual, *other), train(virtual, net, optimizer))


def test_two_gpus_learn_like_one_gpu(virtual):
    found, expected = (train(virtual, *build(MAKERS["around another"]), 1, n) for n in (2, 1))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_what_only_the_optimizer_knows_it_is_asked_for(virtual, tmp_path):
    expected = train(virtual, *build(Told), 4)
    path = tmp_path / "run.safetensors"
    train(virtual, *build(Told), 2, checkpoint=path)
    assert_equal(train(virtual, *build(Told), 4, checkpoint=path, resume=True), expected)


# -- what is refused -------------------------------------------------------------------------------


REFUSED = {
    "in a closure": (Hidden, r"momentum_of\.closure\.momenta"),
    "in objects": (OfObjects, r"state\.0 of the OfObjects"),
    "numbers of NumPy's": (WithHostNumbers, "numbers of the WithHostNumbers"),
    "numbers of Python's": (WithMoreHostNumbers, "numbers of the WithMoreHostNumbers"),
}


@pytest.mark.parametrize(("make", "said"), [*REFUSED.values()], ids=[*REFUSED])
def test_values_that_no_file_restores_are_refused(virtual, tmp_path, make, said):
    net, optimizer = build(make)
    path = tmp_path / "run.safetensors"
    train(virtual, net, optimizer)
    with pytest.raises(UnsupportedValueError, match=said):
        virtual.save({"optimizer": optimizer}, path)
    with pytest.raises(UnsupportedValueError, match=said):
        train(virtual, *build(make), checkpoint=path)


@pytest.mark.parametrize("make", [Hidden, Told])
def test_what_cannot_move_is_refused_where_it_would_have_to(virtual, make):
    net, optimizer = build(make)
    assert virtual.place(optimizer, "cpu") is optimizer
    with pytest.raises(UnsupportedValueError, match=r"momentum_of\.closure\.momenta"):
        virtual.place((net, optimizer), "gpu:0")
    assert {str(place) for place in virtual.placement((net, optimizer)).values()} == {"cpu"}
    with pytest.raises(UnsupportedValueError, match=r"momentum_of\.closure\.momenta"):
        train(virtual, net, optimizer, num_gpus=1)


def test_entries_that_are_objects_move(virtual):
    expected, (net, optimizer) = build(OfObjects), build(OfObjects)
    train(virtual, *expected)
    train(virtual, net, optimizer)
    net, optimizer = virtual.place((net, optimizer), "gpu:1")
    found = train(virtual, net, optimizer, num_gpus=1)
    assert_equal(found, train(virtual, *expected))


def test_a_state_that_the_optimizer_refuses_changes_nothing(virtual, tmp_path):
    class Refusing(Told):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            raise KeyError("whatever")

    net, optimizer = build(Refusing)
    train(virtual, net, optimizer)
    virtual.save(optimizer, tmp_path / "state.safetensors")
    _, other = build(Refusing)
    other.param_groups[0]["lr"] = 0.3
    with pytest.raises(CheckpointError, match=r"its load_state_dict\(\) fails: 'whatever'"):
        virtual.load_into(other, tmp_path / "state.safetensors")
    assert other.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("name", ["step", "state", "no name", ""])
def test_a_file_changes_no_attribute_of_torchs_own(virtual, name):
    _, optimizer = build(Listed)
    state = framework_of(virtual).files.state(optimizer)
    state["attributes"] = {**state["attributes"], name: 3}
    with pytest.raises(ValueError, match="not an attribute of an optimizer's own"):
        framework_of(virtual).files.prepare_state(optimizer, state)


@pytest.mark.parametrize("name", ["in a list", "around another", "by parameter", "in an object"])
def test_only_what_belongs_to_one_parameter_each_is_split(name):
    assert is_simple(build(lambda parameters: Adam(parameters, 0.1))[1])
    assert not is_simple(build(MAKERS[name])[1])
