"""Runs of models that Keras builds with their first batch: begun, killed and resumed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from d2ldev import CheckpointError, gpu


def sequential(units=4):
    """A model without an Input."""
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(units), layers.BatchNormalization(), layers.Dropout(0.3)]
    return keras.Sequential([*hidden, layers.Dense(2)])


class Subclassed(keras.Model):
    """The same, written out."""

    def __init__(self, dtype=None):
        keras.utils.set_random_seed(0)
        super().__init__()
        self.hidden = layers.Dense(4, dtype=dtype)
        self.norm = layers.BatchNormalization(dtype=dtype)
        self.dropout = layers.Dropout(0.3, dtype=dtype)
        self.outer = layers.Dense(2, dtype=dtype)

    def call(self, x, training=False):
        """Through all of them."""
        x = self.norm(self.hidden(x), training=training)
        return self.outer(self.dropout(x, training=training))


def subclassed_in_float16():
    """Its loss is scaled."""
    return Subclassed("mixed_float16")


def scaling():
    """Its scale grows, and falls when it has grown too far."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), dynamic_growth_steps=2)


unbuilt = pytest.mark.parametrize("make", [sequential, Subclassed], ids=["Sequential", "subclass"])


def learner_of(backend, model, device="gpu:1", optimizer="adam"):
    return backend.learner(backend.place(model, device), loss="cross_entropy", optimizer=optimizer)


@pytest.fixture
def batches(backend):
    """Batches on the second virtual GPU."""
    return [
        (
            (backend.rand((6, 3), seed=seed, device="gpu:1"),),
            backend.asarray([0, 1, 0, 1, 1, 0], device="gpu:1"),
        )
        for seed in range(6)
    ]


def losses(learner, batches):
    return [float(learner.step(*batch)[0]) for batch in batches]


def assert_equal(state, other):
    tf.nest.map_structure(np.testing.assert_array_equal, state, other)


# -- learners ---------------------------------------------------------------------------------


@unbuilt
@pytest.mark.parametrize("done", [0, 3])
def test_a_model_that_is_not_built_goes_on_from_a_state(backend, make, batches, done):
    expected = losses(learner_of(backend, make()), batches)
    first, second = learner_of(backend, make()), learner_of(backend, make())
    before = losses(first, batches[:done])
    second.restore(first.state())
    assert before + losses(second, batches[done:]) == expected


def test_a_state_is_applied_by_an_evaluation_too(backend, batches):
    first, second = learner_of(backend, sequential()), learner_of(backend, sequential())
    losses(first, batches[:3])
    second.restore(first.state())
    assert float(second.evaluate(*batches[0])[0]) == float(first.evaluate(*batches[0])[0])


def test_a_state_that_waits_is_the_state(backend, batches):
    first, second, third = (learner_of(backend, sequential()) for _ in range(3))
    losses(first, batches[:3])
    second.restore(first.state())
    assert_equal(second.state(), first.state())
    third.restore(second.state())
    assert losses(third, batches[3:]) == losses(first, batches[3:])


def test_a_state_that_waits_is_not_what_its_owner_makes_of_it(backend, batches):
    first, second = learner_of(backend, sequential()), learner_of(backend, sequential())
    losses(first, batches[:3])
    state = tf.nest.map_structure(
        lambda x: backend.to_numpy(x) if isinstance(x, tf.Tensor) else x, first.state()
    )
    second.restore(state)
    state["model"][0][...] = 0
    state["model"].clear()
    second.state()["model"].clear()
    assert_equal(second.state(), first.state())


def test_a_state_that_waits_is_placed_with_the_model(backend, batches):
    first, second = learner_of(backend, sequential()), learner_of(backend, sequential(), "gpu:0")
    losses(first, batches[:3])
    second.restore(first.state())
    second.place("gpu:1")
    assert_equal(second.state(), first.state())
    assert losses(second, batches[3:]) == losses(first, batches[3:])
    assert set(backend.placement(second.parts).values()) == {gpu(1)}


def test_a_state_that_waits_outlives_that_the_user_builds_the_model(backend, batches):
    first, net = learner_of(backend, sequential()), sequential()
    second = learner_of(backend, net)
    losses(first, batches[:3])
    second.restore(first.state())
    net.build((None, 3))
    second.replace(second.parts)
    assert_equal(second.state(), first.state())
    assert losses(second, batches[3:]) == losses(first, batches[3:])


def test_a_model_that_the_user_builds_meanwhile_takes_a_state_at_once(backend, batches):
    first, net = learner_of(backend, sequential()), sequential()
    second = learner_of(backend, net)
    losses(first, batches[:3])
    net.build((None, 3))
    second.restore(first.state())
    np.testing.assert_array_equal(net.layers[0].kernel, first.parts["model"].layers[0].kernel)
    assert losses(second, batches[3:]) == losses(first, batches[3:])


def test_a_state_that_does_not_fit_is_refused_when_the_model_is_built(backend, batches):
    first, second = learner_of(backend, sequential(4)), learner_of(backend, sequential(5))
    losses(first, batches[:1])
    second.restore(first.state())
    for _ in range(2):  # nor is it trained without the state
        with pytest.raises(CheckpointError, match=r"\(3, 4\).* and .*\(3, 5\).* is expected"):
            second.step(*batches[1])
    assert_equal(second.state(), first.state())


BROKEN = {
    "no model": lambda state: state.pop("model"),
    "no tensors": lambda state: state.update(model="text"),
    "no array": lambda state: state.update(model=["text"]),
    "another optimizer": lambda state: state["optimizer"].update({"class": "Nadam"}),
    "no variables": lambda state: state["optimizer"].update(variables=None),
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_a_state_of_another_form_is_refused_at_once(backend, batches, break_it):
    first, second = learner_of(backend, sequential()), learner_of(backend, sequential())
    losses(first, batches[:1])
    state = first.state()
    break_it(state)
    before = second.state()
    with pytest.raises(CheckpointError):
        second.restore(state)
    assert_equal(second.state(), before)


def test_a_state_from_before_the_first_batch_is_not_put_into_what_was_built_since(backend, batches):
    first = learner_of(backend, sequential())
    state = first.state()
    losses(first, batches[:1])
    after = first.state()
    with pytest.raises(CheckpointError, match="make the model anew"):
        first.restore(state)
    assert_equal(first.state(), after)


# -- runs, in processes -----------------------------------------------------------------------

_RUN = """
import os, sys
sys.path.insert(0, os.environ["FOLDER"])
import numpy as np
import test_tensorflow_resuming as models

backend = d2ldev.get_backend("tensorflow")
random = np.random.default_rng(0)
data = d2ldev.ArrayLoader(
    random.random((10, 3), "float32"), random.integers(0, 2, 10), batch_size=4, shuffle=True
)

class Killed(d2ldev.Trainer):
    def prepare_batch(self, batch):
        if self.die_at == 0:
            print("shown:" + json.dumps("killed"), flush=True)
            os._exit(0)
        self.die_at -= 1
        return super().prepare_batch(batch)

def fit(name, epochs, optimizer, die_at=-1, **options):
    net = getattr(models, name)()
    trainer = Killed(epochs, num_gpus=1, backend=backend)
    trainer.die_at = die_at
    optimizer = models.scaling() if optimizer == "scaling" else optimizer
    history = trainer.fit(net, data, loss="cross_entropy", optimizer=optimizer, **options)
    show([history["loss"], [np.asarray(x, "float64").tolist() for x in net.get_weights()]])

"""


@pytest.mark.parametrize(
    ("name", "optimizer", "die_at"),
    [
        ("sequential", "adam", 8),
        ("Subclassed", "adam", 8),
        ("subclassed_in_float16", "scaling", 8),
        ("sequential", "adam", 2),
    ],
    ids=["Sequential", "subclass", "float16", "in the first epoch"],
)
def test_a_killed_run_is_resumed_in_another_process_to_the_last_bit(
    run, tmp_path, request, name, optimizer, die_at
):
    def running(call):
        variables = {"FOLDER": str(request.path.parent), "D2LDEV_VIRTUAL_GPUS": "1"}
        (shown,) = run(_RUN + call, **variables)
        return shown

    file = f"checkpoint={str(tmp_path / 'run.safetensors')!r}"
    expected = running(f"fit({name!r}, 4, {optimizer!r})")
    assert running(f"fit({name!r}, 4, {optimizer!r}, die_at={die_at}, {file})") == "killed"
    assert running(f"fit({name!r}, 4, {optimizer!r}, {file}, resume=True)") == expected
