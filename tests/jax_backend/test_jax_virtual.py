"""Virtual GPUs: CPU devices of JAX, made before it is initialised, or found there afterwards."""

import pytest
from processes import run_python

XLA_FLAGS = "--xla_force_host_platform_device_count="

USE = """
import d2ldev
backend = d2ldev.get_backend("jax")
show([str(backend.device_of(backend.ones(1, device=device))) for device in backend.devices()])
"""
IN_USE = "import jax; jax.devices()\n"


def run(code, **environment):
    return run_python(code, hide=(), environment=environment)


@pytest.mark.parametrize("number", [1, 8])
def test_as_many_as_were_asked_for_are_made(number):
    devices = ["cpu", *(f"gpu:{i}" for i in range(number))]
    assert run(USE, D2LDEV_VIRTUAL_GPUS=str(number)) == [devices]


def test_importing_jax_before_is_early_enough():
    assert run("import jax, jax.numpy\n" + USE, D2LDEV_VIRTUAL_GPUS="2")[0][-1] == "gpu:1"


def test_using_jax_before_is_too_late_and_the_error_says_what_to_do():
    code = """
import d2ldev
try:
    d2ldev.get_backend("jax")
except d2ldev.DeviceUnavailableError as error:
    show(str(error))
"""
    (text,) = run(IN_USE + code, D2LDEV_VIRTUAL_GPUS="2")
    assert "JAX is in use already, with 1 CPU device; it takes 3" in text
    assert f"{XLA_FLAGS}3" in text


def test_using_jax_before_with_enough_cpu_devices_is_no_hindrance():
    shown = run(IN_USE + USE, D2LDEV_VIRTUAL_GPUS="2", XLA_FLAGS=f"{XLA_FLAGS}4")
    assert shown == [["cpu", "gpu:0", "gpu:1"]]


def test_the_user_s_own_cpu_devices_are_not_taken_away():
    code = USE + "import jax; show(len(jax.devices()))"
    shown = run(code, D2LDEV_VIRTUAL_GPUS="1", XLA_FLAGS=f"{XLA_FLAGS}5")
    assert shown == [["cpu", "gpu:0"], 5]


def test_cpu_devices_that_are_no_virtual_gpu_are_the_cpu():
    code = USE + "import jax; show([str(backend.device(device)) for device in jax.devices()])"
    shown = run(code, D2LDEV_VIRTUAL_GPUS="1", XLA_FLAGS=f"{XLA_FLAGS}3")
    assert shown == [["cpu", "gpu:0"], ["cpu", "gpu:0", "cpu"]]


def test_without_virtual_gpus_every_cpu_device_is_the_cpu():
    code = USE + "import jax; show([str(backend.device(device)) for device in jax.devices()])"
    assert run(code, XLA_FLAGS=f"{XLA_FLAGS}2") == [["cpu"], ["cpu", "cpu"]]


def test_arrays_of_two_devices_do_not_mix():
    code = """
import d2ldev
backend = d2ldev.get_backend("jax")
try:
    backend.ones(1, device="gpu:0") + backend.ones(1, device="gpu:1")
except ValueError as error:
    show("incompatible devices" in str(error))
"""
    assert run(code, D2LDEV_VIRTUAL_GPUS="2") == [True]


def test_the_backend_needs_no_flax_until_a_model_is_made():
    code = """
import sys, d2ldev
backend = d2ldev.get_backend("jax")
backend.to(backend.place({"x": backend.ones(1)}, "gpu"), "cpu")
show([name for name in ("flax", "optax") if name in sys.modules])
"""
    assert run(code, D2LDEV_VIRTUAL_GPUS="1") == [[]]


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
