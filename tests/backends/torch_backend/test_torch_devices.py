"""torch's devices: their spellings, how many there are, and what is asked of them."""

import json
import subprocess
import sys

import array_api_strict
import pytest
import torch

from d2ldev import (
    DeviceInitializationWarning,
    DeviceUnavailableError,
    InvalidDeviceError,
    Memory,
    cpu,
    gpu,
)

CHILD = """
import json, os, sys, warnings
import torch, d2ldev
backend = d2ldev.get_backend('torch')
count = backend.num_gpus()
net = backend.place(backend.mlp([2, 1]), 'cpu')
reader, writer = os.pipe()
with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    child = os.fork()
if child == 0:
    total = float(backend.ones((2, 2), device=backend.try_gpu()).sum())
    os.write(writer, json.dumps([backend.num_gpus(), total]).encode())
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps({
    'count': count,
    'context': torch.cuda.is_initialized(),
    'child': json.loads(os.read(reader, 100)),
    'accelerate': 'accelerate' in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def process():
    """What a process found that counted GPUs, placed a model and forked."""
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_counting_makes_no_context(process):
    assert process["context"] is False


def test_a_forked_child_counts_and_computes(process):
    assert process["child"] == [process["count"], 4.0]


def test_accelerate_is_not_needed(process):
    assert process["accelerate"] is False


@pytest.mark.parametrize("text", ["cpu", "cpu:0", " CPU "])
def test_strings_name_the_cpu(torch_backend, text):
    assert torch_backend.device(text) is cpu()


@pytest.mark.parametrize("text", ["cpu", "cpu:0"])
def test_torch_s_own_devices_name_the_cpu(torch_backend, text):
    assert torch_backend.device(torch.device(text)) is cpu()


def test_the_native_cpu_is_the_one_that_torch_s_tensors_have(torch_backend):
    assert torch_backend.native("cpu:0") == torch.ones(1).device


def test_torch_s_gpu_of_an_index_is_that_gpu(ledger):
    assert ledger.device(torch.device("cuda:1")) is gpu(1)


def test_torch_s_gpu_without_an_index_is_the_current_one(ledger, monkeypatch):
    monkeypatch.setattr(ledger._accelerator, "current", lambda: 1)
    assert ledger.device(torch.device("cuda")) is gpu(1)


def test_the_current_gpu_is_asked_for_every_time(ledger, monkeypatch):
    ledger.native(torch.device("cuda"))
    monkeypatch.setattr(ledger._accelerator, "current", lambda: 1)
    assert ledger.native(torch.device("cuda")) == torch.device("cuda:1")


@pytest.mark.parametrize("spelling", [torch.device("cuda:99"), "cuda:99", gpu(99)], ids=repr)
def test_a_gpu_that_is_not_there_is_refused(torch_backend, spelling):
    with pytest.raises(DeviceUnavailableError, match="gpu:99"):
        torch_backend.to(torch.ones(1), spelling)


@pytest.mark.parametrize("kind", ["meta", "xpu", "mps", "vulkan"])
def test_torch_s_devices_of_another_kind_are_refused(ledger, kind):
    with pytest.raises(InvalidDeviceError, match=kind):
        ledger.device(torch.device(kind))


@pytest.mark.parametrize(
    "spec",
    [array_api_strict.Device("device1"), 0, None, torch.float32, ["cpu"], "tpu", "cuda:-1"],
    ids=repr,
)
def test_what_is_no_device_of_torch_is_refused(torch_backend, spec):
    with pytest.raises(InvalidDeviceError):
        torch_backend.native(spec)


def test_the_native_gpu_has_its_index(ledger):
    assert ledger.native("gpu") == torch.device("cuda:0")


def test_the_platform_is_the_accelerator_s(ledger):
    assert [ledger.platform(device) for device in ledger.devices()] == ["cpu", "cuda", "cuda"]


def test_the_default_device_is_torch_s(meta):
    with torch.device("meta"):
        assert meta.default_device() is gpu()
    assert meta.default_device() is cpu()


def test_hardware_that_fails_to_start_is_a_warning_with_the_reason(ledger, monkeypatch):
    def fail():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(ledger._accelerator, "count", fail)
    with pytest.warns(DeviceInitializationWarning, match="cuda .* the driver is too old"):
        assert ledger.num_gpus() == 0


def test_waiting_for_one_device_waits_for_no_other(ledger):
    ledger.synchronize("gpu:1")
    assert ledger._accelerator.synchronized == [1]


def test_waiting_for_all_waits_for_each_gpu(ledger):
    ledger.synchronize()
    assert ledger._accelerator.synchronized == [0, 1]


def test_waiting_for_the_cpu_asks_no_gpu(ledger):
    ledger.synchronize("cpu")
    assert ledger._accelerator.synchronized == []


def test_the_cpu_is_always_idle(ledger):
    assert ledger.is_idle("cpu")


def test_all_are_idle_when_each_is(ledger):
    ledger.synchronize("gpu:0")
    assert ledger.is_idle("gpu:0")
    assert not ledger.is_idle()
    ledger.synchronize("gpu:1")
    assert ledger.is_idle()


def test_torch_cannot_say_the_cpu_s_memory(torch_backend):
    assert torch_backend.memory("cpu") == Memory(None, None, None)
