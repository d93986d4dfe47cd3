"""``d2ldev.find_leaks`` in JAX: arrays that a library commits to another device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.dispatch import device_put_p
from leaky_libraries import find_number, import_library

import d2ldev

LIBRARY = """
import jax
import jax.numpy as jnp
import numpy as np
from jax import device_put

def put_by_name(x):
    made = device_put(np.ones(3), jax.devices()[0])  # put_by_name
    return x + made

def put(x):
    made = jax.device_put(np.ones(3), jax.devices()[0])  # put
    return x + made

def create(x):
    made = jnp.ones(3, device=jax.devices()[0])  # create
    return x + made

def move(x):
    moved = jax.device_put(x, jax.devices()[0])  # move
    return x + moved

def catch(x):
    try:
        return x + jax.device_put(np.ones(3), jax.devices()[0])  # catch
    except Exception:
        return x

def return_it(x):
    return jax.device_put(x * 2, jax.devices()[0])  # result

def read(x):
    return float(x[0]) + np.asarray(x).sum()  # read

def good(x):
    made = jnp.ones(3) + jnp.zeros_like(x) + np.ones(3) + jnp.arange(3)[jnp.array([0, 1, 2])]
    return jax.jit(lambda y: y + jnp.ones(3))(x) + jax.grad(jnp.sum)(made)

def convert(array):
    return jnp.asarray(array)
"""
number_of = partial(find_number, LIBRARY)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with import_library(tmp_path_factory.mktemp("library"), "leaky_jax_library", LIBRARY) as module:
        yield module


@pytest.mark.parametrize(
    ("name", "action"),
    [("put", "creates"), ("put_by_name", "creates"), ("create", "creates"), ("move", "moves")],
)
def test_an_array_that_a_library_commits_elsewhere_is_found(backend, library, name, action):
    with (
        pytest.raises(d2ldev.DeviceMismatchError),
        d2ldev.find_leaks("gpu:1", backend=backend) as leaks,
    ):
        getattr(library, name)(jnp.ones(3))
    (leak,) = leaks
    line = number_of(name)
    assert (leak.kind, leak.line.number, leak.action) == ("mix", line, action)
    assert str(leak.device) == "cpu"
    assert (leak.operation, leak.met_at.number) == ("add", line + 1)


def test_an_array_is_found_whose_refusal_the_library_catches(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        library.catch(jnp.ones(3))
    (leak,) = leaks
    assert (leak.kind, leak.line.number) == ("mix", number_of("catch"))


def test_a_result_from_elsewhere_is_found(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        np.asarray(library.return_it(jnp.ones(3)))
    (leak,) = leaks
    assert (leak.kind, leak.line.number, leak.action) == ("result", number_of("result"), "moves")


def test_reads_of_the_host_fail_nothing(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        library.read(jnp.ones(3))
    assert {(leak.kind, leak.line.number) for leak in leaks} == {("read", number_of("read"))}
    assert leaks.find_failing() == []


def test_a_right_library_has_no_leaks(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        made = [jnp.ones(3), library.convert(np.ones(3)), jax.random.normal(jax.random.key(0), 3)]
        results = [library.good(x) for x in made]
        sums = [float(x.sum()) for x in results]
    assert {str(backend.device_of(x)) for x in (*made, *results)} == {"gpu:1"}
    assert all(x.committed for x in made)
    assert len(sums) == 3
    assert list(leaks) == []


def test_the_block_leaves_jax_as_it_was(backend):
    def look():
        array = type(jnp.ones(3))
        functions = device_put_p.impl, jnp.ones, jax.random.normal
        return *functions, array.__array__, jnp.ones(3).committed

    before = look()
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        during = look()
    assert during != before == look()
    backend.copy(backend.ones(1), "gpu:0")
    assert list(leaks) == []
