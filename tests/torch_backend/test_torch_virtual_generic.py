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


def test_a_context_of_a_device_is_entered_and_left(virtual):
    with torch.accelerator.device_index(1), torch.accelerator.device_index(None):
        x = torch.ones(2, device="vgpu:1")
    assert x.device.index == 1
    with pytest.raises(DeviceUnavailableError), torch.accelerator.device_index(5):
        pass


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
