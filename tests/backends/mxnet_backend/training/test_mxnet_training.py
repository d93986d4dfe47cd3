"""Learners on MXNet: the hand-written loop's numbers, without waiting; what cannot be trained."""

import gc
import itertools

import mxnet as mx
import numpy as np
import pytest

from d2ldev import Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of

nn = mx.gluon.nn
# Gluon's recurrent layers themselves ask arrays by a name that MXNet has given up.
pytestmark = pytest.mark.filterwarnings("ignore:ndarray.context has been renamed")
OPTIMIZERS = "sgd", "momentum", "adam", "adagrad"


@pytest.fixture(autouse=True)
def _numpy_arrays(set_np):
    """As a user of Gluon with NumPy arrays begins."""


def images():
    net = nn.HybridSequential()
    # No bias before the batch normalisation: its gradient is rounding, which Adam makes large.
    net.add(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Dropout(0.3), nn.Dense(3))
    return net


class Tokens(mx.gluon.Block):
    """An embedding and an LSTM, with two inputs."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(7, 5), mx.gluon.rnn.LSTM(4, layout="NTC", input_size=5)
        self.head = nn.Dense(3)

    def forward(self, x, scale):
        return self.head(mx.np.concatenate([self.rnn(self.embed(x))[:, -1], scale], 1))


def batches(backend, model, device, number=4):
    draw = np.random.RandomState(1)
    for _ in range(number):
        if model is Tokens:
            inputs = draw.randint(0, 7, (8, 5)), draw.randn(8, 1).astype("float32")
        else:
            inputs = (draw.randn(8, 1, 6, 6).astype("float32"),)
        y = backend.asarray(draw.randint(0, 3, 8), device=device)
        yield tuple(backend.asarray(x, device=device) for x in inputs), y


def initialize(backend, model, device, hybridized=False):
    net = model()
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), ctx=backend.native(device))
    net.hybridize(hybridized)
    return net


def values(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def by_hand(backend, net, optimizer, largest, some):
    parameters = list(net.collect_params().values())
    # A requirement compares the optimizers with NumPy.
    other = backend.learner(backend.mlp([2, 1]), loss="mse", optimizer=optimizer, lr=0.05)
    trainer = mx.gluon.Trainer(parameters, other.sync()["optimizer"].optimizer)
    loss_of, losses = mx.gluon.loss.SoftmaxCrossEntropyLoss(), []
    mx.random.seed(4)
    for inputs, y in some:
        with mx.autograd.record():
            loss = loss_of(net(*inputs), y).mean()
        loss.backward()
        if largest:
            gradients = [p.grad() for p in parameters if p.grad_req != "null"]
            mx.gluon.utils.clip_global_norm([g.as_nd_ndarray() for g in gradients], largest)
        trainer.step(1)
        losses.append(loss.item())
    return losses, values(net)


def by_learner(backend, net, optimizer, largest, some):
    learner = backend.learner(
        net, loss="cross_entropy", optimizer=optimizer, lr=0.05, gradient_clip_val=largest
    )
    mx.random.seed(4)
    losses = [learner.step(*batch)[0].item() for batch in some]
    return losses, values(learner.sync()["model"])


@pytest.mark.parametrize("where", ["cpu", "gpu:1"])
@pytest.mark.parametrize("largest", [0, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "hybridized"), [(images, False), (images, True), (Tokens, False)]
)
def test_steps_give_the_hand_written_loop(backend, model, hybridized, optimizer, largest, where):
    some = list(batches(backend, model, where))
    net = initialize(backend, model, where, hybridized)
    expected, parameters = by_hand(backend, net, optimizer, largest, some)
    net = initialize(backend, model, where, hybridized)
    losses, found = by_learner(backend, net, optimizer, largest, some)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for x, y in zip(found, parameters, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


WAITING = ("SyncCopyToCPU", "SyncCopyFromCPU", "WaitToRead", "WaitToWrite", "WaitAll")


@pytest.fixture
def calls(monkeypatch):
    """What waited for the engine, or copied an array, since the test began."""
    found = []

    def count(name, function):
        def call(*args, **options):
            found.append(name)
            return function(*args, **options)

        return call

    library = mx.base._LIB
    for name in WAITING:
        function = getattr(library, f"MXNDArray{name}")
        monkeypatch.setattr(library, f"MXNDArray{name}", count(name, function))
    for kind in (mx.nd.NDArray, mx.np.ndarray):
        for name in ("copyto", "as_in_context"):
            monkeypatch.setattr(kind, name, count(name, getattr(kind, name)))
    return found


def test_the_counter_of_waits_counts(backend, calls):
    x = backend.ones((2, 3), device="gpu:1")
    del calls[:]
    x.copyto(mx.cpu())
    x.asnumpy()
    assert calls == ["copyto", "SyncCopyToCPU"]


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_waits_for_nothing_and_moves_nothing(backend, calls, optimizer, hybridized):
    net = initialize(backend, images, "gpu:1", hybridized)
    learner = backend.learner(net, loss="cross_entropy", optimizer=optimizer, gradient_clip_val=0.1)
    first, second, third = batches(backend, images, "gpu:1", 3)
    learner.step(*first)  # which initialises what was deferred
    del calls[:]
    with backend.strict():
        learner.step(*second)
        learner.evaluate(*third)
    assert calls == []


def test_evaluation_inside_a_recording_records_nothing(backend):
    net = initialize(backend, images, "cpu")
    learner = backend.learner(net, loss="cross_entropy")
    ((inputs, y),) = batches(backend, images, "cpu", 1)
    learner.step(inputs, y)
    with mx.autograd.record():
        _, prediction = learner.evaluate(inputs, y)
    np.testing.assert_array_equal(prediction.asnumpy(), net(*inputs).asnumpy())


class Either(mx.gluon.Block):
    """A block that uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dense(1, in_units=2), nn.Dense(1, in_units=2)

    def forward(self, x, uses_a):
        return (self.a if uses_a else self.b)(x)


def test_a_gradient_of_an_earlier_step_is_not_clipped_with(backend):
    net = initialize(backend, Either, "cpu")
    learner = backend.learner(net, lr=0.0, gradient_clip_val=0.5)
    learner.step((backend.ones((3, 2)), True), backend.full((3, 1), 1e6))
    learner.step((backend.ones((3, 2)), False), backend.full((3, 1), 1e6))
    gradients = [p.grad().asnumpy() for p in (net.b.weight, net.b.bias)]
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    np.testing.assert_allclose(norm, 0.5, rtol=1e-4)


def test_accumulated_gradients_are_reset_in_each_step(backend):
    def losses(request):
        net = initialize(backend, lambda: nn.Dense(1, in_units=2), "cpu")
        net.collect_params().setattr("grad_req", request)
        learner = backend.learner(net, lr=0.1)
        x, y = backend.ones((3, 2)), backend.full((3, 1), 2.0)
        return [learner.step((x,), y)[0].item() for _ in range(4)]

    assert losses("add") == losses("write")


@pytest.mark.parametrize("optimizer", ["Optimizer", mx.gluon.Trainer])
def test_what_makes_no_optimizer_of_mxnet_is_not_proposed(backend, optimizer):
    net = initialize(backend, images, "cpu")
    with pytest.raises(UnsupportedValueError) as error:
        backend.learner(net, optimizer=optimizer)
    assert error.value.fix.startswith("optimizer=mxnet.optimizer.SGD(learning_rate=0.01), ")


def test_a_loss_of_gluons_is_refused_without_its_mean(backend):
    ((inputs, y),) = batches(backend, images, "cpu", 1)
    net = initialize(backend, images, "cpu")
    own = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    with pytest.raises(UnsupportedValueError, match=r"of shape \(8,\), not a scalar") as error:
        backend.learner(net, loss=own).step(inputs, y)
    call = "lambda prediction, y: loss_fn(prediction, y).mean()"
    assert error.value.fix == f"loss={call}, after loss_fn = ..."
    mean = backend.learner(net, loss=lambda prediction, y: own(prediction, y).mean())
    named = backend.learner(net, loss="cross_entropy")
    losses = [learner.evaluate(inputs, y)[0].item() for learner in (mean, named)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_an_error_in_a_step_leaves_no_recording(backend):
    net = initialize(backend, lambda: nn.Dense(1, in_units=2), "cpu")

    def fail_at_once(prediction, y):
        raise ZeroDivisionError

    learner = backend.learner(net, loss=fail_at_once)
    semantics = mx.util.is_np_shape(), mx.util.is_np_array()
    with pytest.raises(ZeroDivisionError):
        learner.step((backend.ones((3, 2)),), backend.zeros((3, 1)))
    assert not mx.autograd.is_recording()
    assert not mx.autograd.is_training()
    assert (mx.util.is_np_shape(), mx.util.is_np_array()) == semantics


def test_arrays_of_the_old_kind_are_taken(backend):
    net = initialize(backend, lambda: nn.Dense(1, in_units=2), "cpu")
    x, y = backend.ones((3, 2)), backend.zeros((3, 1))
    learner = backend.learner(net, lr=0.0)
    expected = learner.step((x,), y)[0].item()
    assert learner.step((x.as_nd_ndarray(),), y.as_nd_ndarray())[0].item() == expected


def test_what_is_frozen_between_batches_of_a_step_stays_until_it_is_thawed(backend):
    net = nn.Sequential()
    net.add(nn.Dense(2, in_units=2), nn.Dense(1, in_units=2))
    net.initialize()
    weight = net[0].weight
    learner = backend.learner(net, accumulate_grad_batches=2)
    found = [values(net)]
    for request in ("write", "null", "null", "write", "write", "write"):
        weight.grad_req = request
        learner.step((backend.ones((1, 2)),), backend.ones((1, 1)))
        found.append(values(net))
    weights = [value[0] for value in found]
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(weights)]
    assert changed == [False, False, False, True, False, True]
    last = [value[-1] for value in found]
    others = [not np.array_equal(a, b) for a, b in itertools.pairwise(last)]
    assert others == [False, True, False, True, False, True]


# -- what can be trained, and with what ---------------------------------------------------------


def make_uninitialized():
    return nn.Dense(1)


def without_gradients():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    net.collect_params().setattr("grad_req", "null")
    return net


def of_another():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    return mx.gluon.Trainer(net.collect_params(), "sgd")


def in_a_store(net):
    return mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("local"))


REFUSED = {
    "a function": (lambda: len, None, "not a gluon.Block"),
    "not initialised": (make_uninitialized, None, "net.initialize"),
    "without gradients": (without_gradients, None, "no parameter with a gradient"),
    "a class": (Either, lambda net: mx.optimizer.SGD, "gluon.Trainer"),
    "another's trainer": (Either, lambda net: of_another(), "none of its parameters"),
    "a store": (Either, in_a_store, "KVStore"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_trained_is_refused(backend, case):
    make, optimizer, words = REFUSED[case]
    net = initialize(backend, make, "cpu") if make is Either else make()
    with pytest.raises(UnsupportedValueError, match=words):
        backend.learner(net, optimizer="sgd" if optimizer is None else optimizer(net))


def test_a_model_of_arrays_of_the_old_kind_is_refused(backend):
    mx.npx.reset_np()
    net = initialize(backend, Either, "cpu")
    with pytest.raises(UnsupportedValueError, match="set_np"):
        backend.learner(net)


@pytest.mark.parametrize("options", [{"learning_rate": 0.5}, {"learning_rate": 0.5, "wd": 0.1}])
def test_the_learning_rate_of_a_trainer_is_its_own(backend, options):
    net = initialize(backend, Either, "cpu")
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options)
    learner = backend.learner(net, optimizer=trainer)
    learner.step((backend.ones((3, 2)), True), backend.zeros((3, 1)))
    assert learner.sync()["optimizer"] is trainer
    assert trainer.learning_rate == 0.5


def test_a_trainer_that_was_built_before_the_model_was_placed_trains_it(backend):
    def losses(device):
        net = initialize(backend, Either, "cpu")
        trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
        learner = backend.learner(backend.place(net, device), optimizer=trainer)
        x, y = backend.ones((3, 2), device=device), backend.zeros((3, 1), device=device)
        return [learner.step((x, True), y)[0].item() for _ in range(4)]

    assert losses("gpu:1") == losses("cpu")


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "thread_pool": True}], ids=str)
def test_a_sharded_loader_reads_each_example_once_and_in_the_same_batches(backend, options):
    loader = mx.gluon.data.DataLoader(np.arange(13), 4, shuffle=True, **options)

    def read(loader):
        np.random.seed(5)
        return list(loader)

    shards = [read(framework_of(backend).training.shard_loader(loader, i, 3)) for i in range(3)]
    batches = [
        np.concatenate([shard.operands.asnumpy()[: shard.number] for shard in parts]).tolist()
        for parts in zip(*shards, strict=True)
    ]
    assert batches == [x.asnumpy().tolist() for x in read(loader)]
    assert sorted(itertools.chain(*batches)) == list(range(13))
    assert [shard.length for shard in shards[0]] == [4, 4, 4, 1]
    assert [shard.number for shard in shards[2]] == [1, 1, 1, 0]


def test_processes_that_read_other_examples_know_it(backend):
    def contents(rank, seed):
        loader = mx.gluon.data.DataLoader(np.arange(13), 4, shuffle=True)
        np.random.seed(seed)
        return [
            shard.content for shard in framework_of(backend).training.shard_loader(loader, rank, 2)
        ]

    assert contents(0, seed=1) == contents(1, seed=1)
    assert contents(0, seed=1)[0] != contents(1, seed=2)[0]


class Numbered(mx.gluon.data.Sampler):
    """An order that depends on the number of the epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.roll(np.arange(4), -self.epoch).tolist())

    def __len__(self):
        return 4


class NumberedBatches:
    """Batches of the user's, which are told the number, or have a sampler that is."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        order = list(self.sampler)
        return iter([order[:2], order[2:]])

    def __len__(self):
        return 2


SAMPLED = {
    "sampler": lambda: {"batch_size": 2, "sampler": Numbered()},
    "batches": lambda: {"batch_sampler": mx.gluon.data.BatchSampler(Numbered(), 2)},
    "own batches": lambda: {"batch_sampler": NumberedBatches(Numbered())},
    "read ahead": lambda: {
        "batch_size": 2,
        "sampler": Numbered(),
        "auto_reload": True,
        "num_workers": 1,
        "thread_pool": True,
    },
}


class NumberedDataset:
    """Examples whose values depend on the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, number):
        return np.float32(number + 10 * self.epoch)

    def __len__(self):
        return 4


THREADS = {"num_workers": 1, "thread_pool": True}


@pytest.mark.parametrize("options", [{}, THREADS, {**THREADS, "auto_reload": True}], ids=str)
def test_the_dataset_of_a_gluon_loader_is_told_the_number_of_the_epoch(backend, options):
    class Seeing(Trainer):
        def prepare_batch(self, batch):
            seen.append(batch[0].asnumpy().item())
            return super().prepare_batch((batch.reshape(1, 1), batch.reshape(1, 1)))

    seen = []
    loader = mx.gluon.data.DataLoader(NumberedDataset(), 1, **options)
    Seeing(3, backend=backend).fit(backend.mlp([1, 1]), loader, lr=1e-6)
    loader.clean()  # so that the workers end
    assert seen == [number + 10 * epoch for epoch in range(3) for number in range(4)]


def test_workers_with_a_copy_of_a_dataset_that_is_told_are_refused(backend):
    loader = mx.gluon.data.DataLoader(NumberedDataset(), 1, num_workers=1)
    with pytest.raises(UnsupportedValueError, match="hear of no epoch") as error:
        Trainer(3, backend=backend).fit(backend.mlp([1, 1]), loader)
    assert error.value.fix == "DataLoader(..., num_workers=1, thread_pool=True)"
    del loader, error  # so that the workers end
    gc.collect()


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("size", [1, 2])
def test_the_sampler_of_a_gluon_loader_is_told_the_number_of_the_epoch(backend, options, size):
    loader = mx.gluon.data.DataLoader(np.arange(4), **options())
    data = loader if size == 1 else framework_of(backend).training.shard_loader(loader, 0, size)
    for epoch in (1, 3, 2):
        for each in framework_of(backend).training.order_of(data):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        found = [getattr(batch, "operands", batch).asnumpy()[0] for batch in data]
        assert found == [epoch, (epoch + 2) % 4]
    for each in (loader, data):
        each.clean()  # so that the workers end


class OwnLoader(mx.gluon.data.DataLoader):
    """A loader with an attribute and a ``set_epoch`` of its own."""

    scale = 1

    def set_epoch(self, epoch):
        self.scale = epoch


class OwnIteration(mx.gluon.data.DataLoader):
    def __iter__(self):
        return itertools.chain(super().__iter__(), super().__iter__())


def test_a_gluon_loader_of_a_class_of_the_user_s_keeps_it_where_it_is_sharded(backend):
    loader = OwnLoader(np.arange(4), 2, num_workers=1, thread_pool=True)
    loader.note = ["mine"]
    shard = framework_of(backend).training.shard_loader(loader, 1, 2)
    assert framework_of(backend).training.order_of(shard)[0] is shard
    shard.set_epoch(3)
    assert isinstance(shard, OwnLoader)
    assert shard.note is loader.note
    assert (shard.scale, len(shard)) == (3, 2)
    assert [part.operands.asnumpy().tolist() for part in shard] == [[1], [3]]
    del shard  # with which the workers do not end
    assert [x.asnumpy().tolist() for x in loader] == [[0, 1], [2, 3]]


def test_the_workers_of_a_sharded_gluon_loader_go_on_without_the_other_loader(backend):
    loader = mx.gluon.data.DataLoader(np.arange(4), 2, num_workers=1, thread_pool=True)
    shard = framework_of(backend).training.shard_loader(loader, 1, 2)
    del loader
    gc.collect()
    assert [part.operands.asnumpy().tolist() for part in shard] == [[1], [3]]


def test_a_gluon_loader_that_may_yield_other_batches_is_not_sharded(backend):
    with pytest.raises(UnsupportedValueError, match="the __iter__ of OwnIteration is its own"):
        framework_of(backend).training.shard_loader(OwnIteration(np.arange(4), 2), 0, 2)
