"""``Trainer`` on MXNet: resumed runs, Gluon's loaders, inputs by name, and prefetching."""

from multiprocessing.pool import ThreadPool

import mxnet as mx
import numpy as np
import pytest
from d2ldev_mxnet.provision import Masked
from interrupted_runs import interrupt_run

import d2ldev
from d2ldev import CheckpointError, Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev.training.order import Order

nn, data = mx.gluon.nn, mx.gluon.data
MXNET = mx.lr_scheduler
EPOCHS = 3
X = np.random.RandomState(1).randn(70, 4).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]

pytestmark = [
    pytest.mark.usefixtures("numpy_s_generator"),
    # Gluon's loaders themselves call arrays by a name that MXNet has given up.
    pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed"),
]


def classifier(hybridized=False):
    """Return a model with deferred shapes, whose names have numbers that count its class."""
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(8), nn.BatchNorm(), nn.Activation("tanh"), nn.Dropout(0.3), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    net.hybridize(hybridized)
    return net


def values(net):
    return {name: p.data().asnumpy() for name, p in net._collect_params_with_prefix().items()}


def fit(backend, num_gpus, batches, model, epochs=EPOCHS, **options):
    trainer = Trainer(epochs, num_gpus, backend=backend)
    if isinstance(options.get("optimizer", "sgd"), str):  # an object has its own
        options["lr"] = 0.2
    history = trainer.fit(model, batches, loss="cross_entropy", **options)
    return history, trainer.model


# -- runs -------------------------------------------------------------------------------------


def test_a_run_that_keeps_its_state_is_repeated_by_its_seed(backend, set_np, tmp_path):
    histories = [
        fit(backend, 0, BATCHES, classifier(), checkpoint=tmp_path / name)[0] for name in "ab"
    ]
    assert histories[0] == histories[1]


def test_a_run_of_another_optimizer_is_refused_and_changes_nothing(backend, set_np, tmp_path):
    path = tmp_path / "run"
    fit(backend, 0, BATCHES, classifier(), 1, optimizer=mx.optimizer.Adam(), checkpoint=path)
    other = classifier()
    other(backend.asarray(X))
    before = values(other)
    sgd = mx.optimizer.SGD()
    with pytest.raises(CheckpointError, match="its class: SGD, Adam in the state"):
        fit(backend, 0, BATCHES, other, optimizer=sgd, checkpoint=path, resume=True)
    np.testing.assert_equal(values(other), before)


# -- what a run depends on --------------------------------------------------------------------


class Scale(mx.gluon.Block):
    """A layer of half precision that MXNet has on the CPU too; it has no dense one there."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(2,), dtype="float16", init="ones")

    def forward(self, x):
        return x * self.weight.data()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_half_precision_goes_on_with_its_single_precision_copies(backend, set_np, path, optimizer):
    def learner():
        net = Scale()
        net.initialize(ctx=backend.native("gpu:1"))
        own = mx.optimizer.create(optimizer, learning_rate=0.05, multi_precision=True)
        return backend.learner(net, optimizer=own)

    x = backend.ones((3, 2), dtype="float16", device="gpu:1")
    y = backend.full((3, 2), 2.0, dtype="float16", device="gpu:1")

    def steps(learner):
        return [learner.step((x,), y)[0].item() for _ in range(3)]

    first, again = learner(), learner()
    steps(first)
    backend.save(first.sync(), path)
    again.replace(backend.load_into(again.sync(), path))
    assert steps(again) == steps(first)


def test_a_model_is_built_by_its_first_inputs_and_not_trained(backend, set_np):
    net = classifier()
    learner = backend.learner(backend.place(net, "gpu:1"))
    assert not learner.is_built
    learner.build((backend.asarray(X, device="gpu:1"),))
    assert learner.is_built
    assert set(backend.placement(net).values()) == {backend.gpu(1)}
    assert not net[1].running_mean.data().asnumpy().any()


@pytest.mark.parametrize("modes", [None, 3, {}, [], ["write"], ["write", "backwards"]], ids=str)
def test_invalid_modes_are_refused(backend, modes):
    learner = backend.learner(backend.mlp([2, 1]))
    with pytest.raises(CheckpointError, match="of another model"):
        learner.check_modes(modes)
    assert learner.modes() == ["write", "write"]


def test_gradients_of_parameters_whose_mode_stays_are_left_alone(backend, set_np):
    net = backend.mlp([2, 1])
    learner = backend.learner(net)
    learner.step((backend.ones((3, 2)),), backend.zeros((3, 1)))
    before = net[0].weight.grad().asnumpy()
    learner.check_modes(["write", "null"])()
    assert learner.modes() == ["write", "null"]
    np.testing.assert_array_equal(net[0].weight.grad().asnumpy(), before)
    assert before.any()


@pytest.mark.parametrize("seed", [None, "3", True, -1, 2**31, 2**32 + 5, 10**30], ids=str)
def test_a_seed_of_which_mxnet_would_take_another_is_refused(backend, seed):
    training = framework_of(backend).training
    mx.random.seed(3)
    expected = backend.rand(3).asnumpy().tolist()
    mx.random.seed(3)
    with pytest.raises(CheckpointError, match="is not a generator's state"):
        training.check_random_state(seed, backend.cpu())
    assert backend.rand(3).asnumpy().tolist() == expected


def test_random_numbers_go_on_from_their_state(backend):
    training = framework_of(backend).training
    mx.random.seed(3)
    state = training.random_state(backend.cpu())
    expected = backend.rand(3).asnumpy().tolist()
    mx.random.seed(4)
    training.check_random_state(state, backend.cpu())()
    assert backend.rand(3).asnumpy().tolist() == expected


# -- learning rates on a schedule ---------------------------------------------------------------

# Four batches an epoch, and four epochs: what happens in step 8 and after it tells the runs apart.
SCHEDULES = {
    "factor": lambda: MXNET.FactorScheduler(3, 0.5, base_lr=0.1),
    "some factors": lambda: MXNET.MultiFactorScheduler([6, 10], 0.1, base_lr=0.1),
    "polynomial": lambda: MXNET.PolyScheduler(16, 0.1),
    "cosine": lambda: MXNET.CosineScheduler(16, 0.1),
    "warm-up": lambda: MXNET.CosineScheduler(16, 0.1, warmup_steps=10),
}


def hand_in_alone(net, schedule):
    """Return the optimizer, of which d2ldev makes the ``gluon.Trainer``."""
    return mx.optimizer.create("adam", learning_rate=0.1, lr_scheduler=schedule)


def in_a_trainer(net, schedule):
    """Return the user's own ``gluon.Trainer``, made before the model is placed."""
    parameters = list(net.collect_params().values())
    return mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1, "lr_scheduler": schedule})


@pytest.mark.usefixtures("set_np")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("made", [hand_in_alone, in_a_trainer])
def test_a_schedule_goes_on_where_it_was(backend, tmp_path, made, schedule):
    inputs = np.linspace(-1, 1, 28, dtype="float32").reshape(14, 2)

    def train(epochs, seed=0, **options):
        """Return the history and the parameters; the model and the order begin with the seed."""
        loader = d2ldev.ArrayLoader(
            inputs, inputs[:, :1] ** 2, batch_size=4, shuffle=True, seed=seed
        )
        trainer = Trainer(epochs, 1, backend=backend)
        net = backend.mlp([2, 4, 1], seed=seed)
        history = trainer.fit(net, loader, optimizer=made(net, SCHEDULES[schedule]()), **options)
        return history, values(trainer.model)

    path = tmp_path / "run.safetensors"
    expected, parameters = train(4)
    train(2, checkpoint=path)
    history, resumed = train(4, 9, checkpoint=path, resume=True)
    assert history == expected
    assert len(parameters) == 4
    np.testing.assert_equal(resumed, parameters)


# -- Gluon's loaders ----------------------------------------------------------------------------


def end_workers(loader):
    """Let workers end by themselves: Gluon terminates them, and one may leave its folder behind."""
    pool = loader._worker_pool or ThreadPool(1)
    pool.close()
    pool.join()


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_same_as_arrays(backend, set_np, num_gpus, workers):
    loader = data.DataLoader(data.ArrayDataset(X, Y), 16, num_workers=workers)
    expected, _ = fit(backend, num_gpus, BATCHES, classifier())
    history, model = fit(backend, num_gpus, loader, classifier())
    end_workers(loader)
    assert history == expected
    device = backend.gpu(0) if num_gpus else backend.cpu()
    assert set(backend.placement(model).values()) == {device}


@pytest.mark.parametrize("in_step", [True, False], ids=["in a step", "waiting"])
def test_ctrl_c_that_reaches_workers_too_ends_the_run_after_the_step(tmp_path, in_step):
    """Gluon's loader starts them before the run, and so they end by it."""
    made = """
        from d2ldev import mxnet  # first: it makes up for what NumPy has dropped
        import mxnet as mx
        from slow_data import Slow
        mx.npx.set_np()
        net = mx.gluon.nn.Dense(1, in_units=3)
        net.initialize()
        loader = mx.gluon.data.DataLoader(Slow(), 4, num_workers=2)
    """
    shown = interrupt_run("mxnet", made, tmp_path, in_step=in_step)
    assert shown == [{"loss": [], "lr": []}, 2, True]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"pin_memory": True}], ids=str)
def test_a_hybridized_block_takes_what_loaders_share_and_pin(backend, set_np, options):
    loader = data.DataLoader(data.ArrayDataset(X, Y), 16, **options)
    places = {array.ctx.device_type for batch in loader for array in batch}
    expected, _ = fit(backend, 0, BATCHES, classifier(hybridized=True))
    history, _ = fit(backend, 0, loader, classifier(hybridized=True), val_data=loader)
    end_workers(loader)
    assert places <= {"cpu_shared", "cpu_pinned"}
    assert history["loss"] == expected["loss"]


@pytest.mark.parametrize("kind", ["cpu_shared", "cpu_pinned"])
def test_what_loaders_share_and_pin_is_on_the_cpu(backend, kind):
    x = mx.np.ones((2, 3), ctx=mx.Context(kind, 0))
    assert backend.device_of(x) is backend.cpu()
    assert backend.to([x], "cpu")[0] is x
    assert [batch.sum().item() for batch in backend.prefetch([x], "gpu:0")] == [6]
    assert backend.copy(x).ctx == mx.cpu()


@pytest.mark.filterwarnings("ignore:Please import .csr_matrix")  # as mx.nd.array does
def test_a_loader_of_arrays_of_the_old_kind_trains(backend):
    """As they come where ``npx.set_np()`` was not called."""
    x, y = (backend.asarray(array).as_nd_ndarray() for array in (X, Y))
    loader = data.DataLoader(data.ArrayDataset(x, y), 16)
    assert {type(array) for batch in loader for array in batch} == {mx.nd.NDArray}
    net = backend.mlp([4, 8, 2])
    history, _ = fit(backend, 1, loader, net, val_data=loader, metrics=["accuracy"])
    assert history["loss"][-1] < history["loss"][0]
    assert history["val_accuracy"][-1] > 0.8


def passes(loader, number):
    for _ in range(number):
        last = [batch.asnumpy().tolist() for batch in loader]
    return last


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 16, "shuffle": True},
        {"batch_size": 16, "sampler": data.RandomSampler(70)},
        {"batch_sampler": [[3, 1], [2, 0]]},
    ],
    ids=["shuffled", "a sampler of Gluon's", "batches"],
)
def test_the_order_goes_on_in_another_process(set_np, options):
    def build():
        return data.DataLoader(data.ArrayDataset(np.arange(70)), **options)

    loader = build()
    passes(loader, 2)
    state = Order(loader).state()
    expected = passes(loader, 1)
    np.random.seed(5)
    again = build()
    Order(again).check(state)()
    assert passes(again, 1) == expected


# -- batches that are dicts: Gluon's blocks get their inputs by name ------------------------------

RANDOM = np.random.RandomState(0)
INPUT, MASK, TARGET = (RANDOM.rand(8, 3).astype("float32") for _ in range(3))
ORDERS = [{"mask": MASK, "x": INPUT, "y": TARGET}, {"y": TARGET, "x": INPUT, "mask": MASK}]


class Hybrid(mx.gluon.HybridBlock):
    """A block with a parameter of its own, which Gluon gives to it."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(3, 3))

    def hybrid_forward(self, F, x, mask=None, scale=None, *, weight):  # noqa: N803
        return F.np.dot(x, weight) * mask


class Mixed(Hybrid):
    """A block with its parameter among the inputs, as Gluon's own layers have it."""

    def hybrid_forward(self, F, x, weight, mask):  # noqa: N803
        return F.np.dot(x, weight) * mask


def initialize(model):
    mx.random.seed(0)
    net = model()
    net.initialize()
    return net


def test_a_hybridized_block_has_the_same_names(backend, set_np):
    net = initialize(Hybrid)
    net.hybridize()
    assert backend.learner(net).signature.names == ("x", "mask", "scale")


def test_a_blocks_own_parameters_are_not_inputs(backend, set_np):
    assert backend.learner(initialize(Mixed)).signature.names == ("x", "mask")


def test_a_gap_between_inputs_is_refused(backend, set_np):
    net = initialize(Masked)
    with pytest.raises(UnsupportedValueError, match="'mask' before 'scale'"):
        Trainer(1, backend=backend).fit(net, [{"x": INPUT, "scale": MASK, "y": TARGET}])


def test_gluon_s_metrics_measure_an_epoch(backend, set_np):
    net = initialize(Masked)
    trainer = Trainer(1, min(1, backend.num_gpus()), backend=backend)
    history = trainer.fit(net, [ORDERS[0]], metrics=[mx.metric.MSE()])
    np.testing.assert_allclose(history["mse"], history["loss"], rtol=1e-6)


def test_gluon_s_losses_are_called_with_the_prediction_first(backend, set_np):
    net = initialize(Masked)
    entropy = mx.gluon.loss.SigmoidBinaryCrossEntropyLoss()
    prediction = net(mx.np.array(INPUT), mx.np.array(MASK))
    expected = entropy(prediction, mx.np.array(TARGET)).mean().item()
    trainer = Trainer(1, backend=backend)
    history = trainer.fit(net, [ORDERS[0]], loss=lambda p, y: entropy(p, y).mean())
    assert history["loss"] == pytest.approx([expected])


class WeightedSquares(mx.gluon.HybridBlock):
    """A loss that is a block, which takes nothing by name."""

    def hybrid_forward(self, F, prediction, label, sample_weight=None):  # noqa: N803
        losses = ((prediction - label) ** 2).mean(-1)
        return (losses if sample_weight is None else losses * sample_weight).mean()


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_loss_that_is_a_block_is_given_the_weights(backend, set_np, hybridized):
    x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
    net, found = backend.mlp([2, 1]), []
    for weights in ({}, {"sample_weight": np.array([1, 3], "float32")}):
        loss = WeightedSquares()
        loss.hybridize(hybridized)
        batch = {"x": x, "y": y, **weights}
        found.append(Trainer(1, backend=backend).validate(net, [batch], loss=loss)["loss"])
    assert found[1] == pytest.approx(2 * found[0])


# -- prefetching: MXNet's engine copies beside what it computes, and nobody waits for it -----------

WAITS = [
    (mx.nd, "waitall"),
    (mx.npx, "waitall"),
    *((mx.nd.NDArray, name) for name in ("wait_to_read", "asnumpy", "_sync_copyfrom")),
]


@pytest.fixture
def no_waiting():
    """Makes everything fail that waits for MXNet's engine, until it is called."""
    patch = pytest.MonkeyPatch()
    for owner, name in WAITS:
        patch.setattr(owner, name, _refuse_method(name))
    yield patch.undo
    patch.undo()


def _refuse_method(name):
    def refuse(*args, **kwargs):
        raise AssertionError(f"{name} waits for the engine")

    return refuse


@pytest.mark.parametrize("device", [d2ldev.gpu(0), d2ldev.gpu(1)])
def test_nothing_is_waited_for_and_the_batches_are_the_same(backend, no_waiting, device):
    batches = [(backend.full((2, 3), float(i)), backend.full(2, i)) for i in range(5)]
    moved = list(backend.prefetch(batches, device))
    no_waiting()
    assert [backend.device_of(x) for batch in moved for x in batch] == [device] * 10
    for number, (x, y) in enumerate(moved):
        np.testing.assert_array_equal(backend.to_numpy(x), np.full((2, 3), number, "float32"))
        np.testing.assert_array_equal(backend.to_numpy(y), np.full(2, number))


def test_what_waits_is_refused_in_these_tests(backend, no_waiting):
    x = backend.ones(2)
    for wait in (x.asnumpy, x.wait_to_read, mx.nd.waitall, mx.npx.waitall):
        with pytest.raises(AssertionError, match="waits for the engine"):
            wait()


def test_arrays_of_numpy_go_to_a_real_gpu_by_way_of_tensors_which_nobody_waits_for(
    backend, monkeypatch
):
    """Only the copies into the host's memory, which are made at once, end before the call does."""
    framework = type(framework_of(backend))(virtual_gpus=2)
    backend, copied, transfer = d2ldev.Backend(framework), [], framework.tensors.transfer

    def count(xs, native, *, copy):
        copied.extend([native] * len(xs))
        return transfer(xs, native, copy=copy)

    monkeypatch.setattr(framework.tensors, "transfer", count)
    monkeypatch.setattr(framework.devices, "platform", lambda device: "cuda")
    arrays = [(np.full((2, 3), number, "float32"), np.full(2, number)) for number in range(5)]
    batches = backend.prefetch(arrays, "gpu:0")
    first = next(batches)
    assert copied == [mx.cpu(1)] * 6
    moved = [first, *batches]
    assert copied == [mx.cpu(1)] * 10
    for batch, expected in zip(moved, arrays, strict=True):
        for x, array in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(x), array)
