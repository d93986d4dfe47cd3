"""The state of a ``TensorFlowLearner``: training goes on from it to the last bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import INPUTS, Plain, batches, convolutional, made, recurrent

from d2ldev import CheckpointError, gpu

SCHEDULE = keras.optimizers.schedules
OPTIMIZERS = {
    **{name: lambda name=name: name for name in ("sgd", "momentum", "adam", "adagrad")},
    "schedule": lambda: keras.optimizers.Adam(SCHEDULE.CosineDecay(0.1, 8), amsgrad=True),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaling the loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), dynamic_growth_steps=2
    ),
}


def learner_of(backend, model=convolutional, optimizer="adam", device="gpu:1", **options):
    return backend.learner(
        made(backend, model, device), loss="cross_entropy", optimizer=optimizer, **options
    )


def to_numpy(backend, state):
    return tf.nest.map_structure(
        lambda x: backend.to_numpy(x) if isinstance(x, tf.Tensor) else x, state
    )


def assert_same(backend, learner, other):
    states = [to_numpy(backend, each.state()) for each in (learner, other)]
    tf.nest.map_structure(np.testing.assert_array_equal, *states)


def assert_goes_on(backend, model, device, make):
    """3 steps, and 3 more in another learner that was given the state, are 6 steps."""
    data = batches(backend, model, device)
    unbroken, first, second = (
        learner_of(backend, model, make(), device, gradient_clip_val=1.0) for _ in range(3)
    )
    expected = [float(unbroken.step(*batch)[0]) for batch in data]
    losses = [float(first.step(*batch)[0]) for batch in data[:3]]
    second.evaluate(*data[0])  # has the models that have no variables yet make them
    second.restore(to_numpy(backend, first.state()))
    losses += [float(second.step(*batch)[0]) for batch in data[3:]]
    assert losses == expected
    assert_same(backend, second, unbroken)


@pytest.mark.parametrize(
    ("device", "make"),
    [("cpu", lambda: "adam"), *(("gpu:1", make) for make in OPTIMIZERS.values())],
    ids=["on the CPU", *OPTIMIZERS],
)
def test_training_goes_on_to_the_last_bit(backend, device, make):
    assert_goes_on(backend, convolutional, device, make)


@pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)
def test_every_model_goes_on(backend, model):
    assert_goes_on(backend, model, "gpu:1", lambda: "momentum")


def test_what_is_restored_is_on_the_learners_device(backend):
    learner = learner_of(backend, device="cpu")
    learner.step(*batches(backend, convolutional, "cpu", 1)[0])
    other = learner_of(backend, device="gpu:1")
    other.restore(learner.state())
    assert set(backend.placement(other.parts).values()) == {gpu(1)}
    assert set(backend.placement(other.state()).values()) == {gpu(1)}


def test_a_state_stays_as_it_was_taken(backend):
    data = batches(backend, convolutional, "gpu:1")
    learner = learner_of(backend)
    state = learner.state()
    before = to_numpy(backend, state)
    learner.step(*data[0])
    tf.nest.map_structure(np.testing.assert_array_equal, to_numpy(backend, state), before)
    learner.restore(state)
    learner.step(*data[0])
    tf.nest.map_structure(np.testing.assert_array_equal, to_numpy(backend, state), before)


def test_a_state_is_saved_and_loaded(backend, tmp_path):
    data = batches(backend, convolutional, "gpu:1")
    learner, other = learner_of(backend), learner_of(backend)
    learner.step(*data[0])
    backend.save(learner.state(), tmp_path / "state.safetensors")
    other.restore(backend.load(tmp_path / "state.safetensors"))
    assert_same(backend, other, learner)
    assert float(other.step(*data[1])[0]) == float(learner.step(*data[1])[0])


def test_a_generator_of_a_module_is_part_of_its_state(backend):
    learner = learner_of(backend, Plain, "sgd")
    before = to_numpy(backend, learner.state())["model"]
    learner.step(*batches(backend, Plain, "gpu:1", 1)[0])
    after = to_numpy(backend, learner.state())["model"]
    changed = [not np.array_equal(x, y) for x, y in zip(before, after, strict=True)]
    assert sum(changed) == 2  # the weight, and the generator


def _put(tensors, index, x):
    return [*tensors[:index], x, *tensors[index + 1 :]]


def _change_model(state, index, x):
    state["model"] = _put(state["model"], index, x)


def _change_optimizer(state, **changes):
    state["optimizer"] = state["optimizer"] | changes


BROKEN = {
    "no model": lambda state: state.pop("model"),
    "something more": lambda state: state.update(other=[]),
    "no word on whether it was built": lambda state: state.update(built="yes"),
    "an optimizer without a class": lambda state: state.update(optimizer={}),
    "an optimizer without variables": lambda state: _change_optimizer(state, variables=None),
    "another optimizer": lambda state: _change_optimizer(state, **{"class": "Nadam"}),
    "a tensor less": lambda state: state["optimizer"]["variables"].pop(),
    "a tensor more": lambda state: state["model"].append(np.ones(2, "float32")),
    "another shape": lambda state: _change_model(state, 1, np.ones(3, "float32")),
    "another dtype": lambda state: _change_model(state, 1, np.ones(4, "float16")),
    "no array": lambda state: _change_optimizer(
        state, variables=_put(state["optimizer"]["variables"], 0, "text")
    ),
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_a_broken_state_is_refused_and_nothing_has_changed(backend, break_it):
    other = learner_of(backend)
    other.step(*batches(backend, convolutional, "gpu:1", 1)[0])
    state = to_numpy(backend, other.state())
    break_it(state)
    learner = learner_of(backend)
    with pytest.raises(CheckpointError):
        learner.restore(state)
    assert_same(backend, learner, learner_of(backend))


@pytest.mark.parametrize(
    ("model", "optimizer"), [(recurrent, "adam"), (convolutional, "momentum")], ids=str
)
def test_the_state_of_another_model_or_optimizer_is_refused(backend, model, optimizer):
    with pytest.raises(CheckpointError):
        learner_of(backend).restore(learner_of(backend, model, optimizer).state())


@pytest.mark.parametrize("state", [None, [], {}, "text"])
def test_what_is_no_state_is_refused(backend, state):
    with pytest.raises(CheckpointError):
        learner_of(backend).restore(state)


def test_slots_of_one_form_are_not_taken_for_those_of_another_optimizer(backend):
    with pytest.raises(CheckpointError, match="the optimizer is Adagrad, and 'SGD' in the state"):
        learner_of(backend, optimizer="adagrad").restore(
            learner_of(backend, optimizer="momentum").state()
        )
