"""``strict()`` in JAX: what a function that JAX traces takes from around it is an operand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from d2ldev import DeviceMismatchError

# ``(f, u) -> result``: JAX traces f before it computes anything, and dispatches the rest itself.
TRACING = {
    "checkpoint": lambda f, u: jax.checkpoint(f)(u),
    "checkpoint with a policy": lambda f, u: jax.checkpoint(
        f, policy=jax.checkpoint_policies.nothing_saveable
    )(u),
    "remat": lambda f, u: jax.remat(f)(u),
    "grad": lambda f, u: jax.grad(lambda u: jax.checkpoint(f)(u).sum())(u),
    "vmap": lambda f, u: jax.vmap(jax.checkpoint(f))(u[None]),
    "partial": lambda f, u: jax.checkpoint(partial(f))(u),
    "nnx": lambda f, u: nnx.remat(lambda u: f(u))(u),
    "scan": lambda f, u: jax.lax.scan(lambda c, _: (f(c), None), u, None, length=2)[0],
    "cond": lambda f, u: jax.lax.cond(True, f, lambda a: -a, u),
}


class Custom:
    """A function with a derivative of its own, made of one without."""

    @staticmethod
    def vjp(f, u):
        function = jax.custom_vjp(f)
        function.defvjp(lambda u: (f(u), None), lambda _, g: (g,))
        return jax.grad(lambda u: function(u).sum())(u)

    @staticmethod
    def jvp(f, u):
        function = jax.custom_jvp(f)
        function.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
        return jax.jvp(function, (u,), (u,))[0]


TRACING |= {"custom_vjp": Custom.vjp, "custom_jvp": Custom.jvp}


class Shift(nnx.Module):
    def __init__(self, x):
        self.x = nnx.Param(x)

    def __call__(self, u):
        return u + self.x


def holding(y):
    """Functions that add ``y`` to their argument, which they have in different ways."""
    nested, module = {"layers": [{"bias": y}]}, Shift(y)

    def add(u):
        return u + y

    return {
        "variable": add,
        "function": lambda u: add(u) * 2,
        "nesting": lambda u: u + nested["layers"][0]["bias"],
        "module": lambda u: module(u),
        "method": module.__call__,
        "argument": partial(lambda y, u: u + y, y),
        "what is computed of it": lambda u: u + y * 2,
    }


HELD = list(holding(None))


@pytest.fixture
def u(backend):
    return backend.ones(3, device="gpu:1")


@pytest.mark.parametrize("tracing", TRACING.values(), ids=list(TRACING))
def test_an_array_elsewhere_that_is_not_committed_is_an_error(backend, u, tracing):
    y = jnp.ones(3)
    with backend.strict(), pytest.raises(DeviceMismatchError, match="gpu:1"):
        tracing(lambda u: u + y, u)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("tracing", ["checkpoint", "grad", "scan"])
def test_it_is_found_wherever_the_function_has_it(backend, u, tracing, held):
    function = holding(jnp.ones(3))[held]
    with backend.strict(), pytest.raises(DeviceMismatchError, match="gpu:1"):
        TRACING[tracing](function, u)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("tracing", ["checkpoint", "grad", "scan"])
def test_one_that_is_there_is_none(backend, u, tracing, held):
    function = holding(backend.ones(3, device="gpu:1"))[held]
    with backend.strict():
        result = TRACING[tracing](function, u)
    assert backend.to_numpy(result).shape == (3,)


def test_what_jax_makes_in_a_function_that_it_runs_again_is_none(backend, u):
    y = backend.ones(3, device="gpu:1")
    with backend.strict():
        result = jax.checkpoint(lambda u: (u + y).at[0].set(5.0)[jnp.array([0, 1])])(u)
    assert backend.to_numpy(result).tolist() == [5, 2]


def test_a_dict_that_jax_cannot_sort_is_passed_over(backend, u):
    mixed = {1: u, "one": u}
    with backend.strict():
        result = jax.checkpoint(lambda u: (u + mixed[1]).at[0].set(5.0))(u)
    assert backend.to_numpy(result).tolist() == [5, 2, 2]
