"""Strict: JAX's own refusal of committed arrays in d2ldev's words, and what JAX moves by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import INPUTS, batches, build
from processes import run_python

from d2ldev import DeviceMismatchError, gpu

VALUES = np.arange(3.0, dtype="float32")


@pytest.fixture
def x(backend):
    """An array that is committed to the second virtual GPU."""
    return backend.asarray(VALUES, device="gpu:1")


@pytest.fixture
def y(backend):
    """One that is committed to the first."""
    return backend.asarray(VALUES, device="gpu:0")


MIXING = {
    "operator": lambda x, y: x + y,
    "reflected": lambda x, y: y - x,
    "jnp": jnp.add,
    "lax": jax.lax.add,
    "jit": jax.jit(lambda x, y: x * y),
    "where": lambda x, y: jnp.where(x > 1, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x, y]),
    "stack": lambda x, y: jnp.stack([x, y]),
    "dot": jnp.dot,
    "scan": lambda x, y: jax.lax.scan(lambda c, a: (c + a, a), x, jnp.stack([y, y])),
    "cond": lambda x, y: jax.lax.cond(True, lambda x, y: x + y, lambda x, y: x, x, y),
    "vmap": lambda x, y: jax.vmap(jnp.add)(x, y),
    "grad": lambda x, y: jax.grad(lambda x: (x * y).sum())(x),
    "tree": lambda x, y: jax.tree.map(jnp.add, {"a": x}, {"a": y}),
    "indices": lambda x, y: x[y.astype(int)],
    "a number": lambda x, y: x * y.sum(),
}


@pytest.mark.parametrize("name", MIXING)
def test_committed_arrays_raise_at_the_operation_with_jax_s_error_as_the_cause(backend, x, y, name):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        MIXING[name](x, y)
    assert "Received incompatible devices for jitted computation" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="Received incompatible devices"):
        MIXING[name](x, y)


def test_the_error_names_every_operand_and_its_device(backend, x, y):
    step = jax.jit(lambda params, batch: params["w"] * batch + params["b"] + params["free"])
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        step({"w": x, "b": x, "free": jnp.ones(3)}, y)
    error = caught.value
    assert error.attempted == "run <lambda>"
    assert error.problem.endswith(" params['b'] on gpu:1, params['w'] on gpu:1, batch on gpu:0")
    assert error.fix == "batch = backend.to(batch, 'gpu:1')"


def test_the_fix_names_no_variable_that_is_not_there(backend, x, y):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        jax.lax.dot(x, y)  # JAX calls its operands args[0] and args[1]
    assert caught.value.fix == "x = backend.to(x, 'gpu:1'), where x is operand 2 of dot_general"


def test_the_accuracy_of_labels_on_another_device_names_both(backend):
    prediction = backend.ones((2, 3), device="gpu:0")
    y = backend.asarray([0, 1], device="gpu:1")
    with pytest.raises(DeviceMismatchError, match="prediction on gpu:0, y on gpu:1"):
        backend.accuracy(prediction, y)


def test_lowering_ahead_of_time_raises_too(backend, x, y):
    with backend.strict(), pytest.raises(DeviceMismatchError, match="x on gpu:1, y on gpu:0"):
        jax.jit(lambda x, y: x + y).lower(x, y)


@pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)
def test_a_placed_module_refuses_data_on_another_device(backend, model):
    ((inputs, _),) = batches(backend, model, "gpu:0", 1)
    with backend.strict(), pytest.raises(DeviceMismatchError, match="on gpu:1"):
        build(backend, model, "gpu:1")(*inputs)


MOVED = {
    "an array that is not committed": lambda x, y: x + jnp.ones(3),
    "an identity matrix": lambda x, y: x + jnp.eye(3),
    "NumPy's array": lambda x, y: x + VALUES,
    "a random key": lambda x, y: jax.random.permutation(jax.random.key(0), x),
    "what a function makes": lambda x, y: x.at[np.array([0, 2])].add(1.0),
    "what is closed over": lambda x, y: jax.jit(lambda x: x + jnp.asarray(VALUES))(x),
    "what jit was told to take to a place": lambda x, y: jax.jit(jnp.add, in_shardings=x.sharding)(
        x, jnp.ones(3)
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_not_committed_goes_to_where_the_others_are(backend, x, y, name):
    expected = MOVED[name](x, y)
    with backend.strict():
        found = MOVED[name](x, y)
    assert backend.device_of(found) is gpu(1)
    assert np.array_equal(found, expected)


def test_an_embedding_that_was_placed_takes_positions_that_nobody_placed(backend):
    embedding = backend.place(nnx.Embed(4, 2, rngs=nnx.Rngs(0)), "gpu:1")
    with backend.strict():
        found = embedding(jnp.arange(4))
    assert backend.device_of(found) is gpu(1)
    assert np.array_equal(found, embedding.embedding[...])


def test_the_whole_process_is_under_it():
    code = """
import threading, d2ldev
backend = d2ldev.get_backend("jax")
x, y = backend.ones(3, device="gpu:1"), backend.ones(3, device="cpu")
def mix():
    try:
        x + y
    except d2ldev.DeviceMismatchError as error:
        show(str(error))
mix()
thread = threading.Thread(target=mix)
thread.start()
thread.join()
"""
    shown = run_python(
        code, hide=(), environment={"D2LDEV_VIRTUAL_GPUS": "2", "D2LDEV_STRICT": "1"}
    )
    assert len(shown) == 2
    assert all("operand 1 on gpu:1, operand 2 on cpu" in text for text in shown)
