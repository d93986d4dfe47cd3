"""``Learner.state`` and ``restore`` on torch: what was interrupted goes on to the same last bit."""

import pytest
import torch
from torch import nn

from d2ldev.errors import CheckpointError

STEPS = 3
# Older versions of torch say so at every lazy layer.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def dense():
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
    )


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Dropout(0.4), nn.LazyLinear(3))


def through_numpy(backend, x, device):
    """A nesting with its tensors made anew from NumPy arrays, as when it is read from a file."""
    if isinstance(x, torch.Tensor):
        return backend.asarray(backend.to_numpy(x), device=device)
    if isinstance(x, dict):
        return {key: through_numpy(backend, value, device) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(through_numpy(backend, value, device) for value in x)
    assert x is None or isinstance(x, (bool, int, float, str))
    return x


def batches(device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(2 * STEPS):
        y = torch.randint(0, 3, (16,), generator=generator)
        yield (torch.randn(16, 4, generator=generator).to(device),), y.to(device)


def make_learner(backend, device, optimizer, model=dense, **options):
    net = backend.place(model(), device)
    if not isinstance(optimizer, str):
        optimizer = optimizer(net.parameters())
    return backend.learner(net, loss="cross_entropy", optimizer=optimizer, lr=0.05, **options)


def train(learner, some):
    return [learner.step(*batch)[0].item() for batch in some]


def assert_goes_on(backend, device, optimizer, model=dense, **options):
    every = list(batches(device))
    torch.manual_seed(0)
    learner = make_learner(backend, device, optimizer, model, **options)
    train(learner, every[:STEPS])
    state = through_numpy(backend, learner.state(), device)
    losses = train(learner, every[STEPS:])
    expected = learner.parts["model"].state_dict()

    again = make_learner(backend, device, optimizer, model, **options)
    again.restore(state)
    assert train(again, every[STEPS:]) == losses
    found = again.parts["model"].state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("where", ["cpu", "vgpu:0", "vgpu:1"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad"])
def test_six_steps_are_three_and_three_with_dropout(virtual, optimizer, where):
    assert_goes_on(virtual, torch.device(where), optimizer, gradient_clip_val=0.5)


OWN = {
    "Adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "Adam, a learning rate on the device": lambda parameters: torch.optim.Adam(
        parameters, lr=torch.tensor(0.1), foreach=False
    ),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
    "SGD, two groups": lambda parameters: (
        lambda every: torch.optim.SGD(
            [{"params": every[::2], "lr": 0.1}, {"params": every[1::2]}], lr=0.2, nesterov=True,
            momentum=0.9,
        )
    )(list(parameters)),
}  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "vgpu:1"])
@pytest.mark.parametrize("optimizer", OWN)
def test_an_optimizer_of_the_users_own_goes_on(virtual, optimizer, where):
    assert_goes_on(virtual, torch.device(where), OWN[optimizer])


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad"])
def test_a_lazy_model_is_given_its_shapes(virtual, vgpu, optimizer):
    assert_goes_on(virtual, vgpu, optimizer, lazy)


def test_a_lazy_model_that_has_no_shapes_yet_has_a_state(torch_backend):
    learner = make_learner(torch_backend, "cpu", "adam", lazy)
    again = make_learner(torch_backend, "cpu", "adam", lazy)
    again.restore(learner.state())
    assert train(again, list(batches("cpu"))[:1])[0] > 0


def test_a_state_is_what_was_when_it_was_asked_for(torch_backend):
    learner = make_learner(torch_backend, "cpu", "adam")
    every = list(batches("cpu"))
    train(learner, every[:STEPS])
    state = learner.state()
    losses = train(learner, every[STEPS:])
    for _ in range(2):  # restoring it does not hand it over
        learner.restore(state)
        assert train(learner, every[STEPS:]) == losses


def test_asking_for_the_state_changes_nothing(torch_backend):
    def losses(asks):
        torch.manual_seed(0)
        learner, found = make_learner(torch_backend, "cpu", "adam"), []
        for batch in batches("cpu"):
            found.append(learner.step(*batch)[0].item())
            asks and learner.state()
        return found

    assert losses(True) == losses(False)


def test_a_state_of_one_device_goes_on_on_another(virtual, vgpu):
    torch.manual_seed(0)
    learner = make_learner(virtual, "cpu", "adam")
    train(learner, list(batches("cpu"))[:STEPS])
    state = through_numpy(virtual, learner.state(), "cpu")
    losses = train(learner, list(batches("cpu"))[STEPS:])
    again = make_learner(virtual, vgpu, "adam")
    again.restore(state)
    assert train(again, list(batches(vgpu))[STEPS:]) == losses
    assert set(virtual.placement(again.parts).values()) == {virtual.device(vgpu)}


def test_the_number_of_steps_stays_on_the_host(virtual, vgpu):
    """Where torch's optimizers read it in every step; on a GPU they would wait for it."""
    learner = make_learner(virtual, vgpu, "adam")
    train(learner, list(batches(vgpu))[:1])
    learner.restore(through_numpy(virtual, learner.state(), vgpu))
    states = learner.parts["optimizer"].state.values()
    assert {state["step"].device.type for state in states} == {"cpu"}


def test_the_learning_rate_of_a_schedule_goes_on(torch_backend):
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    learner = torch_backend.learner(net, loss="cross_entropy", optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(learner, list(batches("cpu"))[:1])
    schedule.step()
    state = learner.state()
    optimizer.param_groups[0]["lr"] = 3.0
    learner.restore(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def deeper():
    return nn.Sequential(*dense(), nn.Linear(3, 3))


def wider():
    return nn.Sequential(
        *(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 3))
    )


def double():
    return dense().double()


def backwards(parameters):
    return torch.optim.Adam(list(parameters)[::-1])


OTHERS = {
    "more layers": (deeper, "adam", "only one of the two has 5.bias"),
    "other shapes": (wider, "adam", "0.weight is float32 .9, 4."),
    "another dtype": (double, "adam", "0.weight is float64"),
    "another optimizer": (dense, "sgd", "its class: SGD, Adam in the state"),
    "another order": (dense, backwards, "its parameters"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_state_of_another_run_is_refused_and_changes_nothing(torch_backend, case):
    model, optimizer, words = OTHERS[case]
    every = list(batches("cpu"))
    learner = make_learner(torch_backend, "cpu", "adam")
    train(learner, every[:1])
    state = learner.state()
    other = make_learner(torch_backend, "cpu", optimizer, model)
    before, random = other.state(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=words):
        other.restore(state)
    after = other.state()["model"]
    assert all(torch.equal(after[name], x) for name, x in before["model"].items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("part", ["model", "optimizer", "frozen", "evaluation", "random"])
@pytest.mark.parametrize("broken", [None, 3, {"a": 1}, [["a"]], [""]])
def test_what_is_no_state_is_refused(torch_backend, part, broken):
    learner = make_learner(torch_backend, "cpu", "adam")
    train(learner, list(batches("cpu"))[:1])
    before = learner.state()
    with pytest.raises(CheckpointError):
        learner.restore({**before, part: broken})
    after = learner.state()["model"]
    assert all(torch.equal(after[name], x) for name, x in before["model"].items())


@pytest.mark.parametrize("broken", [None, {}, {"model": {}}, [1]])
def test_what_has_not_the_parts_of_a_state_is_refused(torch_backend, broken):
    with pytest.raises(CheckpointError, match="restore what learner"):
        make_learner(torch_backend, "cpu", "adam").restore(broken)
