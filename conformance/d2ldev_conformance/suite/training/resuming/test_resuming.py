"""D2L 6.7.3 with 6.6: a run goes on, on another device, and with all that it depends on.

A cluster ends jobs, and the next machine may be another. The run has to end as if nothing had
happened.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from d2ldev import ArrayLoader, Trainer
from d2ldev_conformance.provision import freezables, networks, own_optimizers, views
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, assert_same_values, values_of

SECTION = "6.7.3"
SOURCE = "contract, Resuming a run"
# Batches are of one size: for each one a framework compiles the steps anew.
EPOCHS = 4


def _train(backend, epochs, num_gpus, seed=0, own_optimizer=None, **options):
    """Return a trainer after its run, and the history; both begin with a seed of their own."""
    inputs = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
    targets = inputs @ np.array([[2.0], [-3.4]], "float32") + np.float32(4.2)
    loader = ArrayLoader(inputs, targets, batch_size=4, shuffle=True, seed=seed)
    trainer = Trainer(epochs, num_gpus, backend=backend)
    net = backend.mlp([2, 4, 1], seed=seed)
    how = {"optimizer": own_optimizer(net)} if own_optimizer else {"optimizer": "adam", "lr": 0.1}
    return trainer, trainer.fit(net, loader, **how, **options)


@pytest.fixture
def runs(backend, tmp_path):
    """The unbroken run on one device, and the one that was broken off on another and resumed."""

    def make(num_gpus_before, num_gpus, own_optimizer=None):
        options = {"checkpoint": tmp_path / "run.safetensors", "own_optimizer": own_optimizer}
        _train(backend, EPOCHS // 2, num_gpus_before, **options)
        resumed = _train(backend, EPOCHS, num_gpus, 9, resume=True, **options)
        return _train(backend, EPOCHS, num_gpus, own_optimizer=own_optimizer), resumed

    return make


@requirement("fit.resumes-elsewhere", section=SECTION)
@pytest.mark.needs_gpus(1)
@pytest.mark.parametrize(
    ("num_gpus_before", "num_gpus"), [(0, 1), (1, 0)], ids=["cpu-gpu0", "gpu0-cpu"]
)
def test_a_run_resumed_on_another_device_stays_there_and_ends_close(
    backend, runs, num_gpus_before, num_gpus
):
    """Resume a run on another device, stay there, and end close to an unbroken one."""
    (unbroken, expected), (resumed, history) = runs(num_gpus_before, num_gpus)
    there = backend.gpu(0) if num_gpus else backend.cpu()
    assert set(backend.placement(resumed.model).values()) == {there}
    # Devices add in other orders, and round a gradient by 1e-6 of itself. Adam divides it by its
    # size. So each of the 16 steps differs by about 1e-6 of the learning rate, 0.1.
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4)
    values = values_of(backend, resumed.model)
    for name, value in values_of(backend, unbroken.model).items():
        np.testing.assert_allclose(values[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


class Numbered:
    """The numbers of examples, in an order that depends on the number of the epoch."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(6))


class Batches:
    """Data in the order of one of its parts.

    Args:
        path: the names of the attributes that lead to the part.
        seen: gets the number of each example.
    """

    def __init__(self, path, seen):
        self._seen = seen
        self._order = Numbered()
        if not path:
            self.set_epoch = self._order.set_epoch
        elif len(path) == 1:
            setattr(self, path[0], self._order)
        else:
            setattr(self, path[0], Batches(path[1:], seen))
            self._order = getattr(self, path[0])._order

    def __iter__(self):
        for number in self._order:
            self._seen.append(int(number))
            yield np.full((1, 2), number, "float32"), np.full((1, 1), number, "float32")


@requirement("fit.tells-epochs", section=SECTION)
@pytest.mark.parametrize(
    "path",
    [[], ["dataset"], ["sampler"], ["batch_sampler"], ["batch_sampler", "sampler"]],
    ids=".".join,
)
def test_what_decides_the_order_is_told_the_number_of_each_epoch(backend, place, path, tmp_path):
    """Tell data, its dataset and its samplers the number of each epoch, also of a resumed run.

    Otherwise each epoch has one order.
    """

    def fit(epochs, **options):
        seen = []
        trainer = Trainer(epochs, int(place.kind == "gpu"), backend=backend)
        trainer.fit(backend.mlp([2, 1]), Batches(path, seen), lr=1e-3, **options)
        return seen

    orders = [np.random.default_rng(epoch).permutation(6) for epoch in range(EPOCHS)]
    expected = np.concatenate(orders).tolist()
    run = tmp_path / "run.safetensors"
    assert fit(EPOCHS) == expected
    assert fit(2, checkpoint=run) == expected[:12]
    assert fit(EPOCHS, checkpoint=run, resume=True) == expected[12:]


@requirement("fit.resumes-in-place", section=SECTION)
def test_a_resumed_run_writes_into_the_memory_of_its_model(backend, viewed, tmp_path):
    """Write into the memory of the model of a resumed run, where that memory can be written.

    Other processes may have the model in shared memory.
    """
    build, list_views = views(backend)[viewed]
    first, second = build(1, backend.cpu()), build(2, backend.cpu())
    held = list_views(second)
    options = {"checkpoint": tmp_path / "run.safetensors"}
    Trainer(0, 0, backend=backend).fit(first, [], **options)
    Trainer(0, 0, backend=backend).fit(second, [], resume=True, **options)
    for x, value in zip(held, list_views(first), strict=True):
        assert_same(backend.to_numpy(x), backend.to_numpy(value))


@requirement("fit.resumes-own-optimizers", section=SECTION)
@pytest.mark.parametrize(
    "num_gpus", [0, pytest.param(1, marks=pytest.mark.needs_gpus(1))], ids=["cpu", "gpu0"]
)
def test_a_resumed_run_with_a_users_optimizer_ends_like_an_uninterrupted_one(
    backend, runs, num_gpus, own_optimizer
):
    """Resume a run with an optimizer of the user's own, bit for bit.

    Its state is where the framework's class keeps it.
    """
    make = own_optimizers(backend)[own_optimizer]
    (unbroken, expected), (resumed, history) = runs(num_gpus, num_gpus, make)
    assert history == expected
    assert_same_values(backend, resumed.model, values_of(backend, unbroken.model))


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.needs_gpus(1))], ids=["cpu", "gpu0"])
def runs_of(request, backend, tmp_path):
    """Both runs of a network, one unbroken and one that was broken off and resumed.

    They begin with the same state of all random numbers, which a run of no epochs has saved.
    """
    inputs = np.random.default_rng(0).standard_normal((15, 4)).astype("float32")
    batches = [(x, (x.sum(1) > 0).astype("int32")) for x in np.split(inputs, [5, 10])]
    paths = [tmp_path / name for name in ("begun", "unbroken", "broken")]

    def run(build, epochs, path, callback):
        trainer = Trainer(epochs, request.param, backend=backend)
        trainer.callbacks = callback and (lambda epoch, _: callback(epoch, trainer.model))
        options = {"loss": "cross_entropy", "optimizer": "adam", "checkpoint": path, "resume": True}
        return trainer, trainer.fit(build(backend.cpu()), batches, batches, **options)

    def make(build, callback=None):
        begun, unbroken, broken = paths
        run(build, 0, begun, callback)
        for path in (unbroken, broken):
            shutil.copy(begun, path)
        run(build, EPOCHS // 2, broken, callback)
        return [run(build, EPOCHS, path, callback) for path in (unbroken, broken)]

    return make


@requirement("fit.resumes-random-numbers", section=SECTION)
def test_a_resumed_network_with_dropout_ends_like_an_uninterrupted_one(backend, runs_of, network):
    """Resume a network with dropout, bit for bit.

    The state of the random numbers is a part of the run.
    """
    (unbroken, expected), (resumed, history) = runs_of(networks(backend)[network])
    assert history == expected
    assert_same_values(backend, resumed.model, values_of(backend, unbroken.model))


@requirement("fit.resumes-what-is-frozen", section=SECTION)
@pytest.mark.parametrize("runs_of", [0], indirect=True, ids=["cpu"])
@pytest.mark.parametrize("begins_frozen", [False, True], ids=["frozen later", "thawed later"])
def test_a_resumed_run_keeps_parameters_frozen_that_a_callback_froze(
    backend, runs_of, freezable, begins_frozen
):
    """Keep parameters frozen in a resumed run that a callback had frozen.

    Thawed layers would forget what they have learned.

    From the first epoch to the third, in a run that is broken off after the second.
    """
    build, freeze = freezables(backend)[freezable]

    def begin(device):
        net = build(device)
        freeze(net, begins_frozen)
        return net

    def callback(epoch, net):
        freeze(net, begins_frozen if epoch >= EPOCHS // 2 else not begins_frozen)

    (unbroken, expected), (resumed, history) = runs_of(begin, callback)
    assert history == expected
    assert_same_values(backend, resumed.model, values_of(backend, unbroken.model))
