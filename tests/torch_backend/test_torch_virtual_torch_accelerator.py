"""``torch.accelerator``, by which code that names no device asks for virtual GPUs."""

import pytest
import torch

from d2ldev.errors import DeviceUnavailableError


def test_it_names_and_counts_them(virtual):
    assert torch.accelerator.current_accelerator() == torch.device("vgpu")
    assert (torch.accelerator.is_available(), torch.accelerator.device_count()) == (True, 2)


def test_the_current_device_is_always_the_first(virtual):
    torch.accelerator.set_device_index(0)
    torch.accelerator.set_device_index(-1)
    with pytest.raises(DeviceUnavailableError, match="current"):
        torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == 0


CONTEXTS = pytest.mark.parametrize(
    "context",
    [lambda i: torch.accelerator.device_index(i), lambda i: torch.vgpu.device(i)],
    ids=["accelerator", "module"],
)


@CONTEXTS
@pytest.mark.parametrize("index", [0, None])
def test_a_context_of_the_first_one_is_entered_and_left(virtual, context, index):
    with context(index):
        assert torch.empty(1, device="vgpu").device.index == 0


@CONTEXTS
def test_a_context_of_another_one_is_refused(virtual, context):
    with pytest.raises(DeviceUnavailableError, match="device='vgpu:1'"), context(1):
        torch.empty(1, device="vgpu")


@CONTEXTS
def test_a_context_of_one_that_is_not_there_is_refused(virtual, context):
    with pytest.raises(DeviceUnavailableError, match="2 virtual GPUs"), context(5):
        torch.empty(1, device="vgpu")


def test_a_context_that_torch_s_own_code_enters_is_no_error(virtual):
    storage = torch.ones(2).untyped_storage().to(device="vgpu:1")
    assert storage.device == torch.device("vgpu:1")


def test_everything_is_computed_when_it_is_asked_to_wait(virtual):
    torch.accelerator.synchronize()
    torch.accelerator.synchronize("vgpu:1")
    with pytest.raises(DeviceUnavailableError):
        torch.accelerator.synchronize(5)


def test_a_cache_is_emptied_as_there_is_none(virtual):
    x = torch.ones(1000, device="vgpu:1")
    torch.accelerator.empty_cache()
    torch.accelerator.empty_host_cache()
    assert x.sum().item() == 1000


def test_their_module_tells_the_memory_that_tensors_hold(virtual):
    before = torch.vgpu.memory_allocated(1)
    torch.vgpu.reset_peak_memory_stats(1)
    x = torch.ones(1000, device="vgpu:1")
    assert torch.vgpu.memory_allocated(1) == before + 4000
    del x
    assert torch.vgpu.memory_allocated("vgpu:1") == before
    assert torch.vgpu.max_memory_allocated(1) == before + 4000
    torch.vgpu.reset_peak_memory_stats("vgpu:1")
    assert torch.vgpu.max_memory_allocated(1) == before


@pytest.mark.parametrize("name", ["memory_stats", "get_memory_info", "reset_peak_memory_stats"])
def test_what_is_about_an_allocator_is_an_error_of_torch(virtual, name):
    with pytest.raises(RuntimeError, match="not a DeviceAllocator"):
        getattr(torch.accelerator, name)(1)


def test_data_parallel_ends_in_an_error_as_on_every_accelerator_but_cuda(virtual):
    net = torch.nn.DataParallel(torch.nn.Linear(3, 2).to("vgpu:0"), device_ids=[0, 1])
    with pytest.raises((AttributeError, RuntimeError)):
        net(torch.ones(4, 3, device="vgpu:0"))
