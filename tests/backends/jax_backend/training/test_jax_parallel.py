"""Several GPUs: a mesh of two virtual GPUs learns what one of them learns."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from several_gpus import (
    CLASSES,
    FEATURES,
    assert_same_as_one,
    flat_batches,
)
from what_changes import measure, read_column

from d2ldev import Trainer, UnsupportedValueError, gpu


class Normalized(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.drop(self.norm(x)))


class Dense(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)


class Scaled(Dense):
    def __call__(self, x, factor):
        return self.dense(x) * factor


class Own(Dense):
    def training_step(self, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(self(x), y).mean()


def test_statistics_and_masks_are_those_of_the_whole_batch(backend):
    assert_same_as_one(backend, Normalized, flat_batches(), loss="cross_entropy", lr=0.1)


def test_a_training_step_of_the_model_sees_a_part_and_gives_the_loss_of_all(backend):
    assert_same_as_one(backend, Own, flat_batches(), lr=0.1)


def test_an_optimizer_of_optax_is_trained_on(backend):
    assert_same_as_one(
        backend,
        Dense,
        flat_batches(),
        loss="cross_entropy",
        fits=2,
        optimizer=lambda _: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    )


@pytest.mark.parametrize(("precision", "digits"), [("bf16", 2e-3), ("fp16", 2e-4)])
def test_fewer_bits_are_as_few_as_on_one(backend, precision, digits):
    assert_same_as_one(
        backend,
        Dense,
        flat_batches(),
        loss="cross_entropy",
        lr=0.1,
        precision=precision,
        accumulate_grad_batches=2,
        tolerance={"rtol": digits, "atol": digits},
    )


def test_a_batch_may_have_python_numbers(backend):
    data = [(x, 2.5, y) for x, y in flat_batches()]
    assert_same_as_one(backend, Scaled, data, loss="cross_entropy", lr=0.1)


def test_the_factor_of_fp16_is_saved_from_the_first_device(backend, tmp_path):
    trainer = Trainer(1, 2, backend=backend, precision="fp16")
    trainer.fit(Dense(), flat_batches(), loss="cross_entropy", checkpoint=tmp_path / "run")
    assert (tmp_path / "run").exists()


def test_the_parts_of_a_batch_are_computed_on_both_devices(backend):
    places = []
    learner = backend.learner(
        backend.place(Dense(), "gpu:0"), devices=["gpu:0", "gpu:1"], loss=_watch(places)
    )
    x, y = backend.to(flat_batches(4, 4)[0], "gpu:0")
    learner.step((x,), y)
    jax.effects_barrier()
    assert len(places) == 1
    ((number, rows),) = places
    assert (number, rows) == (2, 2)


def _watch(places):
    def loss(prediction, y):
        jax.debug.inspect_array_sharding(
            prediction,
            callback=lambda sharding: places.append(
                (len(sharding.device_set), sharding.shard_shape(prediction.shape)[0])
            ),
        )
        return optax.softmax_cross_entropy_with_integer_labels(prediction, y).mean()

    return loss


def test_the_model_is_on_the_first_gpu_again(backend):
    model = backend.place(Dense(), "gpu:0")
    learner = backend.learner(model, devices=[gpu(0), gpu(1)], loss="cross_entropy")
    x, y = backend.to(flat_batches(4, 4)[0], "gpu:0")
    loss, prediction = learner.step((x,), y)
    learner.sync()
    assert {str(backend.device_of(x)) for x in (loss, prediction)} == {"gpu:0"}
    assert set(backend.placement(model).values()) == {gpu(0)}
    np.testing.assert_allclose(backend.to_numpy(model(x)).shape, (4, CLASSES))


def test_statistics_of_a_part_are_refused(backend):
    options = {"loss": "cross_entropy", "lr": 0.1}
    trainer = Trainer(1, 2, backend=backend, batch_norm="global")
    trainer.fit(Normalized(), flat_batches(), **options)
    trainer = Trainer(1, 2, backend=backend, batch_norm="local")
    trainer.fit(Dense(), flat_batches(), **options)
    with pytest.raises(UnsupportedValueError, match="the whole batch"):
        trainer.fit(Normalized(), flat_batches(), **options)


def test_two_gpus_change_what_the_page_says(backend):
    assert measure(backend) == read_column("JAX")
