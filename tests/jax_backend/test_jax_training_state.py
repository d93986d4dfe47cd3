"""The state of a ``JaxLearner``: training goes on from it to the last bit."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_models import Convolutional, Recurrent, batches, made

from d2ldev import CheckpointError, gpu

OPTIMIZERS = {
    **{name: lambda name=name: name for name in ("sgd", "momentum", "adam", "adagrad")},
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.01),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 1), optax.sgd(0.1)),
}


def learner_of(backend, model=Convolutional, optimizer="adam", device="gpu:1", **options):
    return backend.learner(
        made(backend, model, device), loss="cross_entropy", optimizer=optimizer, **options
    )


def to_numpy(backend, state):
    if isinstance(state, dict):
        return {name: to_numpy(backend, x) for name, x in state.items()}
    return state if isinstance(state, (str, list)) else backend.to_numpy(state)


def assert_same(backend, learner, other):
    states = [to_numpy(backend, each.state()) for each in (learner, other)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ("device", "make"),
    [("cpu", lambda: "adam"), *(("gpu:1", make) for make in OPTIMIZERS.values())],
    ids=["on the CPU", *OPTIMIZERS],
)
def test_training_goes_on_to_the_last_bit(backend, device, make):
    data = batches(backend, Convolutional, device)
    unbroken, first, second = (
        learner_of(backend, optimizer=make(), device=device, gradient_clip_val=1.0)
        for _ in range(3)
    )
    expected = [float(unbroken.step(*batch)[0]) for batch in data]
    losses = [float(first.step(*batch)[0]) for batch in data[:3]]
    second.restore(to_numpy(backend, first.state()))
    losses += [float(second.step(*batch)[0]) for batch in data[3:]]
    assert losses == expected
    assert_same(backend, second, unbroken)


def test_what_is_restored_is_on_the_learners_device(backend):
    learner = learner_of(backend, device="cpu")
    learner.step(*batches(backend, Convolutional, "cpu", 1)[0])
    other = learner_of(backend, device="gpu:1")
    other.restore(learner.state())
    assert set(backend.placement(other.parts).values()) == {gpu(1)}
    assert set(backend.placement(other.state()).values()) == {gpu(1)}


def test_a_state_is_of_tensors_text_lists_and_dicts(backend):
    state = learner_of(backend).state()
    assert sorted(state) == ["evaluation", "model", "optimizer"]
    assert state["evaluation"] == []
    leaves = jax.tree.leaves(state)
    assert {type(leaf) for leaf in leaves} == {str, type(jax.numpy.ones(1))}
    assert not any(
        jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        for leaf in leaves
        if hasattr(leaf, "dtype")
    )
    assert state["model"]["dropout/rngs/key"]["generator"] == "threefry2x32"


def test_a_state_stays_as_it_was_taken(backend):
    data = batches(backend, Convolutional, "gpu:1")
    learner = learner_of(backend)
    state = learner.state()
    before = to_numpy(backend, state)
    learner.step(*data[0])
    jax.tree.map(np.testing.assert_array_equal, to_numpy(backend, state), before)


def test_a_state_is_saved_and_loaded(backend, tmp_path):
    data = batches(backend, Convolutional, "gpu:1")
    learner, other = learner_of(backend), learner_of(backend)
    learner.step(*data[0])
    backend.save(learner.state(), tmp_path / "state.safetensors")
    other.restore(backend.load(tmp_path / "state.safetensors"))
    assert_same(backend, other, learner)
    assert float(other.step(*data[1])[0]) == float(learner.step(*data[1])[0])


@pytest.mark.parametrize(
    "key",
    [lambda: jax.random.key(0, impl="rbg"), lambda: jax.random.PRNGKey(0)],
    ids=["of another generator", "of the older kind"],
)
def test_keys_of_every_kind_go_on(backend, key):
    data = batches(backend, Convolutional, "gpu:1", 3)

    def learner():
        net = Convolutional(nnx.Rngs(0, dropout=key()))
        return backend.learner(backend.place(net, "gpu:1"), loss="cross_entropy")

    first, second = learner(), learner()
    for batch in data[:2]:
        first.step(*batch)
    second.restore(to_numpy(backend, first.state()))
    assert float(second.step(*data[2])[0]) == float(first.step(*data[2])[0])


def test_a_state_of_keys_of_another_generator_is_refused(backend):
    net = Convolutional(nnx.Rngs(0, dropout=jax.random.key(0, impl="rbg")))
    learner = backend.learner(backend.place(net, "gpu:1"), loss="cross_entropy", optimizer="adam")
    with pytest.raises(CheckpointError, match="key of threefry2x32"):
        learner.restore(learner_of(backend).state())


def _without(state, part, name):
    state[part] = {other: x for other, x in state[part].items() if other != name}


def _with(state, part, name, x):
    state[part] = {**state[part], name: x}


BROKEN = {
    "no model": lambda state: state.pop("model"),
    "no dict": lambda state: state.update(optimizer=[1]),
    "a name less": lambda state: _without(state, "optimizer", "step"),
    "a name more": lambda state: _with(state, "model", "more", np.ones(2, "float32")),
    "another shape": lambda state: _with(state, "model", "dense/bias", np.ones(3, "float32")),
    "another dtype": lambda state: _with(state, "model", "dense/bias", np.ones(2, "float16")),
    "no array": lambda state: _with(state, "model", "dense/bias", "text"),
    "no key": lambda state: _with(state, "model", "dropout/rngs/key", np.ones(2, "uint32")),
    "half a key": lambda state: _with(
        state, "model", "dropout/rngs/key", {"generator": "threefry2x32"}
    ),
    "no modes": lambda state: state.pop("evaluation"),
    "modes that are no list": lambda state: state.update(evaluation={"a": 1}),
    "modes that are no names": lambda state: state.update(evaluation=[["a"]]),
    "a mode of another model": lambda state: state.update(evaluation=["other/deterministic"]),
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_a_broken_state_is_refused_and_nothing_has_changed(backend, break_it):
    other = learner_of(backend)
    other.step(*batches(backend, Convolutional, "gpu:1", 1)[0])
    state = to_numpy(backend, other.state())
    break_it(state)
    learner = learner_of(backend)
    with pytest.raises(CheckpointError):
        learner.restore(state)
    assert_same(backend, learner, learner_of(backend))


@pytest.mark.parametrize(
    ("model", "optimizer"), [(Recurrent, "adam"), (Convolutional, "momentum")], ids=str
)
def test_the_state_of_another_model_or_optimizer_is_refused(backend, model, optimizer):
    with pytest.raises(CheckpointError):
        learner_of(backend).restore(learner_of(backend, model, optimizer).state())


@pytest.mark.parametrize("state", [None, [], {}, "text"])
def test_what_is_no_state_is_refused(backend, state):
    with pytest.raises(CheckpointError):
        learner_of(backend).restore(state)
