"""Tensors: where an array is, and copies, memory and logs of JAX's arrays."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from peer_rows import peer_rows

from d2ldev import DeviceLog, UnsupportedValueError, cpu, gpu
from d2ldev.framework.testing import framework_of

# -- the device of an array ------------------------------------------------------------------------

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
    """Return what the question raises on a value that is only traced."""
    raised = []

    def f(x):
        try:
            ask(backend, x)
        except Exception as error:
            raised.append(error)
        return (x * x).sum()

    transform(f)(backend.ones(3, device="gpu:0"))
    return raised


def assert_traced(raised):
    assert raised
    assert {type(error) for error in raised} == {UnsupportedValueError}
    assert "is traced by jit, grad or vmap" in str(raised[0])


@transformations
def test_a_traced_value_has_no_place(backend, transform):
    assert_traced(refusals(QUESTIONS["device_of"], backend, transform))


@questions
def test_a_traced_value_is_refused_by_every_question(backend, ask):
    assert_traced(refusals(ask, backend, jax.grad))


def test_a_traced_value_gives_no_numpy_array(backend):
    assert_traced(refusals(lambda backend, x: backend.to_numpy(x), backend, jax.grad))


def test_a_traced_value_is_converted_in_the_computation(backend):
    x = jax.jit(lambda x: backend.asarray(x, dtype="int32"))(backend.full(2, 1.5))
    assert x.tolist() == [1, 1]


def test_results_of_a_traced_function_have_a_device(backend):
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


@pytest.mark.parametrize("value", [jax.ShapeDtypeStruct((2,), "float32"), jnp.float32, jax.devices])
def test_an_object_that_is_not_an_array_is_refused(backend, value):
    with pytest.raises(UnsupportedValueError, match="is not a JAX array"):
        backend.device_of(value)


def test_random_keys_have_a_place(backend):
    key = backend.to(jax.random.key(0), "gpu:1")
    assert backend.device_of(key) is gpu(1)


# -- copies ----------------------------------------------------------------------------------------


def test_each_array_of_a_batch_is_one_call_below_device_put(backend, puts, copies):
    batch = {"x": backend.ones(2), "y": [backend.zeros(3), (backend.arange(2), "label")]}
    puts.clear()
    moved = backend.to(batch, "gpu:1")
    assert (copies, puts) == ([(backend.native("gpu:1"), True)] * 3, [])
    assert moved["y"][1][1] == "label"


def test_a_copy_of_a_batch_is_where_each_array_was(backend, copies):
    batch = [backend.ones(2, device=place) for place in ("cpu", "gpu:0", "cpu", "gpu:0")]
    copied = backend.copy(batch)
    natives = [backend.native(place) for place in ("cpu", "cpu", "gpu:0", "gpu:0")]
    assert sorted(copies, key=str) == [(native, True) for native in natives]
    assert [backend.device_of(x) for x in copied] == [cpu(), gpu(0), cpu(), gpu(0)]


@pytest.mark.parametrize("method", ["to", "copy"])
def test_uncommitted_arrays_are_committed_when_they_move(backend, method):
    assert getattr(backend, method)(jnp.ones(2), "gpu:0").committed


_UNCOMMITTED = {
    "an array": lambda: jnp.ones(2),
    "random keys": lambda: jax.random.key(0),
    "a batch": lambda: {"x": jnp.ones(2), "y": [(jnp.zeros(3), "label")]},
    "a state of optax": lambda: optax.adam(0.1).init({"w": jnp.ones(2)}),
}
_WAYS = {
    "to": lambda backend, x: backend.to(x, "cpu"),
    "place": lambda backend, x: backend.place(x, "cpu"),
    "prefetch": lambda backend, x: next(iter(backend.prefetch([x], "cpu"))),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("what", _UNCOMMITTED)
def test_an_uncommitted_array_where_it_is_becomes_committed_on_the_same_memory(backend, what, way):
    x = _UNCOMMITTED[what]()
    moved = _WAYS[way](backend, x)
    for before, after in zip(jax.tree.leaves(x), jax.tree.leaves(moved), strict=True):
        if isinstance(before, jax.Array):
            assert (before.committed, after.committed) == (False, True)
            assert address_of(after) == address_of(before)
    assert _WAYS[way](backend, moved) is moved


def address_of(x):
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(x) if keys else x).unsafe_buffer_pointer()


def test_the_variables_of_a_model_and_its_optimizer_become_committed_in_place(backend):
    net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    arrays = jax.tree.leaves(nnx.state((net, optimizer)))
    assert not all(x.committed for x in arrays)
    assert backend.place((net, optimizer), "cpu")[0] is net
    placed = jax.tree.leaves(nnx.state((net, optimizer)))
    assert all(x.committed for x in placed)
    assert list(map(address_of, placed)) == list(map(address_of, arrays))


def test_a_donated_array_is_gone_also_by_its_uncommitted_name(backend):
    x = jnp.ones(2)
    moved = backend.to(x, "cpu")
    jax.jit(lambda y: y + 1, donate_argnums=0)(moved)
    assert (moved.is_deleted(), x.is_deleted()) == (True, True)


def test_a_constant_of_a_function_that_is_traced_stays_an_array(backend):
    constant = jnp.ones(2)

    @jax.jit
    def add(x):
        there = backend.to(constant, "cpu")
        assert isinstance(there, jax.Array)
        assert not isinstance(there, jax.core.Tracer)
        return x + there

    assert add(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("copy", [None, False])
def test_asarray_commits_to_the_device_that_it_is_given(backend, copy):
    x = jnp.ones(2)
    made = backend.asarray(x, device="cpu", copy=copy)
    assert (made.committed, backend.address(made)) == (True, backend.address(x))
    assert backend.asarray(x, copy=copy) is x


def test_asarray_with_copy_copies_also_where_it_commits(backend):
    x = jnp.ones(2)
    made = backend.asarray(x, device="cpu", copy=True)
    assert made.committed
    assert backend.address(made) != backend.address(x)


def test_a_copy_where_it_was_is_committed(backend):
    assert backend.copy(jnp.ones(2)).committed


def test_a_converted_array_is_committed_where_it_was(backend):
    x = backend.asarray(backend.ones(2, device="gpu:1"), dtype="int32")
    assert x.committed
    assert backend.device_of(x) is gpu(1)
    assert backend.asarray(jnp.ones(2), dtype="int32").committed


@pytest.mark.parametrize("place", [cpu(), gpu(0)], ids=str)
@pytest.mark.parametrize("target", [None, "same"])
def test_a_copy_outlives_its_source(backend, place, target):
    x = backend.full(2**14, 3.0, device=place)
    copied = backend.copy(x, place if target else None)
    assert backend.address(copied) != backend.address(x)
    x.delete()
    assert backend.to_numpy(copied).max() == 3


def test_a_moved_array_outlives_its_source(backend):
    x = backend.full(2**14, 3.0)
    moved = backend.to(x, "gpu:0")
    assert backend.address(moved) != backend.address(x)
    x.delete()
    assert backend.to_numpy(moved).max() == 3


def test_random_keys_move_and_draw_the_same(backend):
    key = jax.random.key(3)
    moved = backend.to({"key": key}, "gpu:1")["key"]
    x = jax.random.uniform(moved, (3,))
    assert backend.device_of(x) is gpu(1)
    assert x.tolist() == jax.random.uniform(key, (3,)).tolist()


def test_a_copied_key_is_new_memory(backend):
    key = jax.random.key(3)
    copied = backend.copy(key)
    assert backend.address(copied) != backend.address(key)
    assert copied.dtype == key.dtype


def test_random_keys_in_numpy_are_their_numbers(backend):
    key = jax.random.key(3)
    assert backend.to_numpy(key).tolist() == jax.random.key_data(key).tolist()


def test_narrow_integers_move(backend):
    x = jnp.array([1, -2], "int4")
    moved = backend.to(x, "gpu:0")
    assert (moved.dtype, moved.tolist()) == (x.dtype, [1, -2])


def test_jax_s_own_words_may_stand_in_a_batch(backend):
    x = backend.ones(1)
    batch = [x, jnp.float32, x.dtype, backend.native("cpu"), x.sharding]
    moved = backend.to(batch, "gpu:0")
    assert backend.device_of(moved[0]) is gpu(0)
    assert all(after is before for after, before in zip(moved[1:], batch[1:], strict=True))


def test_a_transfer_guard_of_the_user_s_allows_what_was_asked_for(backend):
    x = backend.ones(2)
    with jax.transfer_guard("disallow"):
        assert backend.device_of(backend.to(x, "gpu:0")) is gpu(0)
        assert backend.device_of(backend.copy(x)) is cpu()


def make_optimizer(backend):
    net = backend.mlp([3, 2], device="gpu:1")
    return backend.place(nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param), "gpu:1")


MAKERS = {
    "array": lambda backend: backend.asarray(np.arange(3.0), device="gpu:1"),
    "model": lambda backend: backend.mlp([3, 4, 1], device="gpu:1"),
    "optimizer": make_optimizer,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_deep_copy_is_where_the_original_is(backend, name):
    original = MAKERS[name](backend)
    duplicate = copy.deepcopy(original)
    assert duplicate is not original
    placement = backend.placement([duplicate])
    assert set(placement.values()) == {gpu(1)}
    copies = backend.named_tensors([duplicate])
    for tensor_name, x in backend.named_tensors([original]).items():
        assert copies[tensor_name].committed
        assert np.array_equal(jax.device_get(x), jax.device_get(copies[tensor_name]))


# -- memory of others ------------------------------------------------------------------------------


def align(dtype="float32", count=64, offset=0):
    """Return zeros that begin ``offset`` bytes after a multiple of 64."""
    nbytes = count * np.dtype(dtype).itemsize
    buffer = np.zeros(nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    return buffer[start : start + nbytes].view(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint32", "complex64", "bool"])
def test_aligned_memory_is_taken_over(backend, dtype):
    data = align(dtype)
    x = backend.from_dlpack(data)
    assert backend.address(x) == data.ctypes.data
    assert x.dtype == data.dtype
    assert x.committed


def test_writes_to_the_source_are_visible(backend):
    data = align()
    x = backend.from_dlpack(data)
    data[3] = 7
    assert backend.to_numpy(x)[3] == 7


def test_the_memory_outlives_its_source(backend):
    data = align()
    data[:] = 5
    x = backend.from_dlpack(data)
    del data
    assert backend.to_numpy(x).tolist() == [5] * 64


@pytest.mark.parametrize("offset", [4, 16, 32, 60])
def test_memory_that_jax_would_copy_is_refused(backend, offset):
    with pytest.raises(UnsupportedValueError, match="multiple of 64 bytes"):
        backend.from_dlpack(align(offset=offset))


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_a_dtype_that_jax_would_narrow_is_refused(backend, dtype):
    with pytest.raises(UnsupportedValueError, match="copy"):
        backend.from_dlpack(align(dtype))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x[::-1],
        lambda x: x[::2],
        lambda x: x.reshape(8, 8)[:, :4],
        lambda x: x.reshape(8, 8).T,
        lambda x: x.reshape(2, 4, 8).swapaxes(0, 1),
        lambda x: np.broadcast_to(x[:1], 8),
    ],
    ids=["backwards", "with gaps", "a part", "transposed", "swapped", "broadcast"],
)
def test_memory_in_another_order_is_refused_and_not_misread(backend, layout):
    with pytest.raises(UnsupportedValueError):
        backend.from_dlpack(layout(align()))


@pytest.mark.parametrize("shape", [(64,), (8, 8), (2, 1, 32), (1, 64, 1), (4, 2, 8)])
def test_memory_in_the_order_of_c_is_taken_over_in_any_shape(backend, shape):
    data = align().reshape(shape)
    data[:] = np.arange(64).reshape(shape)
    x = backend.from_dlpack(data)
    assert backend.address(x) == data.ctypes.data
    assert backend.to_numpy(x).tolist() == data.tolist()


def test_a_dimension_of_one_has_no_order(backend):
    data = align().reshape(1, 64).T
    assert backend.from_dlpack(data).shape == (64, 1)


def test_an_empty_array_is_taken(backend):
    assert backend.from_dlpack(align(count=0)).shape == (0,)


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1"])
def test_an_array_of_jax_s_is_itself_where_it_is(backend, device):
    x = backend.ones(2, device=device)
    assert backend.from_dlpack(x) is x


def test_an_uncommitted_array_is_itself(backend):
    x = jnp.ones(2)
    assert backend.from_dlpack(x) is x
    assert backend.device_of(x) is cpu()


def test_other_frameworks_see_the_memory(backend):
    x = backend.arange(64, dtype="float32")
    assert np.from_dlpack(x).ctypes.data == backend.address(x)


# -- logs ------------------------------------------------------------------------------------------


def stack_all(backend, xs):
    return framework_of(backend).tensors.stack(xs)


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 3), (32,)], ids=str)
def test_arrays_of_any_shape_are_stacked(backend, shape):
    found = stack_all(backend, [jnp.full(shape, i) for i in range(40)])
    assert found.shape == (40, *shape)
    assert np.array_equal(found, np.stack([np.full(shape, i) for i in range(40)]))


def test_another_number_of_scalars_needs_no_other_program(backend, configure, caplog):
    xs = [jnp.int8(1)] * 600
    stack_all(backend, xs[:100])
    configure("jax_log_compiles", True)
    stack_all(backend, [jnp.int16(1)])
    assert any("Compiling" in each for each in caplog.messages)
    caplog.clear()
    stack_all(backend, xs[:500])
    programs = [each for each in caplog.messages if "Compiling" in each and "slice" not in each]
    assert programs == []


def test_a_traced_scalar_is_refused_with_the_fix(backend):
    log = DeviceLog(backend)

    @jax.jit
    def step(x):
        log.add(loss=x.sum())
        return x

    with pytest.raises(UnsupportedValueError, match="log loss") as caught:
        step(jnp.ones(2))
    assert caught.value.fix == "return loss from the compiled function, and log the result"
    assert log.flush() == {}


def test_both_sides_of_every_row_of_the_peers_give_the_same():
    rows = peer_rows("jax")
    assert len(rows) > 10
    assert [row for row in rows if row[2] != row[3]] == []
