"""The accelerator that is there: which one it is, and what is asked of it without a context."""

from types import SimpleNamespace

import pytest
import torch
from d2ldev_torch.accelerator import Accelerator, MetalAccelerator
from d2ldev_torch.backend import TorchBackend
from d2ldev_torch.devices import find_accelerator

from d2ldev import Memory


class Driver:
    """What torch's module of an accelerator answers; every call to it is kept."""

    def __init__(self, *, initialized):
        self.initialized = initialized
        self.synchronized = []
        self.pending = False

    def device_count(self):
        return 2

    def is_initialized(self):
        return self.initialized

    def current_device(self):
        assert self.initialized, "asking makes a context"
        return 1

    def synchronize(self, index):
        assert self.initialized, "waiting makes a context"
        self.synchronized.append(index)

    def current_stream(self, index):
        assert self.initialized, "asking for the stream makes a context"
        return SimpleNamespace(query=lambda: not self.pending)

    def get_device_properties(self, index):
        return SimpleNamespace(total_memory=1000)

    def memory_allocated(self, index):
        return 10

    def max_memory_allocated(self, index):
        return 20


@pytest.fixture
def sleeping():
    """An accelerator whose driver has not started."""
    return Accelerator("test", "test", Driver(initialized=False))


@pytest.fixture
def awake():
    """An accelerator with a context on each of its devices."""
    return Accelerator("test", "test", Driver(initialized=True))


def test_before_its_start_the_current_one_is_the_first(sleeping):
    assert sleeping.current() == 0


def test_before_its_start_there_is_nothing_to_wait_for(sleeping):
    sleeping.synchronize(0)
    assert sleeping._module.synchronized == []


def test_before_its_start_it_is_idle(sleeping):
    assert sleeping.is_idle(0)


def test_before_its_start_no_memory_is_used(sleeping):
    assert sleeping.memory(0) == Memory(0, 0, 1000)


def test_the_current_one_is_torch_s(awake):
    assert awake.current() == 1


def test_waiting_waits_for_the_one_of_the_index(awake):
    awake.synchronize(1)
    assert awake._module.synchronized == [1]


def test_with_work_in_its_stream_it_is_not_idle(awake):
    awake._module.pending = True
    assert not awake.is_idle(0)


def test_with_an_empty_stream_it_is_idle(awake):
    assert awake.is_idle(0)


def test_its_memory_is_that_of_torch_s_allocator(awake):
    assert awake.memory(0) == Memory(10, 20, 1000)


@pytest.mark.parametrize("has_context", [True, False])
def test_a_gpu_without_a_context_is_not_waited_for(awake, monkeypatch, has_context):
    monkeypatch.setattr(
        torch._C, "_test_hasPrimaryContext", lambda index: has_context, raising=False
    )
    awake.synchronize(1)
    assert awake._module.synchronized == [1] * has_context


@pytest.fixture
def build(monkeypatch):
    """Makes this build of torch look like another one."""

    def pretend(*, hip=None, cuda=None, xpus=0, metal=False):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: xpus > 0)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: metal)

    return pretend


def test_a_cuda_build_has_cuda(build):
    build(cuda="12.8", metal=True, xpus=1)
    assert (find_accelerator().type, find_accelerator().platform) == ("cuda", "cuda")


def test_a_rocm_build_is_cuda_to_torch_and_rocm_to_people(build):
    build(hip="6.4")
    assert (find_accelerator().type, find_accelerator().platform) == ("cuda", "rocm")


def test_an_xpu_comes_before_metal(build):
    build(xpus=1, metal=True)
    assert (find_accelerator().type, find_accelerator().platform) == ("xpu", "xpu")


def test_metal_is_one_gpu(build):
    build(metal=True)
    assert isinstance(find_accelerator(), MetalAccelerator)
    assert (find_accelerator().type, find_accelerator().count()) == ("mps", 1)


def test_metal_s_current_device_is_the_only_one(build):
    build(metal=True)
    assert TorchBackend().device(torch.device("mps")).index == 0


def test_a_build_without_any_has_no_gpu(build):
    build()
    assert TorchBackend().num_gpus() == 0


def test_without_virtual_gpus_asked_for_by_number_there_is_none(build):
    build(metal=True)
    assert TorchBackend(virtual_gpus=0).num_gpus() == 0
