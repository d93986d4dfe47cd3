"""``strict()`` in JAX: its own refusal in d2ldev's words, and what it would move in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax import strict
from jax._src import pjit, stages

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


@pytest.fixture
def free():
    """One that is not committed, and on the CPU."""
    return jnp.ones(3)


MIXING = {
    "operator": lambda x, y: x + y,
    "reflected": lambda x, y: y - x,
    "jnp": jnp.add,
    "lax": jax.lax.add,
    "jit": jax.jit(lambda x, y: x * y),
    "closure": lambda x, y: jax.jit(lambda x: x * y)(x),
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
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("seen", [False, True], ids=["new", "seen"])
def test_an_array_that_is_not_committed_is_where_its_bytes_are(backend, x, free, name, seen):
    operation = MIXING[name]
    for _ in range(3 * seen):  # from then on it is C++'s
        operation(x, free)
    for _ in range(2):
        with backend.strict(), pytest.raises(DeviceMismatchError, match="cannot run"):
            operation(x, free)
    operation(x, free)


@pytest.mark.parametrize("name", [name for name in MIXING if name != "closure"])
def test_committed_arrays_raise_at_the_operation_with_jax_s_error_as_the_cause(backend, x, y, name):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        MIXING[name](x, y)
    assert "Received incompatible devices for jitted computation" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="Received incompatible devices"):
        MIXING[name](x, y)


def test_a_committed_array_that_is_closed_over_is_an_operand(backend, x, y):
    with backend.strict(), pytest.raises(DeviceMismatchError, match="closed_over_0 on gpu:0"):
        MIXING["closure"](x, y)


def test_the_error_names_every_operand_and_its_device(backend, x, y):
    step = jax.jit(lambda params, batch: params["w"] * batch + params["b"])
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        step({"w": x, "b": x}, y)
    error = caught.value
    assert error.attempted == "run <lambda>"
    assert "params['b'] on gpu:1, params['w'] on gpu:1, batch on gpu:0" in error.problem
    assert error.fix == "batch = backend.to(batch, 'gpu:1')"


def test_lowering_ahead_of_time_raises_too(backend, x, y):
    with backend.strict(), pytest.raises(DeviceMismatchError, match="x on gpu:1, y on gpu:0"):
        jax.jit(lambda x, y: x + y).lower(x, y)


def test_an_error_from_elsewhere_is_translated_when_it_leaves_the_block(backend, x, y):
    try:
        x + y
    except ValueError as error:
        own = error
    with pytest.raises(DeviceMismatchError, match="x on gpu:1, y on gpu:0") as caught:  # noqa: SIM117
        with backend.strict():
            raise own
    assert caught.value.__cause__ is own


@pytest.mark.parametrize("text", ["", "incompatible", "Got argument x of add with shape ()"])
def test_other_errors_leave_it_as_they_are(backend, text):
    error = ValueError(text)
    with pytest.raises(ValueError) as caught, backend.strict():  # noqa: PT011
        raise error
    assert caught.value is error


NO_OPERANDS = {
    "int": 2,
    "float": 2.0,
    "NumPy scalar": np.float32(2),
    "NumPy array": VALUES,
    "0-dim": jnp.float32,  # made in the test, for JAX must not be initialised yet
}


@pytest.mark.parametrize("name", NO_OPERANDS)
def test_numbers_and_numpy_s_arrays_are_no_operands(backend, x, name):
    number = NO_OPERANDS[name]
    number = number(2) if callable(number) else number
    with backend.strict():
        results = [x * number, jax.jit(lambda x, n: x * n)(x, number)]
    assert {backend.device_of(result) for result in results} == {gpu(1)}


def test_a_number_that_is_committed_elsewhere_is_an_operand_as_in_jax(backend, x):
    number = backend.asarray(2.0, device="cpu")
    with backend.strict(), pytest.raises(DeviceMismatchError, match="y on cpu"):
        x * number


def test_a_number_on_a_gpu_that_is_not_jax_s_default_is_an_operand(backend, x):
    with backend.on("gpu:0"):
        number = jnp.ones(2).sum()
    with backend.strict(), pytest.raises(DeviceMismatchError, match="y on gpu:0"):
        x * number


def test_a_random_key_that_is_not_committed_is_no_operand(backend, x):
    with backend.strict():
        assert backend.device_of(jax.random.permutation(jax.random.key(0), x)) is gpu(1)


AGREEING = {
    "at": lambda x: x.at[0].set(1.0),
    "at indices": lambda x: x.at[np.array([0, 2])].add(1.0),
    "index": lambda x: x[np.array([0, 1])],
    "slice": lambda x: x[1:],
    "array": lambda x: jnp.array([x[0], 1.0]),
    "pad": lambda x: jnp.pad(x, 1),
    "zeros_like": lambda x: x + jnp.zeros_like(x),
    "logsumexp": lambda x: jax.scipy.special.logsumexp(x),
    "scan": lambda x: jax.lax.scan(lambda c, a: (c + a, c), 0.0, x)[1],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, -c[1]), (0, x)),
    "vmap": lambda x: jax.vmap(lambda a: a * 2 + 1)(x),
    "grad": jax.grad(lambda x: (x * x).sum()),
    "grad at": jax.grad(lambda x: (x.at[0].set(1.0) ** 2).sum()),
    "hessian": jax.hessian(lambda x: (x**3).sum()),
    "jit": jax.jit(lambda x: x * jnp.arange(3) + jnp.array([1.0, 2.0, 3.0])),
    "checkpoint": jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())),
    "random": lambda x: x + jax.random.normal(jax.device_put(jax.random.key(0), x.device), (3,)),
    "device_put": lambda x: jax.device_put(jnp.ones(3), x.device) + x,
}


@pytest.mark.parametrize("name", AGREEING)
def test_what_jax_mixes_by_itself_is_not_refused(backend, x, name):
    expected = AGREEING[name](x)
    with backend.strict():
        found = [AGREEING[name](x) for _ in range(2)]
    for result in found:
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        assert all(np.array_equal(a, b) and a.devices() == b.devices() for a, b in pairs)


JAXS_OWN = {
    "NumPy's": lambda x: jnp.concatenate([x, VALUES]),
    "zeros_like": jax.grad(lambda x: ((x + jnp.zeros_like(x)) ** 2).sum()),
}


@pytest.mark.parametrize("name", JAXS_OWN)
def test_what_looks_like_the_user_s_is_made_there_in_the_device_s_scope(backend, x, name):
    with backend.strict(), pytest.raises(DeviceMismatchError):
        JAXS_OWN[name](x)
    with backend.strict(), backend.on("gpu:1"):
        assert backend.device_of(JAXS_OWN[name](x)) is gpu(1)


def test_what_jit_was_told_to_take_to_a_place_may_be_elsewhere(backend, x, free):
    there = jax.sharding.SingleDeviceSharding(x.device)
    with backend.strict():
        assert backend.device_of(jax.jit(jnp.add, in_shardings=there)(x, free)) is gpu(1)


def test_arrays_that_are_spread_over_devices_are_computed_with(backend):
    mesh = jax.sharding.Mesh([backend.native("gpu:0"), backend.native("gpu:1")], "d")
    spread = jax.device_put(VALUES[:2], jax.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    with backend.strict():
        assert (spread + spread).tolist() == [0.0, 2.0]


def test_afterwards_the_very_original_objects_are_in_place(backend, x, free):
    def state():
        return pjit._pjit_call_impl_python, stages._device_assignment_mismatch_error

    before = state()
    with backend.strict():
        assert not {*state()} & {*before}
        with backend.strict(), pytest.raises(DeviceMismatchError):
            x + free
    assert state() == before
    assert strict._setting().value is False


def test_nothing_is_traced_again_in_a_block_or_after_it(backend, x):
    traced = []
    function = jax.jit(lambda x: traced.append(x) or x + 1)
    function(x)
    for _ in range(3):
        with backend.strict():
            function(x)
        function(x)
    assert len(traced) == 1


FLOWS = {
    "fori_loop": lambda f, u: jax.lax.fori_loop(0, 3, lambda i, c: f(c), u),
    "scan": lambda f, u: jax.lax.scan(lambda c, x: (f(c), c), u, None, length=3),
    "while_loop": lambda f, u: jax.lax.while_loop(lambda c: c[0] < 9, f, u),
    "cond": lambda f, u: jax.lax.cond(True, f, lambda a: -a, u),
    "map": lambda f, u: jax.lax.map(f, u),
}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=list(FLOWS))
def test_what_a_function_of_control_flow_closes_over_is_an_operand(backend, flow):
    there, here = backend.ones(3, device="gpu:1"), jnp.ones(3)
    with backend.strict(), pytest.raises(DeviceMismatchError):
        flow(lambda c: c + there, here)
