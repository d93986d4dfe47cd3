"""Where an array is: traced, deleted, sharded, uncommitted, in the host's memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from d2ldev import UnsupportedValueError, cpu, gpu

TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": jax.grad,
    "vmap": jax.vmap,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}
transformations = pytest.mark.parametrize(
    "transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS
)
QUESTIONS = {
    "device_of": lambda backend, x: backend.device_of(x),
    "to": lambda backend, x: backend.to(x, "gpu:0"),
    "to, in a batch": lambda backend, x: backend.to({"x": [x]}, "cpu"),
    "copy": lambda backend, x: backend.copy(x),
    "address": lambda backend, x: backend.address(x),
    "from_dlpack": lambda backend, x: backend.from_dlpack(x),
    "place": lambda backend, x: backend.place([x], "cpu"),
    "placement": lambda backend, x: backend.placement([x]),
}
questions = pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)


def refusals(ask, backend, transform):
    """What the question raises on a value that is only traced."""
    raised = []

    def f(x):
        try:
            ask(backend, x)
        except Exception as error:
            raised.append(error)
        return (x * x).sum()

    transform(f)(backend.ones(3, device="gpu:0"))
    return raised


@questions
@transformations
def test_a_traced_value_has_no_place(backend, ask, transform):
    raised = refusals(ask, backend, transform)
    assert raised
    assert {type(error) for error in raised} == {UnsupportedValueError}
    assert "is traced by jit, grad or vmap" in str(raised[0])


def test_a_traced_value_gives_no_numpy_array(backend):
    raised = refusals(lambda backend, x: backend.to_numpy(x), backend, jax.grad)
    assert [type(error) for error in raised] == [UnsupportedValueError]


def test_a_traced_value_is_converted_in_the_computation(backend):
    x = jax.jit(lambda x: backend.asarray(x, dtype="int32"))(backend.full(2, 1.5))
    assert x.tolist() == [1, 1]


def test_what_comes_out_of_a_traced_function_has_a_place(backend):
    x = jax.jit(lambda x: x + 1)(backend.ones(3, device="gpu:1"))
    assert backend.device_of(x) is gpu(1)


def test_a_gradient_is_where_the_parameter_is(backend):
    x = backend.ones(3, device="gpu:1")
    assert backend.device_of(jax.grad(lambda x: (x * x).sum())(x)) is gpu(1)


@pytest.fixture
def deleted(backend):
    x = backend.ones(3, device="gpu:0")
    x.delete()
    return x


@questions
def test_a_deleted_array_has_no_place(backend, deleted, ask):
    with pytest.raises(UnsupportedValueError, match=r"float32\[3\] was deleted, or donated"):
        ask(backend, deleted)


@pytest.mark.parametrize("ask", ["to_numpy", "asarray"])
def test_a_deleted_array_has_no_values(backend, deleted, ask):
    arguments = {"dtype": "int32"} if ask == "asarray" else {}
    with pytest.raises(UnsupportedValueError, match="deleted"):
        getattr(backend, ask)(deleted, **arguments)


def test_a_donated_array_has_no_place(backend):
    x = backend.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(UnsupportedValueError, match="donated"):
        backend.to(x, "cpu")


@pytest.fixture
def sharded(backend):
    mesh = Mesh(np.array([backend.native("gpu:0"), backend.native("gpu:1")]), ("i",))
    return jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("i")))


@questions
def test_an_array_on_several_devices_has_no_one_place(backend, sharded, ask):
    with pytest.raises(UnsupportedValueError, match="spread over 2 devices"):
        ask(backend, sharded)


def test_a_replicated_array_has_no_one_place(backend, sharded):
    replicated = jax.device_put(sharded, NamedSharding(sharded.sharding.mesh, PartitionSpec()))
    with pytest.raises(UnsupportedValueError, match="spread over 2 devices"):
        backend.to(replicated, "gpu:0")


def test_the_fix_for_a_sharded_array_works(backend, sharded):
    x = jax.device_put(sharded, backend.native("cpu"))
    assert backend.device_of(x) is cpu()


def test_a_sharded_array_has_values(backend, sharded):
    assert backend.to_numpy(sharded).tolist() == [0, 1, 2, 3]


def test_a_mesh_of_one_device_is_that_device(backend):
    mesh = Mesh(np.array([backend.native("gpu:1")]), ("i",))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("i")))
    assert backend.device_of(x) is gpu(1)
    assert backend.to(x, "gpu:1") is x


def test_an_array_in_other_memory_of_a_gpu_is_not_on_it(backend):
    native = backend.native("gpu:0")
    kinds = [memory.kind for memory in native.addressable_memories()]
    others = [kind for kind in kinds if kind != native.default_memory().kind]
    if not others:
        pytest.skip("this JAX has one kind of memory on the CPU")
    sharding = SingleDeviceSharding(native, memory_kind=others[0])
    x = jax.device_put(jnp.ones(2), sharding)
    with pytest.raises(UnsupportedValueError, match=rf"in the host's memory \({others[0]}\)"):
        backend.device_of(x)


def test_an_uncommitted_array_is_where_its_bytes_are(backend):
    x = jnp.ones(2)
    assert not x.committed
    assert backend.device_of(x) is cpu()
    assert backend.to(x, "cpu") is x


@pytest.mark.parametrize("value", [jax.ShapeDtypeStruct((2,), "float32"), jnp.float32, jax.devices])
def test_what_is_no_array_is_refused(backend, value):
    with pytest.raises(UnsupportedValueError, match="is no JAX array"):
        backend.device_of(value)


def test_random_keys_have_a_place(backend):
    key = backend.to(jax.random.key(0), "gpu:1")
    assert backend.device_of(key) is gpu(1)


@pytest.mark.parametrize("place", [cpu(), gpu(0), gpu(1)], ids=str)
def test_jax_s_default_device_is_known(backend, place):
    with jax.default_device(backend.native(place)):
        assert backend.default_device() is place


def test_jax_s_default_device_may_be_a_platform(backend):
    with jax.default_device("cpu"):
        assert backend.default_device() is cpu()


def test_a_scope_is_jax_s_scope_as_well(backend):
    with backend.on("gpu:1"):
        assert jnp.ones(1).devices() == {backend.native("gpu:1")}
