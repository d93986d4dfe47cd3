"""Optimizers: ``state_dict`` and ``load_state_dict`` are their file, whatever they keep inside."""

import warnings
from collections import deque
from functools import partial

import pytest
import torch
from d2ldev_torch.optimizers import find_hidden
from d2ldev_torch.provision import Around, Flat
from processes import send
from torch.optim import SGD, Adam, Optimizer

from d2ldev import CheckpointError, D2LDevWarning, Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of

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


class OfAll(Momenta):
    """Keeps something in the state that belongs to no parameter."""

    def momentum_of(self, number, x):
        momenta = self.state.setdefault("all", {})
        return momenta.setdefault(str(number), torch.zeros_like(x))


class ByParameter(Momenta):
    """Has its momenta in a dict by its parameters, and settings that no file can hold."""

    def begin(self):
        self.momenta = {}
        self.param_groups[0].update(dtype=torch.float32, function=torch.zeros_like)

    def momentum_of(self, number, x):
        return self.momenta.setdefault(x, self.param_groups[0]["function"](x))

    def state_dict(self):
        return {**super().state_dict(), "momenta": [*self.momenta.values()]}

    def load_state_dict(self, state):
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.momenta = dict(zip(self.parameters, state["momenta"], strict=False))


class Told(Momenta):
    """Has its momenta in the variables of a function, and a state_dict that has them."""

    def begin(self):
        momenta = [torch.zeros_like(x) for x in self.parameters]
        self.momentum_of = lambda number, x: momenta[number]

    def state_dict(self):
        return {"momenta": [self.momentum_of(i, None) for i in range(len(self.parameters))]}

    def load_state_dict(self, state):
        for number, x in enumerate(state["momenta"]):
            self.momentum_of(number, None).copy_(x)


def with_hooks(parameters):
    """Return one of torch's own whose state a program changes before it is saved and read."""
    optimizer = Adam(parameters, 0.05)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": torch.ones(2)})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {key: x for key, x in state.items() if key != "more"}
    )
    return optimizer


MAKERS = {
    "in an attribute": Flat,
    "around another": lambda parameters: Around(Adam(parameters, 0.05)),
    "around one around another": lambda parameters: Around(Around(SGD(parameters, 0.1, 0.9))),
    "by parameter": ByParameter,
    "of all parameters": OfAll,
    "hooks": with_hooks,
    "fused": lambda parameters: Adam(parameters, 0.05, fused=True),
    "a tensor as the rate": lambda parameters: Adam(parameters, torch.tensor(0.05)),
}


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


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "hooks"])
def test_all_that_it_keeps_is_listed_where_it_is(virtual, name):
    net, optimizer = build(MAKERS[name])
    train(virtual, net, optimizer)
    optimizer = virtual.place(optimizer, "gpu:0")
    places = virtual.placement(optimizer)
    assert {str(place) for place in places.values()} == {"gpu:0"}
    assert len(places) > len(list(net.parameters()))


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "hooks"])
def test_training_goes_on_in_another_process(virtual, name):
    net, optimizer = build(MAKERS[name])
    train(virtual, net, optimizer)
    other = send(virtual, (net, optimizer))
    assert_equal(train(virtual, *other), train(virtual, net, optimizer))


@pytest.mark.usefixtures("copied_processes")
def test_two_gpus_learn_like_one_gpu(virtual):
    found, expected = (train(virtual, *build(MAKERS["around another"]), 1, n) for n in (2, 1))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


def test_what_only_the_optimizer_knows_it_is_asked_for(virtual, tmp_path):
    expected = train(virtual, *build(Told), 4)
    path = tmp_path / "run.safetensors"
    train(virtual, *build(Told), 2, checkpoint=path)
    assert_equal(train(virtual, *build(Told), 4, checkpoint=path, resume=True), expected)


# -- what else it keeps ----------------------------------------------------------------------------


def test_what_a_program_keeps_in_one_of_torchs_own_moves_and_is_sent(virtual):
    _, optimizer = build(with_attributes)
    optimizer = virtual.place(optimizer, "gpu:0")
    assert {str(virtual.device_of(x)) for x in (optimizer.scale, *optimizer.means)} == {"gpu:0"}
    other = send(virtual, optimizer)
    assert other.scale.tolist() == [1.0, 1.0]
    assert len(other.means) == 4


class Sharing(Optimizer):
    """Lookahead that has the state of its optimizer under a name of its own."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.fast_state = inner, inner.state
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize(("options", "device"), [({}, "cpu"), ({"fused": True}, "gpu:1")])
def test_a_step_follows_the_policy_under_every_name(virtual, options, device):
    net, optimizer = build(lambda parameters: Sharing(Adam(parameters, **options)))
    train(virtual, net, optimizer)
    net, optimizer = virtual.place((net, optimizer), "gpu:1")
    assert optimizer.fast_state is optimizer.inner.state
    for state in optimizer.fast_state.values():
        assert str(virtual.device_of(state["step"])) == device
        assert str(virtual.device_of(state["exp_avg"])) == "gpu:1"


def test_a_parameter_keeps_the_memory_that_it_has_from_its_state(virtual):
    net, optimizer = build(partial(SGD, lr=0.1))
    for x in net.parameters():
        optimizer.state[x]["old"] = x.data.clone()
        x.data = optimizer.state[x]["old"]
    virtual.place((net, optimizer), "gpu:0")
    for x in net.parameters():
        assert x.data_ptr() == optimizer.state[x]["old"].data_ptr()


# -- what no state_dict shows ----------------------------------------------------------------------


class InAList(Momenta):
    def begin(self):
        self.momenta = [torch.zeros_like(x) for x in self.parameters]

    def momentum_of(self, number, x):
        return self.momenta[number]


class ById(Momenta):
    def begin(self):
        self.momenta = {}

    def momentum_of(self, number, x):
        return self.momenta.setdefault(id(x), torch.zeros_like(x))


class InAQueue(Momenta):
    def begin(self):
        self.last = deque(maxlen=6)

    def momentum_of(self, number, x):
        self.last.append((number, x.grad.clone()))
        return sum(y for i, y in self.last if i == number) - x.grad


class Noisy(Momenta):
    def begin(self):
        self.generator = torch.Generator().manual_seed(3)

    def momentum_of(self, number, x):
        return torch.randn(x.shape, generator=self.generator)


class Sharp(Optimizer):
    """Sharpness-aware minimization, whose inner momenta are in no ``state_dict``."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups, 0.1, 0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()


def with_attributes(parameters):
    """Return one of torch's own whose program keeps tensors in its attributes."""
    optimizer = Adam(parameters, 0.05)
    parameters = optimizer.param_groups[0]["params"]
    optimizer.means = [x.detach().clone() for x in parameters]
    optimizer.scale = torch.ones(2)
    return optimizer


class Zeros(InAList):
    """Keeps zeros, as its state does."""

    def momentum_of(self, number, x):
        self.state[x]["count"] = torch.zeros_like(x)
        return torch.zeros_like(x)


HIDDEN = {
    "in one of torch's own": (with_attributes, r"scale, optimizer\.means\.0, .* and 2 more:"),
    "zeros": (Zeros, "momenta.0, optimizer.momenta.1, optimizer.momenta.2 and 1 more:"),
    "in a list": (InAList, "momenta.0, optimizer.momenta.1, optimizer.momenta.2 and 1 more:"),
    "by id": (ById, r"momenta\.\d+, optimizer\.momenta\.\d+, .* and 1 more:"),
    "in a queue": (InAQueue, r"last\.\d\.1, .* more:"),
    "a generator": (Noisy, "generator:"),
    "in another optimizer": (Sharp, r"base_optimizer\.state\.0\.momentum_buffer, .* 1 more:"),
}


@pytest.mark.parametrize(("make", "said"), [*HIDDEN.values()], ids=[*HIDDEN])
def test_what_a_state_dict_lacks_is_named(virtual, tmp_path, make, said):
    net, optimizer = build(make)
    path = tmp_path / "run.safetensors"
    train(virtual, net, optimizer)
    cls = type(optimizer).__name__
    fix = f"fix: define state_dict\\(\\) and load_state_dict\\(\\) in {cls}"
    with pytest.warns(D2LDevWarning, match=rf"has no optimizer\.{said} the state_dict\(\) .*{fix}"):
        virtual.save({"optimizer": optimizer}, path)
    with pytest.warns(D2LDevWarning, match="has no components.optimizer"):
        train(virtual, *build(make), checkpoint=path)


class Complete(Momenta):
    """Has a list of its parameters, one of its gradients, and one of views of its state."""

    def momentum_of(self, number, x):
        momentum = self.state[x].setdefault("momentum", torch.zeros_like(x))
        self.views = [momentum.view(-1)]
        self.gradients = [x.grad for x in self.parameters]
        return momentum


class Copied(InAList):
    """Has a state_dict with copies of all that it keeps."""

    def state_dict(self):
        return {**super().state_dict(), "momenta": [x.clone() for x in self.momenta]}


@pytest.mark.parametrize("make", [Complete, Copied, Told, *MAKERS.values()])
def test_what_a_state_dict_has_is_not_named(virtual, tmp_path, make):
    net, optimizer = build(make)
    train(virtual, net, optimizer)
    assert find_hidden(optimizer) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        virtual.save(optimizer, tmp_path / "state.safetensors")


# -- what is refused -------------------------------------------------------------------------------


class Entry:
    def __init__(self, x):
        self.momentum = torch.zeros_like(x)


class OfObjects(Momenta):
    def momentum_of(self, number, x):
        return self.state.setdefault(x, Entry(x)).momentum


class Older(Around):
    """Asks for what it has not, as wrappers do that call no ``__init__`` of torch's."""

    def state_dict(self):
        return {"inner": self.inner.missing()}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (OfObjects, r"the Entry at .*state_dict\.state\.0"),
        (lambda parameters: Older(Adam(parameters)), r"its state_dict\(\) fails: .*missing"),
    ],
)
def test_values_that_no_file_restores_are_refused(virtual, tmp_path, make, said):
    net, optimizer = build(make)
    train(virtual, net, optimizer)
    with pytest.raises(UnsupportedValueError, match=said):
        virtual.save({"optimizer": optimizer}, tmp_path / "run.safetensors")


class Refusing(Flat):
    """Fails after it has changed all that it keeps."""

    def load_state_dict(self, state):
        self.momenta.fill_(7)
        self.param_groups[0]["lr"] = 7
        self.state[self.param_groups[0]["params"][0]]["new"] = 7
        self.steps = 7
        if state["steps"] == 6:
            raise KeyError("whatever")
        super().load_state_dict(state)


@pytest.mark.parametrize("other", [{}, {"more": torch.ones(2)}], ids=["itself", "beside it"])
def test_a_state_that_is_refused_changes_nothing(virtual, tmp_path, other):
    net, optimizer = build(Refusing)
    train(virtual, net, optimizer, epochs=2 if not other else 1)
    virtual.save({"optimizer": optimizer, **other}, tmp_path / "state.safetensors")
    net, other = build(Refusing)
    train(virtual, net, other, epochs=1)
    momenta, before = other.momenta, other.momenta.clone()
    with pytest.raises(CheckpointError, match=r"its load_state_dict\(\) fails: 'whatever'|more"):
        virtual.load_into({"optimizer": other}, tmp_path / "state.safetensors")
    assert (other.param_groups[0]["lr"], other.steps, dict(other.state)) == (0.05, 3, {})
    assert other.momenta is momenta
    assert torch.equal(momenta, before)


# -- parameters by their names ---------------------------------------------------------------------


SGD_WITH_MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def of_names(names, make, seed, *, is_named=True):
    """Return parameters of one shape by name, and an optimizer that has made steps with them."""
    torch.manual_seed(seed)
    parameters = {name: torch.nn.Parameter(torch.randn(3)) for name in names}
    optimizer = make(parameters.items() if is_named else parameters.values())
    for x in parameters.values():
        x.grad = x.detach().clone()
    optimizer.step()
    return parameters, optimizer


def test_an_optimizer_that_has_names_is_read_by_them(torch_backend, tmp_path):
    path = tmp_path / "state.safetensors"
    mine, optimizer = of_names("ac", Adam, 0)
    torch_backend.save(optimizer, path)
    theirs, other = of_names("ca", Adam, 1)
    torch_backend.load_into(other, path)
    assert other.param_groups[0]["param_names"] == ["c", "a"]
    for name in "ac":
        found, saved = other.state[theirs[name]], optimizer.state[mine[name]]
        assert torch.equal(found["exp_avg"], saved["exp_avg"])
    _, third = of_names("ad", Adam, 1)
    with pytest.raises(CheckpointError, match="parameters: d only here, c only in the file"):
        torch_backend.load_into(third, path)


def test_a_file_gives_no_names_to_an_optimizer_without_names(torch_backend, tmp_path):
    path = tmp_path / "state.safetensors"
    mine, optimizer = of_names("ac", Adam, 0)
    torch_backend.save({"net": torch.nn.ParameterDict(mine), "optimizer": optimizer}, path)
    theirs, other = of_names("ca", Adam, 1, is_named=False)
    torch_backend.load_into({"net": torch.nn.ParameterDict(theirs), "optimizer": other}, path)
    assert "param_names" not in other.param_groups[0]
    found, saved = other.state[theirs["a"]], optimizer.state[mine["a"]]
    assert torch.equal(found["exp_avg"], saved["exp_avg"])


class TakingOut(SGD):
    """An optimizer whose ``load_state_dict`` takes out what it reads."""

    extra = 0

    def state_dict(self):
        return {**super().state_dict(), "extra": self.extra}

    def load_state_dict(self, state_dict):
        self.extra = state_dict.pop("extra")
        super().load_state_dict(state_dict)


def test_a_load_state_dict_may_take_out_what_it_reads(torch_backend, tmp_path):
    net = torch.nn.Linear(2, 2)
    optimizer = TakingOut(net.parameters(), 0.1)
    optimizer.extra = 5
    torch_backend.save(optimizer, tmp_path / "state.safetensors")
    other = torch_backend.load_into(
        TakingOut(net.parameters(), 0.1), tmp_path / "state.safetensors"
    )
    assert other.extra == 5


class Drawing(SGD):
    """Keeps a mean that its ``load_state_dict`` doubles in place, and a generator."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.mean = torch.ones(2)
        self.generator = torch.Generator().manual_seed(1)

    def state_dict(self):
        own = {"mean": self.mean, "generator": self.generator.get_state()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict):
        self.mean = state_dict.pop("mean").mul_(2)
        self.generator.set_state(state_dict.pop("generator"))
        super().load_state_dict(state_dict)

    def _apply(self, gradients):
        raise AssertionError("place is no step")


def test_a_load_state_dict_may_change_what_it_reads_and_set_a_generator(virtual, tmp_path, recwarn):
    mine, theirs = (Drawing(torch.nn.Linear(2, 1).parameters()) for _ in range(2))
    virtual.place([mine.param_groups[0]["params"], mine], "gpu:0")
    recwarn.clear()  # of the generator, which stays
    wanted = theirs.generator.manual_seed(7).get_state()
    virtual.save(theirs, tmp_path / "optimizer")
    virtual.load_into(mine, tmp_path / "optimizer")
    assert mine.mean.tolist() == [2.0, 2.0]
    assert torch.equal(mine.generator.get_state(), wanted)
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]


def test_parameters_outside_of_the_model_have_the_order_of_the_rest(torch_backend, tmp_path):
    def build(first):
        torch.manual_seed(len(first))
        net, scale = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(2))
        groups = {"scale": [scale], "net": [*net.parameters()]}
        optimizer = SGD([x for name in first for x in groups[name]], 0.1, 0.9)
        for x in (*net.parameters(), scale):
            x.grad = torch.randn_like(x)
        optimizer.step()
        momenta = [optimizer.state[x]["momentum_buffer"].tolist() for x in (scale, net.bias)]
        return {"net": net, "optimizer": optimizer}, scale, momenta

    saved, _, momenta = build(["scale", "net"])
    torch_backend.save(saved, tmp_path / "both.safetensors")
    given, scale, _ = build(["net", "scale"])
    torch_backend.load_into(given, tmp_path / "both.safetensors")
    state = given["optimizer"].state
    found = [state[x]["momentum_buffer"].tolist() for x in (scale, given["net"].bias)]
    assert found == momenta


def test_a_state_of_an_earlier_version_is_read_by_position(torch_backend, tmp_path, monkeypatch):
    mine, optimizer = of_names("ac", SGD_WITH_MOMENTUM, 0, is_named=False)
    files = framework_of(torch_backend).files
    told = files.state(optimizer)
    earlier = {**told.pop("state_dict"), **told}
    monkeypatch.setattr(files, "state", lambda x: earlier if x is optimizer else told)
    monkeypatch.setattr(files, "list_parameters", lambda x: ())
    torch_backend.save(optimizer, tmp_path / "state.safetensors")
    monkeypatch.undo()
    theirs, other = of_names("ac", SGD_WITH_MOMENTUM, 1, is_named=False)
    torch_backend.load_into(other, tmp_path / "state.safetensors")
    for name in "ac":
        found, saved = other.state[theirs[name]], optimizer.state[mine[name]]
        assert torch.equal(found["momentum_buffer"], saved["momentum_buffer"])


def test_the_names_of_a_compiled_model_are_those_of_the_model(torch_backend):
    net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    optimizer = SGD(torch.compile(net).named_parameters(), 0.1)
    labels = framework_of(torch_backend).files.list_parameters(optimizer)
    assert [label for label, _ in labels] == ["0.weight", "0.bias"]


def test_groups_are_those_of_their_parameters(torch_backend, tmp_path):
    def make(names, rates):
        def of_groups(parameters):
            named = dict(parameters)
            groups = zip(names, rates, strict=True)
            return SGD([{"params": [named[x] for x in g], "lr": lr} for g, lr in groups], 1, 0.9)

        return of_groups

    path = tmp_path / "both.safetensors"
    torch_backend.save(of_names("ac", make("ac", (0.1, 0.2)), 0), path)
    _, other = torch_backend.load_into(of_names("ac", make("ca", (0.5, 0.6)), 1), path)
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]
    with pytest.raises(CheckpointError, match="its groups are divided in another way"):
        torch_backend.load_into(of_names("ac", make(("ca",), (0.5,)), 1), path)


@pytest.mark.parametrize("make", [Flat, torch.optim.LBFGS])
def test_a_state_of_several_parameters_is_never_put_in_another_order(torch_backend, tmp_path, make):
    def build(names):
        torch.manual_seed(0)
        parameters = {name: torch.nn.Parameter(torch.randn(3)) for name in names}
        optimizer = make(parameters.values())

        def closure():
            optimizer.zero_grad()
            loss = sum((x**4).sum() for x in parameters.values())
            loss.backward()
            return loss

        optimizer.step(closure)
        return parameters, optimizer

    torch_backend.save(build("ac"), tmp_path / "both.safetensors")
    torch_backend.load_into(build("ac"), tmp_path / "both.safetensors")
    with pytest.raises(CheckpointError, match="it has the parameters in another order"):
        torch_backend.load_into(build("ca"), tmp_path / "both.safetensors")
