"""To ask whose tensor something is sets nothing, in no framework that is imported."""

import os
import subprocess
import sys

from processes import extend_path, make_package

# NVIDIA's driver shows one GPU, and JAX has a plugin that could use it.
PROGRAM = """
import os

import numpy
numpy.bool = bool  # which MXNet 1.9.1 takes from there
import mxnet as mx
import array_api_strict as xp
import jax
import tensorflow as tf
import torch

import d2ldev
from d2ldev import backend_of  # the import sets a flag for virtual GPUs, and the call sets nothing
from d2ldev.operations import nvml

nvml.cards = lambda: [nvml.Card("GPU-0", None)]

def state():
    cpu = tf.config.list_physical_devices("CPU")[0]
    return {
        "variables": dict(os.environ),
        "options of jax": dict(jax.config.values),
        "devices of tensorflow": tf.config.get_visible_devices(),
        "parts of its CPU": tf.config.get_logical_device_configuration(cpu),
        "name of torch's further devices": torch._C._get_privateuse1_backend_name(),
        "its default device": torch.get_default_device(),
        "MXNet's context": mx.current_context(),
    }

def ask(x):
    before = state()
    try:
        name = backend_of(x).name
    except d2ldev.UnsupportedValueError:
        name = "nobody"
    after = state()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert not changed, (type(x), changed)
    print(name)
"""
NO_TENSORS = "for x in (object(), 1.0, [1.0], numpy.zeros(1), xp.zeros(1)): ask(x)\n"
# JAX last: it has initialised its devices, as soon as it has made an array.
TENSORS = """
ask(torch.zeros(1))
ask(tf.zeros(1))
ask(mx.nd.zeros(1))
ask(jax.numpy.zeros(1))
"""


def print_program(folder, program, **variables):
    make_package(folder / "jax_plugins", "xla_cuda12")
    kept = {key: value for key, value in os.environ.items() if "D2LDEV" not in key}
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        kept.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env=kept | {"PYTHONPATH": extend_path([folder])} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_set_where_there_are_gpus(tmp_path):
    names = print_program(tmp_path, NO_TENSORS + TENSORS)
    assert names == [*["nobody"] * 4, "reference", "torch", "tensorflow", "mxnet", "jax"]


def test_virtual_gpus_are_made_only_for_tensors(tmp_path):
    names = print_program(tmp_path, NO_TENSORS, D2LDEV_VIRTUAL_GPUS="2")
    assert names == [*["nobody"] * 4, "reference"]
