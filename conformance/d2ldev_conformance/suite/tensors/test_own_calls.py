"""D2L 6.7.2.1, "Storage on the GPU": tensors that the framework's own calls make, and pass on.

A framework may keep the device outside of its tensors, as a label in a table. A call that the table
does not follow then returns a tensor of the CPU, in silence.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress

import pytest

from d2ldev.framework.testing import CREATIONS
from d2ldev_conformance.provision import list_provided, own_tensors, take_own_call
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same

SECTION = "6.7.2.1"
SOURCE = "contract"
# A label is lost to the CPU.
pytestmark = pytest.mark.needs_gpus(1)


@pytest.fixture
def last(backend):
    """The device that is least likely to be a default one."""
    return backend.devices()[-1]


@pytest.fixture(scope="module", autouse=True)
def _warm_own_calls(backend):
    """Make each call once: the first use of a compiler leaves files, which no test made."""
    for name in list_provided(backend, own_tensors):
        with suppress(Exception):  # it fails again in the test of the call
            take_own_call(backend, name)(backend.ones((2, 2), device=backend.devices()[-1]))


def find_devices(backend, made):
    """Return the devices of a tensor, or of a sequence of them."""
    return {backend.device_of(x) for x in (made if isinstance(made, (list, tuple)) else [made])}


@requirement("create.own-calls-in-a-scope", section=SECTION, source="array API, creation functions")
@pytest.mark.parametrize("creation", CREATIONS)
def test_a_call_of_the_framework_makes_a_tensor_on_the_device_of_the_block(backend, last, creation):
    """Make the tensors of the framework's own calls on the device of a block.

    Code that was written without d2ldev runs on a GPU.
    """
    make = take_own_call(backend, creation)
    with backend.on(last):
        made = make(None)
    assert find_devices(backend, made) == {last}


@requirement("query.own-calls-keep-the-device", section=SECTION, source="array API, device support")
def test_a_call_of_the_framework_returns_tensors_on_the_device_of_its_argument(
    backend, last, derivation
):
    """Return tensors of the framework's own calls on the device of their argument.

    This holds in a block for that device, and in a strict block without one. Gradients, mapped and
    compiled functions are such calls.
    """
    derive = take_own_call(backend, derivation)
    if derivation == "from_dlpack" and backend.platform(last) == "virtual":
        pytest.skip("DLPack names no virtual device")
    x = backend.ones((2, 2), device=last)
    with backend.on(last):
        inside = derive(x)
    with backend.strict():
        outside = derive(x)
    assert inside is not x
    assert find_devices(backend, inside) == find_devices(backend, outside) == {last}


@requirement("query.own-calls-keep-the-device", section=SECTION, source="array API, device support")
def test_calls_of_the_framework_keep_the_device_in_plain_code(backend, place):
    """Return tensors of these calls on the device of their argument without a block, too."""
    names = {*list_provided(backend, own_tensors)} - {*CREATIONS}
    if backend.platform(place) == "virtual":
        names -= {"from_dlpack"}  # DLPack names no virtual device
    x = backend.ones((2, 2), device=place)
    found = {name: find_devices(backend, take_own_call(backend, name)(x)) for name in names}
    assert found == {name: {place} for name in names}


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),  # noqa: S301  # our own
}


@requirement("copy.python-copies-keep-the-device", section=SECTION, source="Python, pickle")
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_by_python_is_on_the_device_of_the_tensor(backend, place, way):
    """Keep the device and the values in ``copy``, ``deepcopy`` and a pickle.

    Libraries copy models, and send tensors to other processes, in these ways. The framework may
    refuse one, on the CPU, too.
    """
    x = backend.full((2, 2), 3.0, device=place)
    try:
        COPIES[way](backend.copy(x, "cpu"))
    except Exception as error:
        pytest.skip(f"the framework refuses it: {error}")
    made = COPIES[way](x)
    assert backend.device_of(made) is place
    assert_same(backend.to_numpy(made), backend.to_numpy(x))
