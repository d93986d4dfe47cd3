"""``with device:``: the place of new tensors, for a block."""

import pytest

import d2ldev
from d2ldev import cpu, gpu
from d2ldev.framework.testing import framework_of


def find_device():
    """Return the device on which a tensor is made now."""
    return d2ldev.backend.device_of(d2ldev.backend.zeros(1))


def test_with_gives_the_device():
    with gpu(1) as device:
        assert device is gpu(1)


def test_a_device_that_does_not_exist_cannot_be_entered():
    with pytest.raises(d2ldev.DeviceUnavailableError, match="gpu:7"), gpu(7):
        pass
    assert find_device() is cpu()


def test_the_block_is_that_of_the_backend_that_was_active_on_entering(reference):
    other = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=2))
    with gpu(1), d2ldev.use_backend(other):
        assert find_device() is cpu()


def test_a_block_is_left_in_the_backend_in_which_it_was_entered(reference):
    other = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=2))
    device = gpu(1)
    device.__enter__()
    with d2ldev.use_backend(other):
        device.__exit__(None, None, None)
    assert find_device() is cpu()


def test_native_is_the_active_backend_s_own_device(reference):
    assert gpu(1).native is reference.native("gpu:1")
