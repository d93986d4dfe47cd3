"""A resumed run goes on with the order that a ``tf.data.Dataset`` would have had."""

import pytest
import tensorflow as tf

from d2ldev import CheckpointError
from d2ldev.training.trainer import Trainer


def examples():
    x = tf.range(10, dtype=tf.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((x, tf.zeros((10, 1))))


def noisy():
    """Its generator goes on with each example, and not with each epoch."""
    generator = tf.random.Generator.from_seed(1)
    noise = tf.autograph.experimental.do_not_convert(lambda x, y: (x + generator.uniform(()), y))
    dataset = examples().map(noise).batch(5)
    dataset.generator = generator  # which lives as long as it
    return dataset


MAKERS = {
    "shuffled": lambda: examples().shuffle(10, seed=1).batch(4),
    "prefetched": lambda: examples().shuffle(10, seed=1).batch(4).prefetch(2),
    "shuffled twice": lambda: examples().shuffle(4, seed=1).cache().shuffle(10, seed=2).batch(4),
    "repeated": lambda: examples().shuffle(10, seed=1).repeat(2).batch(5),
    "of a generator": noisy,
}


@pytest.fixture(scope="module", autouse=True)
def _datasets_were_prefetched(tensorflow_backend):
    """AutoGraph leaves files behind when TensorFlow's prefetching is used first."""
    assert len(list(tensorflow_backend.prefetch(examples().batch(4), "gpu:0"))) == 3


def run(backend, num_gpus, dataset, path, epochs, **options):
    """The parameters, which are others after batches in another order."""
    trainer = Trainer(epochs, num_gpus, backend=backend)
    options = {"loss": lambda prediction, y: tf.reduce_mean(tf.abs(prediction - y)), **options}
    history = trainer.fit(backend.mlp([1, 3, 1]), dataset, lr=1e-3, checkpoint=path, **options)
    return history, [variable.numpy().tolist() for variable in trainer.model.variables]


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_the_order_goes_on_in_another_process(backend, num_gpus, tmp_path, name):
    unbroken = run(backend, num_gpus, MAKERS[name](), None, 3)
    run(backend, num_gpus, MAKERS[name](), tmp_path / "run", 2)
    resumed = run(backend, num_gpus, MAKERS[name](), tmp_path / "run", 3, resume=True)
    assert resumed == unbroken


def test_the_order_matters(backend, tmp_path):
    """Else the test above could not fail."""
    ordered = run(backend, 0, examples().batch(4), None, 3)
    assert run(backend, 0, MAKERS["shuffled"](), None, 3)[1] != ordered[1]


def test_a_dataset_that_is_further_than_the_run_is_refused(backend, tmp_path):
    dataset = MAKERS["shuffled"]()
    run(backend, 0, dataset, tmp_path / "run", 2)
    run(backend, 0, dataset, None, 1)
    with pytest.raises(CheckpointError, match="cannot go back"):
        run(backend, 0, dataset, tmp_path / "run", 3, resume=True)
