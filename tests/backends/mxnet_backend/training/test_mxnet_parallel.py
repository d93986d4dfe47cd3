"""Several GPUs: parameters on two virtual GPUs, and a kvstore between them."""

import mxnet as mx
import numpy as np
import pytest
from d2ldev_mxnet.provision import lenet
from process_runs import (
    Own,
    drop_some,
    initialise_all,
    normalize,
    own_output,
    unbuilt,
)
from several_gpus import (
    CLASSES,
    FEATURES,
    PAIR,
    assert_same_as_one,
    flat_batches,
    train,
)
from what_changes import measure, read_column

from d2ldev import Trainer, UnsupportedValueError, gpu

nn = mx.gluon.nn
pytestmark = pytest.mark.usefixtures("set_np")


class Dense(nn.Block):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(CLASSES, in_units=FEATURES)
        initialise_all(self)

    def forward(self, x):
        return self.dense(x)


def test_a_block_without_shapes_learns_like_on_one_device(backend):
    assert_same_as_one(backend, unbuilt, flat_batches(), loss="cross_entropy", lr=0.1)


def test_a_training_step_of_the_model_sees_a_part(backend):
    assert_same_as_one(backend, Own, flat_batches(), lr=0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda _: mx.optimizer.Adam(learning_rate=0.1),
        lambda _: mx.optimizer.Nadam(learning_rate=0.1),
        lambda net: mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}),
        lambda net: mx.gluon.Trainer(net.collect_params(), "adam", kvstore=None),
    ],
    ids=["optimizer", "schedule", "trainer", "without-store"],
)
def test_an_optimizer_of_mxnets_is_trained_on(backend, optimizer):
    assert_same_as_one(
        backend, Dense, flat_batches(), loss="cross_entropy", fits=2, optimizer=optimizer
    )


def test_gradients_are_compressed_between_gpus_as_the_trainer_says(backend):
    def gradients_of(compression):
        net = Dense()
        before = net.dense.weight.data().asnumpy()
        optimizer = mx.gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 1.0}, compression_params=compression
        )
        trainer = Trainer(1, 2, backend=backend)
        trainer.fit(net, flat_batches()[:1], loss="cross_entropy", optimizer=optimizer)
        return before - net.dense.weight.data().asnumpy()

    compressed = gradients_of({"type": "2bit", "threshold": 0.5})
    # Each GPU sends -0.5, 0 or 0.5.
    np.testing.assert_allclose(compressed * 2, np.round(compressed * 2), atol=1e-6)
    plain = gradients_of(None)
    assert not np.allclose(plain * 2, np.round(plain * 2), atol=1e-6)


def test_each_virtual_gpu_has_masks_of_its_own(backend):
    values, _ = train(backend, drop_some, PAIR, 2, loss=own_output)
    ((first, second),) = values.values()
    assert ((first != 0) != (second != 0)).any()


def test_running_statistics_are_the_means_of_the_devices(backend):
    x, y = flat_batches(4, 4)[0]
    values, _ = train(backend, normalize, [(x, y)], 2, loss="cross_entropy")
    (mean,) = (value for name, value in values.items() if "running_mean" in name)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-5)
    (variance,) = (value for name, value in values.items() if "running_var" in name)
    np.testing.assert_allclose(variance, (x[:2].var(0) + x[2:].var(0)) / 2, rtol=1e-4)


def test_running_statistics_that_no_step_changes_stay_as_they_are(backend):
    def freeze_layer():
        net = normalize()
        net[0]._kwargs["use_global_stats"] = True
        net[0].running_mean.set_data(mx.np.full(FEATURES, 3e38))  # of which two make no sum
        return net

    values, _ = train(backend, freeze_layer, flat_batches(), 2, loss="cross_entropy")
    (mean,) = (value for name, value in values.items() if "running_mean" in name)
    assert np.isfinite(mean).all()


def test_parameters_have_one_array_again(backend):
    net = backend.place(Dense(), "gpu:0")
    own = net.dense.weight.data()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    learner = backend.learner(
        net, optimizer=trainer, loss="cross_entropy", devices=["gpu:0", "gpu:1"]
    )
    x, y = backend.to(flat_batches(4, 4)[0], "gpu:0")
    learner.step((x,), y)
    assert len(net.dense.weight.list_data()) == 2
    learner.sync()
    assert net.dense.weight.data() is own
    assert (len(trainer._updaters), len(trainer._contexts)) == (1, 1)
    assert trainer._kvstore_params["update_on_kvstore"] is None
    assert set(backend.placement([net, trainer]).values()) == {gpu(0)}
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    trainer.step(1)


def test_an_optimizer_is_not_replicated(backend):
    trainer = mx.gluon.Trainer(Dense().collect_params(), "sgd")
    with pytest.raises(UnsupportedValueError, match="cannot replicate"):
        backend.replicate(trainer, ["gpu:0"])


def test_a_hybridized_block_is_replicated(backend):
    net = lenet()
    x = backend.zeros((1, 1, 28, 28))
    first, second = backend.replicate(net, ["cpu", "gpu:1"])
    predictions = [net(x), first(x), second(backend.to(x, "gpu:1"))]
    assert len({backend.to_numpy(each).tobytes() for each in predictions}) == 1


def test_statistics_of_the_whole_batch_are_refused(backend):
    options = {"loss": "cross_entropy", "lr": 0.1}
    trainer = Trainer(1, 2, backend=backend, batch_norm="local")
    trainer.fit(normalize(), flat_batches(), **options)
    with pytest.raises(UnsupportedValueError, match="those of a shard"):
        Trainer(1, 2, backend=backend, batch_norm="global").fit(
            normalize(), flat_batches(), **options
        )


def test_two_gpus_change_what_the_page_says(backend):
    assert measure(backend) == read_column("MXNet")
