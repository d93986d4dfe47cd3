"""strict() on MXNet: MXNet's own errors, most of which only hardware would raise."""

import mmap

import pytest
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_errors import translated

from d2ldev import DeviceMismatchError

OWN = {
    "parameter": (
        RuntimeError,
        "Parameter 'dense0_weight' was not initialized on context gpu(1). "
        "It was only initialized on [gpu(0)].",
        ("gpu:0", "gpu:1"),
    ),
    "cached": (
        mx.base.MXNetError,
        "CachedOp requires all inputs to live on the same context. "
        "But data is on gpu(0) while dense0_weight is on cpu(0)",
        ("cpu", "gpu:0"),
    ),
    "inputs": (
        ValueError,
        "Find multiple contexts in the input, After hybridized, the HybridBlock only supports one "
        "input context. Find all contexts = {gpu(0), cpu(0)}",
        ("gpu:0", "cpu"),
    ),
    "operator": (
        mx.base.MXNetError,
        "Operator broadcast_add require all inputs live on the same context. "
        "But the first argument is on gpu(0) while the 2-th argument is on cpu(0)",
        ("gpu:0", "cpu"),
    ),
}


@pytest.mark.parametrize(("kind", "text", "devices"), OWN.values(), ids=OWN)
def test_an_error_of_mxnet_s_own_is_translated_when_it_leaves(hardware, kind, text, devices):
    with pytest.raises(DeviceMismatchError) as caught, hardware.strict():
        raise kind(text)
    assert caught.value.devices == devices
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Find multiple contexts in the input. Find all contexts = {cpu(0), cpu(1)}"),
        RuntimeError("Parameter 'w' has not been initialized"),
        KeyError("Parameter 'w' was not initialized on context gpu(1)"),
    ],
    ids=repr,
)
def test_an_error_of_something_else_is_left_alone(hardware, error):
    assert translated(hardware, error) is None
    with pytest.raises(type(error)) as caught, hardware.strict():
        raise error
    assert caught.value is error


def test_mxnet_s_check_of_operators_says_what_is_translated():
    # The text is in the library, which refuses only devices that are not here.
    parts = (b" require all inputs live on the same context. ", b"But the first argument is on ")
    with (
        open(mx.libinfo.find_lib_path()[0], "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        assert all(library.find(part) > 0 for part in parts)
