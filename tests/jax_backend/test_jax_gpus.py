"""GPUs of which JAX has a client of their own: counted, used, too late, and failing."""

import pytest
from pretended_gpus import DRIVER, install_plugin
from processes import run_python

FAILURE = "the driver is too old for CUDA 99"


@pytest.fixture
def run(tmp_path):
    """Runs code in a process with two GPUs; ``failure`` is why JAX cannot initialise them."""

    def run(code, failure="", **environment):
        folder = install_plugin(tmp_path, failure)
        return run_python(DRIVER + code, hide=(), path=[folder], environment=environment)

    return run


def test_counting_initialises_nothing(run):
    code = """
backend = d2ldev.get_backend("jax")
show([backend.num_gpus(), str(backend.try_gpu(1)), len(backend.devices()), is_initialized()])
"""
    assert run(code) == [[2, "gpu:1", 3, False]]


def test_waiting_for_nothing_initialises_nothing(run):
    code = """
backend = d2ldev.get_backend("jax")
backend.synchronize()
show([backend.is_idle(), is_initialized()])
"""
    assert run(code) == [[True, False]]


def test_a_child_of_a_process_that_has_counted_can_compute(run):
    code = """
backend = d2ldev.get_backend("jax")
backend.num_gpus()
child = os.fork()
if child == 0:
    os._exit(int(backend.ones((2, 2), device="gpu:1").sum()))
show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == [4]


def test_after_its_start_jax_is_asked(run):
    code = """
backend = d2ldev.get_backend("jax")
backend.ones(1, device="cpu")
nvml._uuids = lambda: []
show([backend.num_gpus(), is_initialized()])
"""
    assert run(code) == [[2, True]]


def test_arrays_are_made_and_moved_between_the_clients(run):
    code = """
backend = d2ldev.get_backend("jax")
x = backend.rand(3, seed=0, device="gpu:1")
y = backend.to(x, "cpu")
show([str(backend.device_of(x)), str(backend.device_of(y)), y.committed, backend.platform("gpu")])
show(x.tolist() == y.tolist())
"""
    assert run(code) == [["gpu:1", "cpu", True, "cuda"], True]


def test_d2ldev_s_default_is_the_cpu_also_where_jax_s_is_a_gpu(run):
    code = """
backend = d2ldev.get_backend("jax")
show([str(backend.device_of(backend.ones(1))), str(backend.default_device())])
"""
    assert run(code) == [["cpu", "gpu:0"]]


def test_without_virtual_gpus_none_is_used(run):
    code = """
d2ldev.virtual_gpus(0)
backend = d2ldev.get_backend("jax")
show([backend.num_gpus(), str(backend.try_gpu()), backend.ones(2).tolist()])
"""
    assert run(code) == [[0, "cpu", [1, 1]]]


def test_virtual_gpus_stand_in_the_hardware_s_stead(run):
    code = """
d2ldev.virtual_gpus(1)
backend = d2ldev.get_backend("jax")
backend.ones(1, device="gpu")
show([backend.num_gpus(), backend.platform("gpu"), str(backend.default_device())])
show([str(device.platform) for device in jax.devices()])
"""
    assert run(code) == [[1, "virtual", "cpu"], ["cpu", "cpu"]]


FAILING = """
backend = d2ldev.get_backend("jax")
with warnings.catch_warnings(record=True) as caught:
    show([backend.ones(2, device="cpu").tolist(), backend.num_gpus(), str(backend.try_gpu())])
show(sorted({f"{type(w.message).__name__}: {w.message}" for w in caught}))
"""


def test_gpus_that_fail_are_a_warning_with_the_reason_and_the_cpu_goes_on(run):
    shown, (warning,) = run(FAILING, FAILURE)
    assert shown == [[1, 1], 0, "cpu"]
    assert warning.startswith("DeviceInitializationWarning: NVIDIA's driver shows 2 GPUs")
    assert FAILURE in warning


def test_a_failure_that_the_user_has_seen_already_is_not_hidden(run):
    seen = """
try:
    jax.devices()
except RuntimeError:
    pass
"""
    shown, (warning,) = run(seen + FAILING, FAILURE)
    assert shown == [[1, 1], 0, "cpu"]
    assert "JAX can use none" in warning


def test_a_gpu_that_was_counted_and_fails_is_an_error_and_never_the_cpu(run):
    code = """
backend = d2ldev.get_backend("jax")
show(backend.num_gpus())
warnings.simplefilter("ignore")
try:
    backend.ones(1, device="gpu:0")
except d2ldev.DeviceUnavailableError as error:
    show([str(error), list(error.devices)])
"""
    count, (text, devices) = run(code, FAILURE)
    assert count == 2
    assert "gpu:0" in text
    assert FAILURE in text
    assert devices == ["cpu"]


def test_a_framework_that_came_first_is_named(run):
    code = """
import sys
sys.modules["torch"] = sys.modules["json"]
"""
    _, (warning,) = run(code + FAILING, FAILURE)
    assert "use jax before torch" in warning


def test_jax_without_a_cpu_is_an_error_that_says_how_to_get_one(run):
    code = """
backend = d2ldev.get_backend("jax")
try:
    backend.ones(1, device="cpu")
except d2ldev.DeviceUnavailableError as error:
    show(str(error))
show(backend.num_gpus())
"""
    text, count = run(code, JAX_PLATFORMS="cuda")
    assert "JAX_PLATFORMS=cuda,cpu" in text
    assert count == 2


def test_jax_without_a_cpu_has_its_gpus(run):
    code = """
backend = d2ldev.get_backend("jax")
x = backend.ones(2, device="gpu:1")
show([str(backend.device_of(x)), str(backend.default_device()), backend.to(x, "gpu:1") is x])
"""
    assert run(code, JAX_PLATFORMS="cuda") == [["gpu:1", "gpu:0", True]]


def test_told_to_leave_gpus_alone_jax_has_none_and_says_nothing(run):
    shown, caught = run(FAILING, FAILURE, JAX_PLATFORMS="cpu")
    assert shown == [[1, 1], 0, "cpu"]
    assert caught == []


PREALLOCATED = """
with warnings.catch_warnings(record=True) as caught:
    d2ldev.get_backend("jax")
show([os.environ.get(PREALLOCATE), [type(w.message).__name__ for w in caught]])
"""
USED_BEFORE = "jax.devices()\n"


def test_jax_does_not_preallocate(run):
    assert run(PREALLOCATED) == [["false", []]]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "true", "true"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5", None),
        ("XLA_CLIENT_MEM_FRACTION", ".5", None),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", None),
        ("D2LDEV_GPU_MEMORY", "framework", None),
        ("JAX_PLATFORMS", "cpu", None),
        ("CUDA_VISIBLE_DEVICES", "", None),
        ("D2LDEV_VIRTUAL_GPUS", "2", None),
    ],
)
def test_whoever_has_chosen_is_left_alone(run, name, value, expected):
    assert run(PREALLOCATED, **{name: value}) == [[expected, []]]


def test_memory_that_was_taken_already_is_warned_about(run):
    assert run(USED_BEFORE + PREALLOCATED) == [[None, ["MemoryPolicyWarning"]]]


def test_whoever_has_chosen_is_not_warned(run):
    shown = run(USED_BEFORE + PREALLOCATED, XLA_PYTHON_CLIENT_MEM_FRACTION=".5")
    assert shown == [[None, []]]


def test_a_policy_that_is_none_is_an_error(run):
    code = """
try:
    d2ldev.get_backend("jax")
except d2ldev.D2LDevError as error:
    show(str(error))
"""
    (text,) = run(code, D2LDEV_GPU_MEMORY="all")
    assert "D2LDEV_GPU_MEMORY='all'" in text
