"""``Trainer`` on MXNet: ``gluon.data.DataLoader``, arrays, and runs that are resumed."""

from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
from d2ldev_mxnet.framework import mx

from d2ldev.training.order import GENERATORS, PASSES, Order, count_pass
from d2ldev.training.trainer import Trainer

# Gluon's loaders themselves call arrays by a name that MXNet has given up.
pytestmark = pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed")
nn, data = mx.gluon.nn, mx.gluon.data
EPOCHS = 3
X = np.random.RandomState(1).randn(70, 4).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


@pytest.fixture(autouse=True)
def _numpy_s_generator():
    """Gluon's loaders shuffle with it, and resuming a run sets it."""
    before = np.random.get_state()
    np.random.seed(5)
    yield
    np.random.set_state(before)


def classifier(hybridized=False):
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
    history = trainer.fit(model, batches, loss="cross_entropy", lr=0.2, **options)
    return history, trainer.model


def end_workers(loader):
    """Let them end by themselves: Gluon terminates them, and one may leave its folder behind."""
    pool = loader._worker_pool or ThreadPool(1)
    pool.close()
    pool.join()


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_same_as_arrays(backend, set_np, num_gpus, workers):
    loader = data.DataLoader(data.ArrayDataset(X, Y), 16, num_workers=workers)
    arrays = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]
    expected, _ = fit(backend, num_gpus, arrays, classifier())
    history, model = fit(backend, num_gpus, loader, classifier())
    end_workers(loader)
    assert history == expected
    device = backend.gpu(0) if num_gpus else backend.cpu()
    assert set(backend.placement(model).values()) == {device}


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


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_virtual_gpu_gives_the_cpus_curve(backend, set_np, hybridized):
    arrays = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]
    on_the_cpu, on_the_gpu = (
        fit(backend, num_gpus, arrays, classifier(hybridized), val_data=arrays)
        for num_gpus in (0, 1)
    )
    assert on_the_gpu[0] == on_the_cpu[0]
    np.testing.assert_equal(values(on_the_gpu[1]), values(on_the_cpu[1]))


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    backend, set_np, num_gpus, optimizer, tmp_path
):
    """With the order of the batches and the dropout that it would have had."""
    loader = data.DataLoader(data.ArrayDataset(X, Y), 16, shuffle=True)
    options = {"optimizer": optimizer}
    unbroken = tmp_path / "unbroken.safetensors"
    expected, model = fit(backend, num_gpus, loader, classifier(), checkpoint=unbroken, **options)
    np.random.seed(5)
    path = tmp_path / "run.safetensors"
    fit(backend, num_gpus, loader, classifier(), epochs=1, checkpoint=path, **options)
    np.random.seed(99)
    history, resumed = fit(
        backend, num_gpus, loader, classifier(True), checkpoint=path, resume=True, **options
    )
    assert history == expected
    np.testing.assert_equal(values(resumed), values(model))


def test_a_run_with_a_trainer_of_the_users_own_is_resumed(backend, set_np, tmp_path):
    loader = data.DataLoader(data.ArrayDataset(X, Y), 16, shuffle=True)

    def run(epochs, path, **options):
        np.random.seed(5)
        net = classifier()
        trainer = mx.gluon.Trainer(net.collect_params(), "nadam", {"learning_rate": 0.05})
        return fit(backend, 1, loader, net, epochs, optimizer=trainer, checkpoint=path, **options)[
            0
        ]

    expected = run(EPOCHS, tmp_path / "unbroken.safetensors")
    run(2, tmp_path / "run.safetensors")
    assert run(EPOCHS, tmp_path / "run.safetensors", resume=True) == expected


class OwnSampler(data.Sampler):
    """It has random numbers that Gluon does not know of."""

    def __init__(self):
        self.random = np.random.default_rng(4)

    def __iter__(self):
        return iter(self.random.permutation(70))

    def __len__(self):
        return 70


class OwnLoader(data.DataLoader):
    """It has an order that is none of Gluon's."""

    epoch = 0

    def __iter__(self):
        chosen = np.random.default_rng(self.epoch).permutation(70)
        self.epoch += 1
        return iter([mx.np.array(chosen)])


NUMBERS = data.ArrayDataset(np.arange(70))
LOADERS = {
    "shuffled": lambda: data.DataLoader(NUMBERS, 16, shuffle=True),
    "rolled over": lambda: data.DataLoader(NUMBERS, 16, shuffle=True, last_batch="rollover"),
    "a sampler of the user's": lambda: data.DataLoader(NUMBERS, 16, sampler=OwnSampler()),
    "a loader of the user's": lambda: OwnLoader(NUMBERS, 16),
    "reloaded": lambda: data.DataLoader(NUMBERS, 16, shuffle=True, auto_reload=True),
    "batches": lambda: data.DataLoader(NUMBERS, batch_sampler=[[3, 1], [2, 0]]),
}


def passes(loader, number):
    for _ in range(number):
        count_pass(loader)
        last = [batch.asnumpy().tolist() for batch in loader]
    return last


@pytest.mark.parametrize("name", LOADERS)
def test_the_order_goes_on_in_another_process(set_np, name):
    loader = LOADERS[name]()
    passes(loader, 2)
    state = Order(loader).state()
    expected = passes(loader, 1)
    np.random.seed(5)
    again = LOADERS[name]()
    Order(again).checked(state)()
    assert passes(again, 1) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("shuffled", GENERATORS), ("batches", GENERATORS), ("rolled over", PASSES)),
        *(("a sampler of the user's", PASSES), ("a loader of the user's", PASSES)),
        ("reloaded", PASSES),
    ],
)
def test_what_gluon_does_not_know_is_gone_through(name, kind):
    assert Order(LOADERS[name]()).state()["kind"] == kind


def test_what_a_callback_has_frozen_stays_frozen_in_a_resumed_run(backend, set_np, tmp_path):
    """As from the first epoch on, and thawed after the third."""

    def run(epochs, path, **options):
        net = classifier()

        def freeze(epoch, history):
            net[0].collect_params().setattr("grad_req", "write" if epoch == 2 else "null")

        trainer = Trainer(epochs, 1, backend=backend, callback=freeze)
        trainer.fit(
            net, batches, loss="cross_entropy", optimizer="adam", checkpoint=path, **options
        )
        return values(net)

    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 70, 16)]
    expected = run(4, tmp_path / "unbroken")
    run(2, tmp_path / "run")
    found = run(4, tmp_path / "run", resume=True)
    np.testing.assert_equal(found, expected)
