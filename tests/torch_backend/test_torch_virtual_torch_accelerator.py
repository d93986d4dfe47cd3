"""``torch.accelerator``, by which code that names no device asks for virtual GPUs."""

import pytest
import torch

from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError


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


def test_it_tells_the_memory_that_tensors_hold(virtual):
    before = torch.accelerator.memory_allocated(1)
    torch.accelerator.reset_peak_memory_stats(1)
    x = torch.ones(1000, device="vgpu:1")
    assert torch.accelerator.memory_allocated(1) == before + 4000
    del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated(1) == before
    assert torch.accelerator.max_memory_allocated(1) == before + 4000
    torch.vgpu.reset_peak_memory_stats("vgpu:1")
    assert torch.vgpu.max_memory_allocated(1) == before


def test_what_is_reserved_is_what_tensors_hold(virtual):
    x = torch.ones(1000, device="vgpu:1")
    accelerator = torch.accelerator
    assert accelerator.memory_reserved(1) == accelerator.memory_allocated(1) >= x.nbytes
    assert accelerator.max_memory_reserved(1) == accelerator.max_memory_allocated(1)


def test_it_knows_no_total_of_a_memory_that_is_the_host_s(virtual):
    with pytest.raises(UnsupportedValueError, match=r"memory_allocated\(1\)"):
        torch.accelerator.get_memory_info(1)


def test_what_was_held_in_all_is_forgotten_and_what_is_held_is_not(virtual):
    x = torch.ones(1000, device="vgpu:1")
    before = torch.accelerator.memory_stats(1)
    torch.accelerator.reset_accumulated_memory_stats(1)
    torch.accelerator.empty_host_cache()
    assert torch.accelerator.memory_stats(1) == before
    assert x.device.index == 1


@pytest.mark.parametrize(
    "name", ["memory_stats", "get_memory_info", "reset_accumulated_memory_stats"]
)
def test_there_is_no_memory_of_one_that_is_not_there(virtual, name):
    with pytest.raises(DeviceUnavailableError):
        getattr(torch.accelerator, name)(5)


def test_data_parallel_ends_in_an_error_as_on_every_accelerator_but_cuda(virtual):
    net = torch.nn.DataParallel(torch.nn.Linear(3, 2).to("vgpu:0"), device_ids=[0, 1])
    with pytest.raises((AttributeError, RuntimeError)):
        net(torch.ones(4, 3, device="vgpu:0"))
