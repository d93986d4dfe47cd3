"""Tensors that are made: committed, on the device from the start, in the dtypes of now; random."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax import devices, tensors

from d2ldev import Backend, OutOfDeviceMemoryError, UnsupportedValueError, cpu, gpu
from d2ldev.framework.testing import framework_of

PLACES = [cpu(), gpu(0), gpu(1)]
CREATORS = {
    "number": lambda backend, **where: backend.asarray(2.5, **where),
    "list": lambda backend, **where: backend.asarray([1, 2], **where),
    "nothing": lambda backend, **where: backend.asarray([], **where),
    "numpy": lambda backend, **where: backend.asarray(np.ones(2), **where),
    "zeros": lambda backend, **where: backend.zeros((), **where),
    "ones": lambda backend, **where: backend.ones((2, 3), **where),
    "full": lambda backend, **where: backend.full(2, 3, **where),
    "arange": lambda backend, **where: backend.arange(5, **where),
    "arange with a step": lambda backend, **where: backend.arange(1.0, 2.0, 0.25, **where),
    "rand": lambda backend, **where: backend.rand(2, **where),
    "randn with a seed": lambda backend, **where: backend.randn(2, seed=2**40, **where),
}
creators = pytest.mark.parametrize("make", CREATORS.values(), ids=CREATORS)
places = pytest.mark.parametrize("place", PLACES, ids=str)


@pytest.fixture
def wide(configure):
    """JAX with dtypes of 64 bits."""
    configure("jax_enable_x64", True)


@creators
@places
def test_new_arrays_are_committed(backend, make, place):
    assert make(backend, device=place).committed


@creators
def test_new_arrays_without_a_device_are_committed_to_the_cpu(backend, make):
    x = make(backend)
    assert x.committed
    assert backend.device_of(x) is cpu()


@creators
@places
@pytest.mark.parametrize("default", PLACES, ids=str)
def test_nothing_goes_through_jax_s_default_device(backend, make, place, default):
    make(backend, device=place)  # things made once per device and process do not count
    with (
        jax.default_device(backend.native(default)),
        jax.transfer_guard_device_to_device("disallow"),
    ):
        assert backend.device_of(make(backend, device=place)) is place


@creators
def test_arrays_made_in_jit_are_part_of_the_computation(backend, make):
    made = jax.jit(lambda: make(backend, device="cpu"))()
    assert made.dtype == make(backend, device="cpu").dtype


@pytest.mark.parametrize("make", [CREATORS["ones"], CREATORS["full"]])
def test_what_is_made_in_jit_does_not_yield_to_other_dtypes(backend, make):
    types = jax.eval_shape(lambda: make(backend))
    assert not types.weak_type


def test_the_dtypes_are_those_of_now(backend, wide):
    assert {"int64", "uint64", "float64", "complex128"} < set(backend.dtype_names)
    jax.config.update("jax_enable_x64", False)
    assert "float64" not in backend.dtype_names


def test_wide_dtypes_are_made_where_jax_has_them(backend, wide):
    made = [backend.zeros(1, dtype="float64"), backend.asarray(np.arange(3)), backend.ones(1)]
    assert [backend.dtype_of(x) for x in made] == ["float64", "int64", "float64"]
    assert backend.dtype_of(backend.rand(1)) == "float64"


@pytest.mark.parametrize("dtype", ["float64", np.float64, jnp.int64, np.dtype("complex128")])
def test_a_wide_dtype_that_jax_has_not_names_the_switch(backend, dtype):
    with pytest.raises(UnsupportedValueError, match="jax_enable_x64") as caught:
        backend.zeros(1, dtype=dtype)
    assert "jax.config.update('jax_enable_x64', True)" in caught.value.fix


def test_another_dtype_that_jax_has_not_does_not_name_the_switch(backend):
    with pytest.raises(UnsupportedValueError) as caught:
        backend.zeros(1, dtype="float31")
    assert "jax_enable_x64" not in str(caught.value)


@pytest.mark.parametrize(
    ("wide_name", "name"),
    [("float64", "float32"), ("int64", "int32"), ("uint64", "uint32"), ("complex128", "complex64")],
)
def test_wide_numpy_data_is_narrowed_as_jax_does_and_without_a_warning(backend, wide_name, name):
    data = np.arange(3).astype(wide_name)
    assert backend.dtype_of(backend.asarray(data)) == name == jnp.asarray(data).dtype.name


def test_memory_that_numpy_only_reads_is_not_shared_either(backend):
    data = np.zeros(2**14, np.float32)
    view = data.view()
    view.flags.writeable = False
    x = backend.asarray(view)
    data[:] = 9
    assert backend.to_numpy(x).max() == 0


def test_arrays_in_a_list_are_stacked_on_the_device(backend):
    rows = [backend.ones(2, device="gpu:0"), backend.zeros(2, device="gpu:0")]
    x = backend.asarray(rows, device="gpu:1")
    assert backend.device_of(x) is gpu(1)
    assert x.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("draw", ["rand", "randn"])
@pytest.mark.parametrize("shape", [(2**50,), (2**40, 2**40), (2**62,)])
def test_more_random_numbers_than_fit_are_an_error_at_once(backend, draw, shape):
    with pytest.raises(MemoryError):
        getattr(backend, draw)(shape)


@pytest.mark.parametrize("shape", [(2**62,), (2**40, 2**40)])
def test_a_size_that_no_address_reaches_is_out_of_memory(backend, shape):
    with pytest.raises(MemoryError):
        backend.zeros(shape)


# -- random numbers --------------------------------------------------------------------------------

SEEDS = [0, 1, -1, -2, 2**31, 2**32, 2**32 + 1, 2**40, -(2**40), 2**63]


def test_a_small_seed_is_jax_s_own(backend):
    x = backend.rand(3, seed=7, device="gpu:1")
    assert x.tolist() == jax.random.uniform(jax.random.key(7), (3,)).tolist()


def test_seeds_of_64_bits_give_numbers_of_their_own(backend):
    drawn = {tuple(backend.rand(4, seed=seed).tolist()) for seed in SEEDS}
    assert len(drawn) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_64_bits_repeats(backend, seed):
    assert backend.rand(4, seed=seed).tolist() == backend.rand(4, seed=seed).tolist()


def test_a_seed_gives_the_same_on_every_device(backend):
    drawn = {tuple(backend.randn(4, seed=3, device=place).tolist()) for place in backend.devices()}
    assert len(drawn) == 1


def test_threads_draw_different_numbers(backend):
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: tuple(backend.rand(4).tolist()), range(64)))
    assert len(set(drawn)) == 64


def test_a_seed_does_not_disturb_what_comes_without(monkeypatch, backend):
    monkeypatch.setattr("os.urandom", lambda size: b"1234"[:size])
    one, other = (Backend(type(framework_of(backend))(virtual_gpus=2)) for _ in range(2))
    one.rand(2, seed=5)
    assert one.rand(2).tolist() == other.rand(2).tolist()


def test_two_processes_do_not_draw_the_same(backend):
    one, other = (Backend(type(framework_of(backend))(virtual_gpus=2)) for _ in range(2))
    assert one.rand(2).tolist() != other.rand(2).tolist()


@pytest.mark.parametrize(
    "data", [np.array([1, 2**40]), np.array(-(2**31) - 1), np.array([2**63], "uint64")]
)
def test_integers_of_numpy_that_jax_would_make_others_of_are_refused(backend, data):
    with pytest.raises(UnsupportedValueError, match="jax_enable_x64"):
        backend.asarray(data)
    with pytest.raises(UnsupportedValueError, match="jax_enable_x64"):
        backend.to([data], "gpu:0")


# -- memory that does not suffice ------------------------------------------------------------------

COUNT = 2**10
NBYTES = 4 * COUNT
LARGE = {
    "zeros": lambda backend, place: backend.zeros(COUNT, device=place),
    "ones": lambda backend, place: backend.ones(COUNT, device=place),
    "full": lambda backend, place: backend.full((2, COUNT // 2), 3, device=place),
    "arange": lambda backend, place: backend.arange(COUNT, device=place),
    "rand": lambda backend, place: backend.rand(COUNT, device=place),
    "randn": lambda backend, place: backend.randn(COUNT, seed=1, device=place),
    "to": lambda backend, place: backend.to(backend.zeros(COUNT), place),
    "to, a batch": lambda backend, place: backend.to({"x": [backend.zeros(COUNT)]}, place)["x"][0],
    "copy": lambda backend, place: backend.copy(backend.zeros(COUNT), place),
    "place": lambda backend, place: backend.place([backend.zeros(COUNT)], place)[0],
    "asarray of a tensor": lambda backend, place: backend.asarray(
        backend.zeros(COUNT), device=place
    ),
    "astype": lambda backend, place: backend.asarray(
        backend.zeros(COUNT, dtype="bool", device=place), dtype="float32"
    ),
}
large = pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)


class Card:
    """The memory of gpu:0, as JAX tells of it; what was asked and waited for."""

    def __init__(self, free):
        self.stats = {"bytes_limit": 2**40, "bytes_in_use": 2**40 - free, "pool_bytes": 2**40}
        self.free_after_a_wait = free
        self.asked, self.waited = 0, []


@pytest.fixture
def card(backend, monkeypatch):
    """Gives JAX's device of gpu:0 so much free memory, and makes ``NBYTES`` a large array."""
    monkeypatch.setattr(tensors, "LARGE", NBYTES)
    monkeypatch.setattr(tensors, "FEW", NBYTES // 16)
    native, wait = backend.native("gpu:0"), jax.block_until_ready

    def install(free):
        card = Card(free)

        def memory_stats(self):
            card.asked += self is native
            return dict(card.stats) if self is native else None

        def wait_for_all(xs):
            is_list = isinstance(xs, list)  # what is queued, and not what was made
            card.waited += [] if is_list else [xs.nbytes]
            if is_list:
                card.stats["bytes_in_use"] = 2**40 - card.free_after_a_wait
            return wait(xs)

        monkeypatch.setattr(jax.Device, "memory_stats", memory_stats)
        monkeypatch.setattr(jax, "block_until_ready", wait_for_all)
        return card

    return install


def test_what_is_large_is_made_under_a_transfer_guard_as_what_is_small(backend, monkeypatch):
    x = backend.ones(3, device="gpu:1")
    for large in (2**20, 1):
        monkeypatch.setattr(tensors, "LARGE", large)
        with jax.transfer_guard("disallow"):
            assert backend.arange(3, device="gpu:1").shape == (3,)
            assert backend.asarray(x, dtype="int32").dtype == "int32"


@large
def test_an_array_that_does_not_fit_is_an_error_of_the_call(backend, card, make):
    full = card(NBYTES - 1)
    with pytest.raises(OutOfDeviceMemoryError, match="gpu:0 has too little free memory") as caught:
        make(backend, "gpu:0")
    assert f"{NBYTES} bytes are wanted, and {NBYTES - 1} are there" in str(caught.value)
    assert full.waited == []


@large
def test_memory_that_queued_work_gives_back_suffices(backend, card, make):
    card(0).free_after_a_wait = 2**30
    assert backend.device_of(make(backend, "gpu:0")) is gpu(0)


@large
def test_what_is_large_against_the_free_memory_is_waited_for(backend, card, make):
    tight = card(4 * NBYTES - 1)
    assert backend.device_of(make(backend, "gpu:0")) is gpu(0)
    assert tight.waited == [NBYTES]


@large
def test_what_is_little_against_the_free_memory_is_not_waited_for(backend, card, make):
    roomy = card(4 * NBYTES)
    make(backend, "gpu:0")
    assert (roomy.asked, roomy.waited) == (1, [])


@creators
def test_small_tensors_are_not_checked(backend, card, make):
    full = card(0)
    make(backend, device="gpu:0")
    backend.to(make(backend), "gpu:0")
    assert (full.asked, full.waited) == (0, [])


@large
def test_a_promise_that_is_not_kept_is_an_error_of_the_call(backend, card, make, monkeypatch):
    card(4 * NBYTES - 1)

    def fail(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    monkeypatch.setattr(jax, "block_until_ready", fail)
    with pytest.raises(OutOfDeviceMemoryError, match="gpu:0"):
        make(backend, "gpu:0")


def test_a_traced_tensor_has_no_memory_yet(backend, card):
    full = card(0)
    x = jax.jit(lambda: backend.zeros(COUNT, device="gpu:0").sum())()
    assert (float(x), full.asked) == (0, 0)


@pytest.mark.parametrize(
    ("stats", "platform"),
    [
        ({"bytes_limit": 100, "bytes_in_use": 99}, "gpu"),  # TF_GPU_ALLOCATOR=cuda_malloc_async
        (None, "gpu"),  # XLA_PYTHON_CLIENT_ALLOCATOR=platform
        ({"bytes_in_use": 99}, "gpu"),
    ],
)
def test_without_a_limit_jax_is_waited_for(backend, stats, platform):
    native = SimpleNamespace(memory_stats=lambda: stats, platform=platform)
    assert framework_of(backend).devices.is_large(100, native)


@pytest.mark.parametrize(("nbytes", "is_large"), [(2**24, False), (2**30, True)])
def test_the_cpu_has_the_machine_s_memory(backend, nbytes, is_large, monkeypatch):
    monkeypatch.setattr(devices, "memory_of_the_machine", lambda: 2**40)
    native = SimpleNamespace(memory_stats=lambda: None, platform="cpu")
    assert framework_of(backend).devices.is_large(nbytes, native) is is_large
    with pytest.raises(MemoryError, match=f"{2**40 + 1} bytes are wanted, and {2**40} are there"):
        framework_of(backend).devices.is_large(2**40 + 1, native)


@places
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_numpy_s_array_on_the_host_is_one_call_below_device_put(
    backend, puts, copies, place, dtype
):
    native = backend.native(place)
    x = backend.asarray(np.arange(3).astype(dtype), device=place)
    assert (copies, puts) == ([(native, False)], [])
    assert (x.devices(), x.committed, x.tolist()) == ({native}, True, [0, 1, 2])


def test_numpy_s_array_on_the_host_is_an_explicit_transfer(backend):
    with jax.transfer_guard("disallow"):
        assert backend.asarray(np.arange(3.0)).committed


# -- from NumPy to a device with memory of its own -------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch):
    """Devices do not compute in the host's memory, as far as the backend knows."""
    monkeypatch.setattr(tensors, "is_on_the_host", lambda native: False)


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0)], ids=str)
def test_numpy_s_array_goes_to_a_card_in_one_copy(backend, elsewhere, copies, shape):
    for name in [*backend.dtype_names, "int4", "uint4"]:
        data = np.ones(shape, getattr(jnp, name))
        x = framework_of(backend).tensors.from_data(data, None, backend.native("gpu:1"))
        assert (backend.device_of(x), x.committed, x.dtype) == (gpu(1), True, data.dtype)
        assert np.asarray(x).tobytes() == data.tobytes()
        assert copies.pop() == (backend.native("gpu:1"), True)
    assert copies == []


def test_what_is_written_to_numpy_s_array_later_does_not_show(backend, elsewhere):
    data = np.zeros(2**14, np.float32)
    x = backend.asarray(data, device="gpu:0")
    data[:] = 9
    assert backend.to_numpy(x).max() == 0


def test_numpy_s_array_is_converted_before(backend, elsewhere):
    x = backend.asarray(np.arange(3.0), dtype="float16", device="gpu:0")
    assert (x.dtype, x.tolist()) == ("float16", [0, 1, 2])
    with pytest.raises(UnsupportedValueError, match="jax_enable_x64"):
        backend.asarray(np.array([2**40]), device="gpu:0")


def test_what_is_long_is_read_where_it_is_and_waited_for(
    backend, elsewhere, card, copies, monkeypatch
):
    for module in (tensors, devices):
        monkeypatch.setattr(module, "LONG", NBYTES)
    waited = card(2**39).waited
    backend.asarray(np.zeros(COUNT, np.float32), device="gpu:0")
    assert copies == [(backend.native("gpu:0"), False)]
    assert waited == [NBYTES]
