"""``d2ldev.find_leaks`` in JAX: arrays that a library commits to another device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.dispatch import device_put_p
from leaky_libraries import find_number, import_library
from processes import run_python

import d2ldev
from d2ldev.contract.leaks import Frames
from d2ldev.leaks.finding import Leaks, follow

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

def compute_elsewhere(x):
    host = jax.devices()[0]
    moved = jax.device_put(x, host)  # elsewhere
    return jax.device_put(jnp.sort(moved) * 2, x.device)

def derive(x):
    made = jax.device_put(np.ones(3), jax.devices()[0])  # derive
    other = jax.device_put(np.ones(3), jax.devices()[0])
    return x + (made * 2)[:3], other

def leak_in_gradient(x):
    made = jax.device_put(np.ones(3), jax.devices()[0])  # grad
    return jax.grad(lambda y: (y * made).sum())(x)

def leak_twice(x):
    return create(put(x))

def call_compiled(x):
    made = jax.device_put(np.ones(3), jax.devices()[0])  # compiled
    return jax.jit(lambda y, z: y + z)(x, made)

def catch(x):
    try:
        return x + jax.device_put(np.ones(3), jax.devices()[0])  # catch
    except Exception:
        return x

class Shift:
    def __init__(self):
        self.value = jax.device_put(np.ones(3), jax.devices()[0])  # kept

    def __call__(self, x):
        return x + self.value

def return_it(x):
    return jax.device_put(x * 2, jax.devices()[0])  # result

def read(x):
    return float(x[0]) + np.asarray(x).sum()  # read

class Toolbox:
    def __init__(self):
        self.kinds = [jax.device_put(np.ones(1), device) for device in jax.devices()]

    def make(self):
        return jnp.ones(3)

def good(x):
    made = jnp.ones(3) + jnp.zeros_like(x) + np.ones(3) + jnp.arange(3)[jnp.array([0, 1, 2])]
    return jax.jit(lambda y: y + jnp.ones(3))(x) + jax.grad(jnp.sum)(made)

def hand_over(x):
    return np.asarray(jax.device_put(x, jax.devices()[0]))  # hand over

def bring_back(x):
    moved = jax.device_put(x, jax.devices()[0])
    return jax.device_put(moved, x.device)

def convert(array):
    return jnp.asarray(array)

def convert_on_host(array):
    return jax.device_put(array, jax.devices()[0])
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
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        result = getattr(library, name)(jnp.arange(3.0))
    assert np.array_equal(result, getattr(library, name)(np.arange(3.0)))
    assert str(backend.device_of(result)) == "gpu:1"
    (leak,) = leaks
    line = number_of(name)
    assert (leak.kind, leak.line.number, leak.action) == ("mix", line, action)
    assert str(leak.device) == "cpu"
    assert (leak.operation, leak.met_at.number) == ("add", line + 1)


@pytest.mark.parametrize(
    ("name", "comment"),
    [
        ("catch", "catch"),
        ("derive", "derive"),
        ("leak_in_gradient", "grad"),
        ("call_compiled", "compiled"),
    ],
)
def test_an_array_is_found_wherever_it_meets_an_input(backend, library, name, comment):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        jax.tree.map(np.asarray, getattr(library, name)(jnp.arange(3.0))[0])
    assert {(leak.kind, leak.line.number) for leak in leaks} == {("mix", number_of(comment))}


def test_one_run_finds_all_leaks_in_their_order(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        for _ in range(2):
            library.leak_twice(jnp.ones(3))
    lines = [leak.line.number for leak in leaks.find_failing()]
    assert lines == [number_of("put"), number_of("create")]
    assert len(leaks) == 4


def test_what_is_computed_elsewhere_and_comes_back_is_found(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        library.compute_elsewhere(jnp.arange(3.0))
        library.bring_back(jnp.arange(3.0))
    (leak,) = leaks
    assert (leak.kind, leak.line.number, leak.action) == ("move", number_of("elsewhere"), "moves")
    assert (leak.operation, leak.met_at.number) == ("sort", number_of("elsewhere") + 1)


def test_an_array_that_an_object_keeps_is_followed(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        shift = library.Shift()
        shift(jnp.ones(3))
    (leak,) = leaks
    assert (leak.kind, leak.line.number) == ("mix", number_of("kept"))


def test_a_result_from_elsewhere_is_found(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        np.asarray(library.return_it(jnp.ones(3)))
    (leak,) = leaks
    assert (leak.kind, leak.line.number, leak.action) == ("result", number_of("result"), "moves")


def test_reads_of_the_host_fail_nothing(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        library.read(jnp.ones(3))
        library.hand_over(jnp.ones(3))
    lines = {number_of("read"), number_of("hand over")}
    assert {(leak.kind, leak.line.number) for leak in leaks} == {("read", line) for line in lines}
    assert leaks.find_failing() == []


def test_a_right_library_has_no_leaks(backend, library):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        host = jax.devices()[0]
        made = [
            *(jnp.ones(3), library.convert(np.ones(3)), jax.random.normal(jax.random.key(0), 3)),
            *(library.convert_on_host(np.ones(3)), jnp.ones(3, device=host)),
            *(jax.device_put(np.ones(3), host), jax.device_put(jnp.ones(3), host)),
        ]
        results = [library.good(x) for x in made]
        sums = [float(x.sum()) for x in results]
    assert {str(backend.device_of(x)) for x in (*made, *results)} == {"gpu:1"}
    assert all(x.committed for x in made)
    assert len(sums) == 7
    assert list(leaks) == []


def test_an_object_of_the_test_that_keeps_arrays_tells_nothing_of_a_call(backend, library):
    toolbox = library.Toolbox()
    with follow(backend, "gpu:1", Frames([__file__]), Leaks()) as place:
        place({"toolbox": toolbox})
        made = toolbox.make()
    assert made.committed
    assert str(backend.device_of(made)) == "gpu:1"


def test_an_array_that_a_library_gave_to_a_fixture_is_followed(backend, library):
    leaks, frames = Leaks(), Frames([__file__])
    with follow(backend, "gpu:1", frames, leaks):
        values = {"made": library.return_it(jnp.ones(3))}
    assert list(leaks) == []
    with follow(backend, "gpu:1", frames, leaks) as place:
        place(values)
        np.asarray(values["made"])
    (leak,) = leaks
    assert (leak.kind, leak.line.number) == ("result", number_of("result"))


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


def test_a_framework_that_is_named_has_its_virtual_gpus_before_any_conftest_runs(tmp_path):
    (tmp_path / "conftest.py").write_text("import jax.numpy as jnp\n\nX = jnp.ones(3)\n")
    (tmp_path / "test_one.py").write_text(
        "import jax\n\ndef test_one():\n    assert len(jax.devices()) == 3\n"
    )
    command = ["-p", "d2ldev.leaks.plugin", "--d2ldev-leaks", "--d2ldev-leaks-backend", "jax"]
    program = f"""
import pytest
show(int(pytest.main(["-q", "-p", "no:cacheprovider", *{command}, {str(tmp_path)!r}])))
"""
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XLA_FLAGS": ""}
    assert run_python(program, hide=(), environment=environment) == [0]
