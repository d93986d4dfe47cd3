"""``jax_default_matmul_precision``: the default of all threads, and what is compiled."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from d2ldev import ScopeError


def theirs():
    return jax.config.jax_default_matmul_precision


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def precisions_of(function, *operands):
    """Return the precisions of the products of a function that JAX traces."""
    equations = jax.make_jaxpr(function)(*operands).eqns
    return [
        equation.params["precision"]
        for equation in equations
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]


@pytest.mark.parametrize(
    ("name", "inside"), [("highest", "highest"), ("high", "high"), ("medium", "bfloat16")]
)
def test_a_block_is_the_default_of_all_threads(backend, name, inside):
    before = theirs()
    with backend.matmul_precision(name):
        assert [theirs(), in_a_thread(theirs)] == [inside, inside]
    assert [theirs(), in_a_thread(theirs)] == [before, before]


def test_a_setting_is_the_default_of_all_threads(backend, configure):
    configure("jax_default_matmul_precision", None)
    backend.matmul_precision("highest")
    assert [theirs(), in_a_thread(theirs)] == ["highest", "highest"]
    jax.config.update("jax_default_matmul_precision", "high")
    assert backend.matmul_precision() == "high"


def test_a_less_precise_context_of_the_users_own_is_no_silent_end_of_a_block(backend, configure):
    configure("jax_default_matmul_precision", None)
    with jax.default_matmul_precision("high"):
        with pytest.raises(ScopeError, match=r"jax.default_matmul_precision\('high'\) is in force"):
            backend.matmul_precision("highest")
        with backend.matmul_precision("medium") as found:
            assert found == "high"
        assert theirs() == "high"
    assert [theirs(), in_a_thread(theirs)] == [None, None]


def test_a_block_may_end_in_a_context_of_the_users_own(backend, configure):
    configure("jax_default_matmul_precision", None)
    block, own = backend.matmul_precision("highest"), jax.default_matmul_precision("high")
    for each in (block, own):
        each.__enter__()
    for each in (block, own):
        assert backend.matmul_precision() == "high"
        each.__exit__(None, None, None)
    assert [theirs(), in_a_thread(theirs)] == [None, None]


@pytest.mark.parametrize(
    ("jax_says", "found"),
    [
        *[(None, "medium"), ("default", "medium"), ("bfloat16", "medium")],
        *[("BF16_BF16_F32", "medium"), ("tensorfloat32", "high"), ("BF16_BF16_F32_X3", "high")],
        *[("TF32_TF32_F32", "high"), ("float32", "highest"), ("F32_F32_F32", "highest")],
    ],
)
def test_jax_words_are_understood(backend, jax_says, found):
    with jax.default_matmul_precision(jax_says):
        assert backend.matmul_precision() == found


@pytest.mark.parametrize(("name", "found"), [("highest", "HIGHEST"), ("high", "HIGH")])
def test_products_and_convolutions_are_traced_with_it(backend, name, found):
    def both(x, kernel):
        return jnp.sum(x @ x) + jax.lax.conv(x[None, None], kernel, (1, 1), "SAME")

    with backend.matmul_precision(name):
        traced = precisions_of(both, jnp.ones((4, 4)), jnp.ones((1, 1, 3, 3)))
    precision = jax.lax.Precision[found]
    assert traced == [(precision, precision)] * 2


def test_a_compiled_function_compiles_again_in_another_precision(backend):
    traced = []

    @jax.jit
    def square(x):
        traced.append(theirs())
        return x @ x

    for name in ("highest", "high", "highest", "high"):
        with backend.matmul_precision(name):
            square(jnp.ones((2, 2)))
    assert traced == ["highest", "high"]


def test_the_steps_of_a_learner_compile_again_in_another_precision(backend):
    traced = []

    def loss(prediction, y):
        traced.append(theirs())
        return jnp.mean((prediction - y) ** 2)

    learner = backend.learner(backend.mlp([2, 1]), loss=loss)
    x, y = jnp.ones((3, 2)), jnp.ones((3, 1))
    for name in ("highest", "medium", "highest", "medium"):
        with backend.matmul_precision(name):
            learner.step((x,), y)
    assert list(dict.fromkeys(traced)) == ["highest", "bfloat16"]
