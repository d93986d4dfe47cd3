"""``place`` of ``gluon.Trainer``: the states follow, and training goes on as if nothing moved."""

import copy

import pytest
from d2ldev_mxnet.framework import mx

from d2ldev import gpu

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1},
    "momentum": {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.1},
    "adagrad": {"learning_rate": 0.1},
    "adadelta": {},
    "rmsprop": {"learning_rate": 0.01, "centered": True},
    "nadam": {"learning_rate": 0.01},
    "ftrl": {"learning_rate": 0.01},
    "lamb": {"learning_rate": 0.01},
}

# Trainers want Gluon to make NumPy arrays.
pytestmark = pytest.mark.usefixtures("set_np")


def training(backend, name="adam", kvstore="device"):
    net = backend.mlp([3, 8, 1], activation="tanh")
    options = dict(OPTIMIZERS[name])
    kind = options.pop("optimizer", name)
    # In their order: by their names, which count on, two models differ, and so does Nadam.
    parameters = list(net.collect_params().values())
    return net, mx.gluon.Trainer(parameters, kind, options, kvstore=kvstore)


def train(backend, net, trainer, steps=3):
    """The losses of some steps, on the device where the model is."""
    device = backend.device_of(net[0].weight.data())
    x = backend.randn((16, 3), seed=5, device=device)
    y = x.sum(1, keepdims=True)
    losses = []
    for _ in range(steps):
        with mx.autograd.record():
            loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        trainer.step(1)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_exactly_the_losses_of_an_unmoved_twin(backend, name, hybridized):
    net, trainer = training(backend, name)
    net.hybridize(hybridized)
    losses = train(backend, net, trainer)
    for device in ("gpu:1", "gpu:0", "cpu"):
        backend.place((net, trainer), device)
        losses += train(backend, net, trainer)
    assert losses == train(backend, *training(backend, name), steps=12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trainer_alone_takes_its_parameters_with_it(backend, name):
    net, trainer = training(backend, name)
    losses = train(backend, net, trainer)
    assert backend.place(trainer, "gpu:1") is trainer
    assert set(backend.placement(net).values()) == {gpu(1)}
    losses += train(backend, net, trainer)
    assert losses == train(backend, *training(backend, name), steps=6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trainer_of_a_model_that_was_placed_without_it_goes_on(backend, name):
    net, trainer = training(backend, name)
    losses = train(backend, net, trainer)
    backend.place(net, "gpu:1")
    losses += train(backend, net, trainer)
    assert losses == train(backend, *training(backend, name), steps=6)


def test_a_trainer_that_has_made_no_step_is_placed(backend):
    net, trainer = training(backend)
    backend.place([net, trainer], "gpu:0")
    assert train(backend, net, trainer) == train(backend, *training(backend))


def test_a_trainer_of_deferred_parameters_is_placed(backend):
    net = mx.gluon.nn.Dense(1, use_bias=False)
    net.initialize(mx.init.Constant(0.5))
    trainer = mx.gluon.Trainer(net.collect_params(), "adam")
    backend.place((net, trainer), "gpu:1")
    with mx.autograd.record():
        loss = net(backend.ones((2, 3), device="gpu:1")).sum()
    loss.backward()
    trainer.step(1)
    assert set(backend.placement(trainer).values()) == {gpu(1)}


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad", "rmsprop"])
def test_every_state_is_moved_and_named(backend, name):
    net, trainer = training(backend, name)
    train(backend, net, trainer)
    backend.place(trainer, "gpu:0")
    states = {n: d for n, d in backend.placement(trainer).items() if n.startswith("states.")}
    assert {name.split(".")[1] for name in states} == {"0", "1", "2", "3"}
    assert set(states.values()) == {gpu(0)}


def test_with_a_store_of_its_own_training_goes_on(backend):
    def stored():
        return training(backend, "momentum", kvstore=mx.kv.create("local"))

    net, trainer = stored()
    losses = train(backend, net, trainer)
    backend.place((net, trainer), "gpu:1")
    losses += train(backend, net, trainer)
    assert losses == train(backend, *stored(), steps=6)


def test_states_can_be_saved_after_a_move_and_loaded(backend, tmp_path):
    net, trainer = training(backend)
    train(backend, net, trainer)
    backend.place((net, trainer), "gpu:1")
    trainer.save_states(str(tmp_path / "states"))
    losses = train(backend, net, trainer)
    twin, twins_trainer = training(backend)
    train(backend, twin, twins_trainer)
    twins_trainer.load_states(str(tmp_path / "states"))
    assert train(backend, twin, twins_trainer) == losses


def test_a_learning_rate_that_was_changed_stays(backend):
    net, trainer = training(backend)
    trainer.set_learning_rate(0.5)
    backend.place((net, trainer), "gpu:0")
    assert trainer.learning_rate == 0.5


def test_a_schedule_counts_on(backend):
    net = backend.mlp([3, 1])
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    train(backend, net, trainer, 2)
    before = trainer.learning_rate
    backend.place((net, trainer), "gpu:1")
    assert trainer.learning_rate == before
    train(backend, net, trainer, 1)
    assert trainer.optimizer.num_update == 3


def test_an_updater_alone_is_placed(backend):
    optimizer = mx.optimizer.create("adam", learning_rate=0.1)
    updater = mx.optimizer.get_updater(optimizer)
    weights = {name: backend.ones(3) for name in ("moved", "unmoved")}
    twin = mx.optimizer.get_updater(copy.deepcopy(optimizer))
    for step in range(4):
        if step == 2:
            updater, weights["moved"] = backend.place((updater, weights["moved"]), "gpu:1")
        for name, one in (("moved", updater), ("unmoved", twin)):
            gradient = backend.full(3, 0.1, device=backend.device_of(weights[name]))
            one(0, gradient, weights[name])
    moved, unmoved = (backend.to_numpy(weights[name]).tolist() for name in ("moved", "unmoved"))
    assert moved == unmoved


def test_a_failure_leaves_a_trainer_alone(backend, monkeypatch):
    net, trainer = training(backend)
    losses = train(backend, net, trainer)
    monkeypatch.setattr(backend, "_copy_all", None)
    with pytest.raises(TypeError):
        backend.place((net, trainer), "gpu:0")
    losses += train(backend, net, trainer)
    assert losses == train(backend, *training(backend), steps=6)
