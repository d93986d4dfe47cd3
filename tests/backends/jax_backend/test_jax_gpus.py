"""GPUs of which JAX has a client of their own, and virtual GPUs, each in a process of its own.

A plugin of JAX and a driver stand in for the machine's. To JAX the GPUs are there: it initialises
them, makes them its default, and can fail to.
"""

import pytest
from processes import make_package, run_python

PLUGIN = """
def initialize():
    from jax._src import hardware_utils, xla_bridge
    from jax._src.lib import xla_client

    def make():
        if {failure!r}:
            raise RuntimeError({failure!r})
        return xla_client.make_cpu_client(num_devices=2)

    hardware_utils.has_visible_nvidia_gpu = lambda: True
    xla_bridge.register_backend_factory("cuda", make, priority=200, fail_quietly=False)
"""
DRIVER = """
import warnings
from d2ldev.operations import nvml
nvml.cards = lambda: [nvml.Card("GPU-a", None), nvml.Card("GPU-b", None)]
import d2ldev, jax, os
from d2ldev_jax.devices import is_initialized
"""
FAILURE = "the driver is too old for CUDA 99"


@pytest.fixture
def run(tmp_path):
    """Runs code in a process with two GPUs; ``failure`` is why JAX cannot initialise them."""

    def run(code, failure="", **environment):
        make_package(tmp_path / "jax_plugins", "xla_cuda99", PLUGIN.format(failure=failure))
        return run_python(DRIVER + code, hide=(), path=[tmp_path], environment=environment)

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
nvml.cards = lambda: []
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
    assert warning.startswith("DeviceInitializationWarning: jax found GPUs")
    assert "NVIDIA's driver shows 2 GPUs" in warning
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


# -- virtual GPUs ----------------------------------------------------------------------------------

XLA_FLAGS = "--xla_force_host_platform_device_count="

USE = """
import d2ldev
backend = d2ldev.get_backend("jax")
show([str(backend.device_of(backend.ones(1, device=device))) for device in backend.devices()])
"""
IN_USE = "import jax; jax.devices()\n"


def run_virtual(code, **environment):
    return run_python(code, hide=(), environment=environment)


@pytest.mark.parametrize("number", [1, 8])
def test_as_many_as_were_asked_for_are_made(number):
    devices = ["cpu", *(f"gpu:{i}" for i in range(number))]
    assert run_virtual(USE, D2LDEV_VIRTUAL_GPUS=str(number)) == [devices]


def test_importing_jax_before_is_early_enough():
    assert run_virtual("import jax, jax.numpy\n" + USE, D2LDEV_VIRTUAL_GPUS="2")[0][-1] == "gpu:1"


def test_using_jax_before_is_too_late_and_the_error_says_what_to_do():
    code = """
import d2ldev
try:
    d2ldev.get_backend("jax")
except d2ldev.DeviceUnavailableError as error:
    show(str(error))
"""
    (text,) = run_virtual(IN_USE + code, D2LDEV_VIRTUAL_GPUS="2")
    assert "JAX is in use already, with 1 CPU device; it takes 3" in text
    assert f"{XLA_FLAGS}3" in text


def test_using_jax_before_with_enough_cpu_devices_is_no_hindrance():
    shown = run_virtual(IN_USE + USE, D2LDEV_VIRTUAL_GPUS="2", XLA_FLAGS=f"{XLA_FLAGS}4")
    assert shown == [["cpu", "gpu:0", "gpu:1"]]


def test_the_user_s_own_cpu_devices_are_not_taken_away():
    code = USE + "import jax; show(len(jax.devices()))"
    shown = run_virtual(code, D2LDEV_VIRTUAL_GPUS="1", XLA_FLAGS=f"{XLA_FLAGS}5")
    assert shown == [["cpu", "gpu:0"], 5]


def test_cpu_devices_that_are_no_virtual_gpu_are_the_cpu():
    code = USE + "import jax; show([str(backend.device(device)) for device in jax.devices()])"
    shown = run_virtual(code, D2LDEV_VIRTUAL_GPUS="1", XLA_FLAGS=f"{XLA_FLAGS}3")
    assert shown == [["cpu", "gpu:0"], ["cpu", "gpu:0", "cpu"]]


def test_without_virtual_gpus_every_cpu_device_is_the_cpu():
    code = USE + "import jax; show([str(backend.device(device)) for device in jax.devices()])"
    assert run_virtual(code, XLA_FLAGS=f"{XLA_FLAGS}2") == [["cpu"], ["cpu", "cpu"]]


def test_the_backend_needs_no_flax_until_a_model_is_made():
    code = """
import sys, d2ldev
backend = d2ldev.get_backend("jax")
backend.to(backend.place({"x": backend.ones(1)}, "gpu"), "cpu")
show([name for name in ("flax", "optax") if name in sys.modules])
"""
    assert run_virtual(code, D2LDEV_VIRTUAL_GPUS="1") == [[]]


def test_without_flax_a_model_is_an_error_with_the_command_that_installs_it():
    code = """
import d2ldev
backend = d2ldev.get_backend("jax")
try:
    backend.mlp([2, 1])
except d2ldev.BackendNotInstalledError as error:
    show(str(error))
"""
    (text,) = run_python(code, hide=("flax",))
    assert "flax is not installed" in text
    assert "pip install 'd2ldev[jax]'" in text
