"""Steps of training on torch: the numbers of the hand-written loop, and what it leaves alone."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from d2ldev import Broadcast, D2LDevWarning, Trainer
from d2ldev.errors import UnsupportedValueError

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}
# Older versions of torch say so at every lazy layer.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

# -- steps -----------------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolution, batch normalisation, dropout."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Tokens(nn.Module):
    """An embedding and an LSTM, with two inputs."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(7, 5), nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x, scale):
        return self.head(torch.cat([self.rnn(self.embed(x))[0][:, -1], scale], 1))


def batches(model, number=4):
    torch.manual_seed(1)
    for _ in range(number):
        y = torch.randint(0, 3, (8,))
        if model is Images:
            yield (torch.randn(8, 1, 6, 6),), y
        else:
            yield (torch.randint(0, 7, (8, 5)), torch.randn(8, 1)), y


def by_hand(model, make_optimizer, largest, device):
    net = model().to(device)
    optimizer = make_optimizer(net.parameters())
    losses = []
    for inputs, y in batches(model):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(*(x.to(device) for x in inputs)), y.to(device))
        loss.backward()
        if largest:
            nn.utils.clip_grad_norm_(net.parameters(), largest)
        optimizer.step()
        losses.append(loss.item())
    return losses, [x.cpu() for x in net.state_dict().values()]


def by_learner(backend, model, optimizer, largest, device):
    learner = backend.learner(
        model().to(device), loss="cross_entropy", optimizer=optimizer, lr=0.05,
        gradient_clip_val=largest,
    )  # fmt: skip
    losses = [
        learner.step(tuple(x.to(device) for x in inputs), y.to(device))[0].item()
        for inputs, y in batches(model)
    ]
    return losses, [x.cpu() for x in learner.sync()["model"].state_dict().values()]


@pytest.mark.parametrize("where", ["cpu", "vgpu:1"])
@pytest.mark.parametrize("largest", [0, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [Images, Tokens])
def test_steps_give_the_hand_written_loop_to_the_last_bit(
    virtual, model, optimizer, largest, where
):
    torch.manual_seed(0)
    losses, values = by_hand(model, OPTIMIZERS[optimizer], largest, torch.device(where))
    torch.manual_seed(0)
    found, after = by_learner(virtual, model, optimizer, largest, torch.device(where))
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))


class Calls(TorchDispatchMode):
    """The operations that read a value of a virtual GPU on the host, or copy between devices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        devices = {x.device.type for x in args if isinstance(x, torch.Tensor)}
        target = (kwargs or {}).get("device")
        moves = {torch.device(target).type} - devices if target is not None and devices else set()
        if "vgpu" in devices and (name == "_local_scalar_dense" or moves or len(devices) > 1):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_counter_of_transfers_counts(vgpu):
    x = torch.ones(2, device=vgpu)
    with Calls() as calls:
        x.sum().item()
        x.cpu()
    assert calls.found == ["_local_scalar_dense", "_to_copy"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_waits_for_nothing_and_moves_nothing(virtual, vgpu, optimizer):
    learner = virtual.learner(
        Images().to(vgpu), loss="cross_entropy", optimizer=optimizer, gradient_clip_val=0.1
    )
    (x,), y = next(batches(Images))
    x, y = x.to(vgpu), y.to(vgpu)
    with virtual.strict(), Calls() as calls:
        learner.step((x,), y)
        learner.step((x,), y)
        learner.evaluate((x,), y)
    assert calls.found == []


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_handed_back_in_the_mode_in_which_it_came(torch_backend, training):
    net = Images().train(training)
    learner = torch_backend.learner(net, loss="cross_entropy")
    batch = next(batches(Images))
    modes = []
    for teach in (learner.step, learner.evaluate):
        teach(*batch)
        assert learner.sync()["model"] is net
        modes.extend(module.training for module in net.modules())
    assert set(modes) == {training}


def test_a_model_in_evaluation_mode_is_trained_in_training_mode(torch_backend):
    net = Images().eval()
    before = net.features[1].running_mean.clone()
    torch_backend.learner(net, loss="cross_entropy").step(*next(batches(Images)))
    assert not torch.equal(net.features[1].running_mean, before)


def test_a_module_that_was_frozen_in_evaluation_mode_stays_in_it(torch_backend):
    net = Images()
    net.features[1].eval()
    before = net.features[1].running_mean.clone()
    learner = torch_backend.learner(net, loss="cross_entropy")
    for inputs, y in batches(Images):
        learner.step(inputs, y)
        learner.evaluate(inputs, y)
    learner.sync()
    assert torch.equal(net.features[1].running_mean, before)
    assert [module.training for module in net.features] == [True, False, True]


def test_a_callback_that_leaves_evaluation_mode_on_does_not_end_training(torch_backend):
    net = Images()
    learner = torch_backend.learner(net, loss="cross_entropy")
    net.eval()
    before = net.features[1].running_mean.clone()
    learner.step(*next(batches(Images)))
    assert not torch.equal(net.features[1].running_mean, before)


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_the_results_of_a_step_have_no_graph(torch_backend, method):
    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "twice": [2 * y, "text"]}

    learner = torch_backend.learner(Two(2, 1), loss=lambda prediction, y: prediction["y"].mean())
    loss, prediction = getattr(learner, method)((torch.ones(3, 2),), None)
    assert prediction["twice"][1] == "text"
    found = [loss, prediction["y"], prediction["twice"][0]]
    assert [x.requires_grad for x in found] == [False] * 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lazy_modules_get_their_shapes_in_the_first_step(virtual, vgpu, optimizer):
    torch.manual_seed(0)
    net = virtual.place(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1)), vgpu)
    learner = virtual.learner(net, optimizer=optimizer)
    x = torch.ones(3, 2, device=vgpu)
    losses = [learner.step((x,), torch.zeros(3, 1, device=vgpu))[0].item() for _ in range(4)]
    assert losses[-1] < losses[0]
    assert set(virtual.placement(learner.sync()).values()) == {virtual.device(vgpu)}


# -- optimizers of the user's own ------------------------------------------------------------------


def examples(device="cpu"):
    torch.manual_seed(1)
    return (torch.randn(8, 2).to(device),), torch.randn(8, 1).to(device)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta"])
def test_one_that_was_built_before_the_model_was_placed_trains_it(virtual, vgpu, name):
    def losses(device):
        model = small()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.03)
        learner = virtual.learner(virtual.place(model, device), optimizer=optimizer)
        assert learner.sync()["optimizer"] is optimizer
        return [learner.step(*examples(device))[0].item() for _ in range(3)]

    found = losses(vgpu)
    assert found == losses(torch.device("cpu"))
    assert found[-1] < found[0]


def test_one_that_has_stepped_already_is_placed_with_its_state(virtual, vgpu):
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    learner = virtual.learner(model, optimizer=optimizer)
    learner.step(*examples())
    model = virtual.place(model, vgpu)
    learner = virtual.learner(model, optimizer=optimizer)
    learner.step(*examples(vgpu))
    averages = {state["exp_avg"].device for state in optimizer.state.values()}
    assert averages == {vgpu}


def test_its_learning_rate_is_its_own(torch_backend):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch_backend.learner(model, optimizer=optimizer).step(*examples())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]


def test_its_hooks_are_called(torch_backend):
    model, called = small(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: called.append("stepped"))
    torch_backend.learner(model, optimizer=optimizer).step(*examples())
    assert called == ["stepped"]


def test_the_norm_is_that_of_what_it_trains(torch_backend):
    """Nobody sets the gradients of the rest to zero, so that they would go on growing."""
    model = small()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    learner = torch_backend.learner(model, optimizer=optimizer, gradient_clip_val=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    learner.step(*examples())
    first = [p.detach().clone() for p in model.parameters()]
    moved = torch.cat([(b - a).flatten() for a, b in zip(before, first, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0)
    assert torch.equal(first[0], before[0])


@pytest.mark.parametrize("largest", [0, 0.1])
def test_lbfgs_steps_as_by_hand(virtual, vgpu, largest):
    model, (inputs, y) = small().to(vgpu), examples(vgpu)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(*inputs), y)
        loss.backward()
        if largest:
            nn.utils.clip_grad_norm_(model.parameters(), largest)
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    model = small().to(vgpu)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    learner = virtual.learner(model, optimizer=optimizer, gradient_clip_val=largest)
    assert [learner.step(inputs, y)[0].item() for _ in range(3)] == losses
    assert losses[-1] != losses[0]


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"precision": "fp16"}], ids=str
)
def test_lbfgs_is_refused_where_a_step_is_no_single_pass(torch_backend, options):
    model = small()
    (name,) = options
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedValueError, match=f"LBFGS and {name}.*several times"):
        torch_backend.learner(model, optimizer=optimizer, **options)


def test_float16_parameters_are_refused_in_mixed_precision(torch_backend):
    with pytest.raises(UnsupportedValueError, match=r"fix: net\.float\(\)"):
        torch_backend.learner(small().half(), precision="fp16")


class Twice(torch.optim.SGD):
    """An optimizer of somebody else's that cannot step without a closure."""

    def step(self, closure):
        """Step twice."""
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            super().step()
        return loss


def test_an_optimizer_that_needs_a_closure_is_given_one(virtual):
    (inputs, y), plain, twice = examples("cpu"), small(), small()
    learner = virtual.learner(plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1))
    expected = [learner.step(inputs, y)[0] for _ in range(3)]
    learner = virtual.learner(twice, optimizer=Twice(twice.parameters(), lr=0.1))
    found = [learner.step(inputs, y)[0] for _ in range(2)]
    torch.testing.assert_close(found, [expected[0], expected[2]])


# -- inputs by name --------------------------------------------------------------------------------


class Typed(nn.Module):
    """A module with types, as TorchScript wants it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, mask, scale: int = 1):
        return self.linear(x) * mask * scale


@pytest.mark.parametrize(
    "made",
    [lambda net: torch.compile(net, backend="eager"), torch.jit.script],
    ids=["compiled", "scripted"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_has_the_names_of_its_module(torch_backend, made):
    assert torch_backend.learner(made(Typed())).signature.names == ("x", "mask", "scale")


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "a function": (lambda x: x, {}, "torch.nn.Module"),
    "no parameters": (nn.ReLU(), {}, "requires_grad"),
    "all frozen": (nn.Linear(1, 1).requires_grad_(False), {}, "requires_grad"),
    "a class": (nn.Linear(1, 1), {"optimizer": torch.optim.SGD}, "net.parameters"),
    "another's": (
        nn.Linear(1, 1),
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        "none of its parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_trained_is_refused(torch_backend, case):
    model, options, words = REFUSED[case]
    with pytest.raises(UnsupportedValueError, match=words):
        torch_backend.learner(model, **options)


class Scaled(nn.Module):
    """A model that takes a list of numbers with its input."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x, scales):
        """Map ``(n, 2)`` to ``(n, 1)``."""
        assert scales == [1.0, 2.0, 3.0]
        return self.line(x) * scales[2]


@pytest.mark.parametrize("place", ["cpu", "gpu:0"])
def test_what_is_marked_is_its_value_to_the_model_the_loss_and_the_metrics(virtual, place):
    def loss(prediction, y):
        wanted, weights = y["wanted"], y["weights"]
        assert isinstance(weights, list)
        return sum(
            w * (p - t) ** 2 for w, p, t in zip(weights, prediction[:, 0], wanted, strict=True)
        )

    def shift(_prediction, y):
        return y["shift"].sum()

    trainer = Trainer(1, backend=virtual)
    trainer.device = place
    data = [
        {
            "x": torch.ones(n, 2),
            "scales": Broadcast([1.0, 2.0, 3.0]),
            "y": {
                "wanted": [0.0] * n,
                "weights": [1.0] * n,
                "shift": Broadcast(np.ones(n, "float32")),
            },
        }
        for n in (1, 3)
    ]
    history = trainer.fit(Scaled(), data, data, loss=loss, metrics=[shift], lr=1e-4)
    # The mean over the four examples, which only the lists count in the target.
    assert history["shift"] == history["val_shift"] == [(1 * 1 + 3 * 3) / 4]
    found = trainer.predict(trainer.model, data)
    assert [tuple(x.shape) for x in found] == [(1, 1), (3, 1)]


def test_what_is_marked_is_its_value_beside_very_many_containers(virtual):
    def loss(prediction, y):
        assert len(y["empty"]) == 11_000
        return prediction.sum()

    y = {"wanted": torch.zeros(4), "empty": Broadcast([[] for _ in range(11_000)])}
    data = [{"x": torch.ones(4, 2), "scales": Broadcast([1.0, 2.0, 3.0]), "y": y}]
    trainer = Trainer(1, backend=virtual)
    assert trainer.fit(Scaled(), data, data, loss=loss).keys() == {"loss", "val_loss", "lr"}
    assert [tuple(x.shape) for x in trainer.predict(trainer.model, data)] == [(4, 1)]


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_of_one_example_to_normalize_is_refused(virtual, number):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    sizes = (4, 1)
    data = [(np.ones((n, 2), "float32"), np.ones((n, 3), "float32")) for n in sizes]
    with pytest.raises(UnsupportedValueError, match=r"(?s)one example: .*drop_last=True"):
        Trainer(1, number, backend=virtual).fit(net, data)


def test_a_batch_of_one_image_is_normalized(virtual):
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten())
    data = [(np.ones((1, 1, 2, 2), "float32"), np.zeros((1, 4), "float32"))]
    assert Trainer(1, 1, backend=virtual).fit(net, data)["loss"] == [0.0]


def test_the_error_of_a_model_stays_its_own(virtual):
    class Broken(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            raise ValueError("mine")

    for layer, n in ((nn.BatchNorm1d(2), 2), (nn.Linear(2, 1), 1)):
        data = [(np.ones((n, 2), "float32"), np.ones((n, 1), "float32"))]
        with pytest.raises(ValueError, match=r"^mine$"):
            Trainer(1, 0, backend=virtual).fit(Broken(layer), data)


def test_floats_are_cast_to_the_dtype_of_the_parameters(virtual):
    net = nn.Linear(2, 1)
    net.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    data = [(np.ones((4, 2)), np.ones((4, 1)))]
    with pytest.warns(D2LDevWarning, match="float64 is cast to float32"):
        Trainer(1, 0, backend=virtual).fit(net, data)


def test_a_first_batch_without_floats_does_not_decide_that_floats_stay(virtual):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.dense = nn.Embedding(4, 3), nn.Linear(2, 3)

        def forward(self, ids, x=None):
            return self.tokens(ids) if x is None else self.tokens(ids) + self.dense(x)

    ids = np.arange(4)
    batches = [{"ids": ids, "y": ids % 3}, {"ids": ids, "x": np.ones((4, 2)), "y": ids % 3}]
    with pytest.warns(D2LDevWarning, match="data of float64 is cast to float32"):
        history = Trainer(1, 0, backend=virtual).fit(Model(), batches, loss="cross_entropy")
    assert len(history["loss"]) == 1
