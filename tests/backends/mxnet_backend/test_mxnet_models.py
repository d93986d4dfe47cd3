"""``place`` of Gluon's blocks, parameters and trainers."""

import mxnet as mx
import pytest
from numpy_semantics import NumPySemantics

from d2ldev import UnsupportedValueError, gpu
from d2ldev.framework.testing import framework_of

gluon, nn = mx.gluon, mx.gluon.nn

# Gluon makes NumPy arrays, as in a program of a user who said so.
pytestmark = pytest.mark.usefixtures("set_np")


# -- blocks and parameters --------------------------------------------------------------------


def dense(units=2, **options):
    """Return a layer initialised on the CPU, without numbers from the random state."""
    layer = nn.Dense(units, in_units=3, **options)
    layer.initialize(mx.init.Constant(0.5))
    return layer


def backpropagate(net, backend, device="cpu"):
    """Return a model with gradients in it."""
    with mx.autograd.record():
        loss = net(backend.ones((4, 3), device=device)).sum()
    loss.backward()
    return net


def test_every_way_to_ask_a_parameter_where_it_is_knows(backend):
    net = backend.place(dense(), "gpu:1")
    weight = net.weight
    assert weight.list_ctx() == [mx.cpu(2)]
    assert weight.data(mx.cpu(2)) is weight.data()
    assert weight.grad(mx.cpu(2)).ctx == mx.cpu(2)
    with pytest.raises(RuntimeError, match=r"only initialized on \[cpu\(2\)\]"):
        weight.data(mx.cpu(0))


def test_the_array_of_a_parameter_stays_the_same_object(backend):
    net = dense()
    held = net.weight.data()
    backend.place(net, "gpu:0")
    assert net.weight.data() is held
    assert held.ctx == mx.cpu(1)


def test_a_moved_gradient_is_the_one_that_is_written_to(backend):
    net = backend.place(backpropagate(dense(), backend), "gpu:0")
    with mx.autograd.record():
        loss = (net(backend.ones((1, 3), device="gpu:0")) * 2).sum()
    loss.backward()
    assert backend.to_numpy(net.weight.grad()).tolist() == [[2.0] * 3] * 2


def test_a_gradient_that_was_just_attached_is_read_whole(backend):
    """Read it while MXNet's engine may still take memory for it.

    Without a wait, some five of the 20,000 gradients had the values of memory that nobody wrote.
    """
    for _ in range(20_000):
        x = mx.np.ones(7)
        x.attach_grad()
        named = backend.named_tensors({"x": x}, gradients=True)
        assert not backend.to_numpy(named["x.grad"]).any()


@pytest.mark.parametrize(("request_", "expected"), [("write", 4.0), ("add", 8.0)])
def test_changes_of_gradients_stay(backend, request_, expected):
    net = dense()
    net.weight.grad_req = request_
    backend.place(backpropagate(net, backend), "gpu:0")
    backpropagate(net, backend, "gpu:0")
    assert net.weight.grad_req == request_
    assert float(net.weight.grad()[0, 0]) == expected


def test_a_parameter_without_a_gradient_gets_none(backend):
    net = dense()
    net.weight.grad_req = "null"
    backend.place(net, "gpu:0")
    assert net.weight._grad is None
    assert net.weight.data().grad is None


def test_the_statistics_of_a_normalization_get_no_gradient(backend):
    net = nn.BatchNorm(in_channels=3)
    net.initialize()
    backend.place(net, "gpu:0")
    assert net.running_mean.data().ctx == mx.cpu(1)
    assert net.running_mean.data().grad is None


def test_a_gradient_that_waits_for_its_step_still_waits(backend):
    net = backpropagate(dense(), backend)
    backend.place(net, "gpu:0")
    assert net.weight.data()._fresh_grad
    net.weight.data()._fresh_grad = False
    backend.place(net, "cpu")
    assert not net.weight.data()._fresh_grad


def test_names_are_those_of_the_attributes(backend):
    net = nn.HybridSequential()
    net.add(dense(use_bias=False))
    assert list(backend.placement(net)) == ["0.weight.data", "0.weight.data.grad"]


@pytest.mark.parametrize("options", [{}, {"static_alloc": True, "static_shape": True}], ids=str)
def test_a_hybridized_block_that_has_run_computes_where_it_was_placed(backend, options):
    net = backend.mlp([3, 4, 1], device="cpu")
    net.hybridize(**options)
    x = backend.rand((5, 3), seed=0)
    expected = backend.to_numpy(net(x)).tolist()
    for device in ("gpu:0", "gpu:1", "cpu"):
        backend.place(net, device)
        y = net(backend.to(x, device))
        assert backend.device_of(y) is backend.device(device)
        assert backend.to_numpy(y).tolist() == expected


def test_a_deferred_block_is_initialised_where_it_was_placed(backend):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, activation="relu"), nn.Dense(1))
    net.initialize()
    backend.place(net, "gpu:1")
    y = net(backend.ones((2, 3), device="gpu:1"))
    assert y.ctx == mx.cpu(2)
    assert set(backend.placement(net).values()) == {gpu(1)}


def test_a_block_with_nothing_but_deferred_parameters_is_placed_too(backend):
    net = nn.Dense(2, use_bias=False)
    net.initialize()
    assert backend.placement(net) == {}
    backend.place(net, "gpu:0")
    assert net.weight.list_ctx() == [mx.cpu(1)]


def test_a_failure_leaves_contexts_and_deferred_parameters_alone(backend, monkeypatch):
    net = nn.HybridSequential()
    net.add(dense(), nn.Dense(1))
    net[1].initialize()

    def fail(*_, **__):
        raise MemoryError("none left")

    monkeypatch.setattr(framework_of(backend).tensors, "transfer", fail)
    with pytest.raises(MemoryError):
        backend.place(net, "gpu:0")
    assert {repr(p.list_ctx()) for p in net.collect_params().values()} == {"[cpu(0)]"}


def test_a_dictionary_of_parameters_is_placed(backend):
    net = dense()
    parameters = net.collect_params()
    assert backend.place(parameters, "gpu:0") is parameters
    assert net.weight.list_ctx() == [mx.cpu(1)]


def test_a_parameter_alone_is_placed(backend):
    parameter = gluon.Parameter("w", shape=(2,), init="ones")
    parameter.initialize()
    backend.place([parameter], "gpu:0")
    assert parameter.data().tolist() == [1.0, 1.0]
    assert parameter.list_ctx() == [mx.cpu(1)]


def test_an_array_of_a_parameter_beside_its_block_moves_with_it(backend):
    net = backpropagate(dense(), backend)
    held = {"weight": net.weight.data(), "net": net}
    backend.place(held, "gpu:0")
    backpropagate(net, backend, "gpu:0")
    assert held["weight"] is net.weight.data()
    assert backend.to_numpy(net.weight.grad()).tolist() == [[4.0] * 3] * 2


def test_a_parameter_on_several_devices_is_refused_and_stays(backend):
    net = nn.Dense(1, in_units=3)
    net.initialize(ctx=[mx.cpu(1), mx.cpu(2)])
    with pytest.raises(UnsupportedValueError, match="reset_ctx"):
        backend.place(net, "cpu")
    assert net.weight.list_ctx() == [mx.cpu(1), mx.cpu(2)]


def test_the_placement_of_a_parameter_on_several_devices_is_all_of_them(backend):
    net = nn.Dense(1, in_units=3, use_bias=False)
    net.initialize(ctx=[mx.cpu(1), mx.cpu(2)])
    placement = backend.placement(net)
    assert placement["weight.data"] is gpu(0)
    assert placement["weight.data.1"] is gpu(1)


def test_placing_is_no_part_of_what_is_recorded(backend):
    net = dense()
    with mx.autograd.record():
        backend.place(net, "gpu:0")
        assert mx.autograd.is_recording()
        loss = net(backend.ones((1, 3), device="gpu:0")).sum()
    loss.backward()
    assert backend.to_numpy(net.weight.grad()).tolist() == [[1.0] * 3] * 2


def test_an_mlp_is_initialised_and_not_deferred(backend):
    net = backend.mlp([3, 4, 1], device="gpu:0")
    assert isinstance(net, nn.HybridSequential)
    assert [type(layer) for layer in net] == [nn.Dense, nn.Dense]
    assert net[0].weight.shape == (4, 3)
    assert not net[0].weight._deferred_init


def test_a_model_of_legacy_arrays_is_placed(backend):
    mx.npx.reset_np()
    net = dense()
    backend.place(net, "gpu:0")
    assert type(net.weight.data()) is mx.nd.NDArray
    assert net(mx.nd.ones((1, 3), ctx=mx.cpu(1))).ctx == mx.cpu(1)


@pytest.mark.parametrize("hybridized", [False, True])
def test_an_mlp_is_called_and_trained_without_set_np(backend, hybridized):
    mx.npx.reset_np()
    net = backend.mlp([3, 4, 1], device="gpu:0")
    net.hybridize(hybridized)
    backpropagate(net, backend, "gpu:0")
    with NumPySemantics():
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        trainer.step(1)
    assert backend.device_of(net(backend.ones((2, 3), device="gpu:0"))) is gpu(0)
    assert (mx.util.is_np_shape(), mx.util.is_np_array()) == (False, False)


# -- trainers: the states follow, and training goes on as if nothing had moved ------------------

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


def train_model(backend, name="adam", kvstore="device"):
    net = backend.mlp([3, 8, 1], activation="tanh")
    options = dict(OPTIMIZERS[name])
    kind = options.pop("optimizer", name)
    # In their order: by their names, which count on, two models differ, and so does Nadam.
    parameters = list(net.collect_params().values())
    return net, mx.gluon.Trainer(parameters, kind, options, kvstore=kvstore)


def train(backend, net, trainer, steps=3):
    """Return the losses of some steps, on the device where the model is."""
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
    net, trainer = train_model(backend, name)
    net.hybridize(hybridized)
    losses = train(backend, net, trainer)
    for device in ("gpu:1", "gpu:0", "cpu"):
        backend.place((net, trainer), device)
        losses += train(backend, net, trainer)
    assert losses == train(backend, *train_model(backend, name), steps=12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trainer_alone_takes_its_parameters_with_it(backend, name):
    net, trainer = train_model(backend, name)
    losses = train(backend, net, trainer)
    assert backend.place(trainer, "gpu:1") is trainer
    assert set(backend.placement(net).values()) == {gpu(1)}
    losses += train(backend, net, trainer)
    assert losses == train(backend, *train_model(backend, name), steps=6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trainer_of_a_model_that_was_placed_without_it_goes_on(backend, name):
    net, trainer = train_model(backend, name)
    losses = train(backend, net, trainer)
    backend.place(net, "gpu:1")
    losses += train(backend, net, trainer)
    assert losses == train(backend, *train_model(backend, name), steps=6)


def test_a_trainer_that_has_made_no_step_is_placed(backend):
    net, trainer = train_model(backend)
    backend.place([net, trainer], "gpu:0")
    assert train(backend, net, trainer) == train(backend, *train_model(backend))


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
    net, trainer = train_model(backend, name)
    train(backend, net, trainer)
    backend.place(trainer, "gpu:0")
    states = {n: d for n, d in backend.placement(trainer).items() if n.startswith("states.")}
    assert {name.split(".")[1] for name in states} == {"0", "1", "2", "3"}
    assert set(states.values()) == {gpu(0)}


def test_with_a_store_of_its_own_training_goes_on(backend):
    def store():
        return train_model(backend, "momentum", kvstore=mx.kv.create("local"))

    net, trainer = store()
    losses = train(backend, net, trainer)
    backend.place((net, trainer), "gpu:1")
    losses += train(backend, net, trainer)
    assert losses == train(backend, *store(), steps=6)


def test_states_can_be_saved_after_a_move_and_loaded(backend, tmp_path):
    net, trainer = train_model(backend)
    train(backend, net, trainer)
    backend.place((net, trainer), "gpu:1")
    trainer.save_states(str(tmp_path / "states"))
    losses = train(backend, net, trainer)
    twin, twins_trainer = train_model(backend)
    train(backend, twin, twins_trainer)
    twins_trainer.load_states(str(tmp_path / "states"))
    assert train(backend, twin, twins_trainer) == losses


def test_a_learning_rate_that_was_changed_stays(backend):
    net, trainer = train_model(backend)
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


# -- parameters that are not initialised -----------------------------------------------------------


@pytest.mark.parametrize("in_units", [0, 2])
def test_a_block_that_is_not_initialised_is_refused(backend, tmp_path, in_units):
    net = nn.Sequential()
    net.add(nn.Dense(2, in_units=in_units))
    with pytest.raises(UnsupportedValueError, match=r"weight\.data is not initialised.*") as error:
        backend.place(net, gpu(0))
    assert "net.initialize(ctx=backend.native(device))" in error.value.fix
    with pytest.raises(UnsupportedValueError, match="is not initialised"):
        backend.save(net, tmp_path / "net.safetensors")


def test_the_line_of_the_error_initialises_a_block_where_it_is_wanted(backend):
    net = nn.Dense(2, in_units=2)
    net.initialize(ctx=backend.native(gpu(1)))
    assert backend.place(net, gpu(1)) is net
    assert {*backend.placement(net).values()} == {gpu(1)}


def test_a_deferred_block_is_initialised_where_it_was_placed_and_saved_later(backend, tmp_path):
    net = nn.Dense(2)
    net.initialize()
    backend.place(net, gpu(1))
    with pytest.raises(UnsupportedValueError, match="before the first batch"):
        backend.save(net, tmp_path / "net.safetensors")
    with NumPySemantics():
        y = net(backend.ones((1, 3), device=gpu(1)))
    assert backend.device_of(y) is gpu(1)
    assert {*backend.placement(net).values()} == {gpu(1)}
    backend.save(net, tmp_path / "net.safetensors")
