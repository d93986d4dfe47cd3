"""D2L 6.7.2 and 6.7.3 as they stand, where no operation may mix devices: on two GPUs.

A reader who types the book's lines has to see the book's results, and its errors, on each
framework.
"""

from __future__ import annotations

import numpy as np
import pytest

import d2ldev
from d2ldev import DeviceMismatchError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same

SOURCE = "D2L"

pytestmark = pytest.mark.needs_gpus(2)
FIRST, SECOND = d2ldev.gpu(0), d2ldev.gpu(1)


@requirement("chapter.y-plus-z-stays", section="6.7.2.2")
def test_y_plus_z_is_on_the_second_gpu(backend, Y, Z):  # noqa: N803
    """Add ``Y`` and ``Z`` on the second GPU."""
    with backend.strict():
        total = Y + Z
    assert backend.device_of(total) is SECOND
    assert_same(backend.to_numpy(total), backend.to_numpy(Y) + backend.to_numpy(Z))


@requirement("chapter.x-plus-y-raises", section="6.7.2.2")
def test_x_plus_y_raises(backend, X, Y):  # noqa: N803
    """Raise in ``X + Y``, whose operands are on two GPUs."""
    with pytest.raises(DeviceMismatchError), backend.strict():
        X + Y


@requirement("chapter.net-on-each-gpu", section="6.7.3")
@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_a_result_is_on_the_device_of_input_and_parameters(backend, device):
    """Compute the book's network on the GPU of its parameters and its input."""
    net = backend.place(backend.mlp([3, 1]), device)
    x = backend.ones((2, 3), device=device)
    with backend.strict():
        y = net(x)
    assert set(backend.placement(net).values()) == {device}
    assert backend.device_of(y) is device


@requirement("chapter.net-with-data-from-the-other-gpu", section="6.7.3")
def test_a_net_on_the_first_gpu_refuses_data_of_the_second(backend):
    """Raise in a network on the first GPU that is given data of the second."""
    x = backend.ones((2, 3), device=SECOND)
    net = backend.place(backend.mlp([3, 1]), FIRST)
    with pytest.raises(DeviceMismatchError), backend.strict():
        net(x)


@requirement("chapter.net-moves-to-the-other-gpu", section="6.7.3")
def test_a_net_that_moved_takes_data_of_the_second_gpu(backend):
    """Compute the same results after a network has moved to the second GPU."""
    x = backend.ones((2, 3), device=FIRST)
    net = backend.place(backend.mlp([3, 1]), FIRST)
    before = backend.to_numpy(net(x))
    net = backend.place(net, SECOND)
    with backend.strict():
        after = net(backend.to(x, SECOND))
    np.testing.assert_allclose(backend.to_numpy(after), before, rtol=1e-6)
