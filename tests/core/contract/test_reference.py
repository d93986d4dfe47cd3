"""What the reference backend adds to array-api-strict, and what it leaves alone."""

import array_api_strict as xp
import numpy as np
import pytest

from d2ldev import UnsupportedValueError, cpu, gpu

DEVICES = ["cpu", "gpu:0", "gpu:1"]
FLOATS = {
    "zeros": lambda b, **kw: b.zeros((2,), **kw),
    "ones": lambda b, **kw: b.ones((2,), **kw),
    "full": lambda b, **kw: b.full((2,), 0.5, **kw),
    "arange": lambda b, **kw: b.arange(0.0, 2.0, **kw),
    "rand": lambda b, **kw: b.rand((2,), **kw),
    "randn": lambda b, **kw: b.randn((2,), **kw),
    "asarray of a number": lambda b, **kw: b.asarray(0.5, **kw),
    "asarray of a list": lambda b, **kw: b.asarray([0.5], **kw),
}


# -- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "native"), [(cpu(), "CPU_DEVICE"), (gpu(0), "device1"), (gpu(1), "device2")]
)
def test_its_devices_are_array_api_strict_s_own(reference, device, native):
    assert reference.native(device) == xp.Device(native)
    assert reference.device(xp.Device(native)) is device


def test_tensors_of_two_devices_do_not_mix(reference):
    with pytest.raises(ValueError, match=r"device1.*device2|device2.*device1"):
        reference.ones(2, device="gpu:0") + reference.ones(2, device="gpu:1")


def test_the_default_device_is_array_api_strict_s(reference):
    with gpu(1):
        assert reference.default_device() is cpu()


# -- dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS.keys())
def test_the_default_float_is_float32_on_every_device(reference, make, device):
    assert reference.dtype_of(make(reference, device=device)) == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "object", "", None, 1, np.dtype("U3")])
def test_an_invalid_dtype_is_refused(reference, dtype):
    with pytest.raises(UnsupportedValueError, match="reference has no such dtype"):
        reference.dtype(dtype)


# -- random numbers ---------------------------------------------------------------------------


@pytest.fixture
def _numpy_state():
    """NumPy's random state is as it was afterwards."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.usefixtures("_numpy_state")
@pytest.mark.parametrize("method", ["rand", "randn"])
def test_without_a_seed_numpy_s_random_state_is_used(reference, method):
    np.random.seed(1)
    first = reference.to_numpy(getattr(reference, method)((5,)))
    np.random.seed(1)
    second = reference.to_numpy(getattr(reference, method)((5,)))
    third = reference.to_numpy(getattr(reference, method)((5,)))
    assert (first == second).all()
    assert (second != third).all()


# -- the machine ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_there_is_nothing_to_wait_for(reference, device):
    reference.synchronize(device)
    assert reference.is_idle(device)


@pytest.mark.parametrize("device", ["gpu:0", "gpu:1"])
def test_its_memory_is_unknown(reference, device):
    assert reference.memory(device) == (None, None, None)
