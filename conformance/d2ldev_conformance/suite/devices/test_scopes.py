"""D2L 6.7.2.1, "Storage on the GPU": where a tensor is made when the call does not say it.

The device of a new tensor has to follow from the program's text. Frameworks have different
defaults, and some pick the first GPU.
"""

from __future__ import annotations

import pytest

import d2ldev
from d2ldev import DeviceUnavailableError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import creators

SECTION = "6.7.2.1"
SOURCE = "contract"


@requirement("create.default-is-the-cpu", section=SECTION, source="D2L")
@creators
def test_without_a_device_a_tensor_is_made_on_the_cpu(backend, make):
    """Make a tensor on the CPU if neither an argument nor a block names a device."""
    assert backend.device_of(make(backend)) is backend.cpu()


@requirement("create.in-a-scope", section=SECTION)
@creators
def test_a_scope_gives_the_device(backend, place, make):
    """Make a tensor on the device of the ``backend.on`` block around the call.

    Code that was written without devices runs on a GPU.
    """
    with backend.on(place):
        x = make(backend)
    assert backend.device_of(x) is place


@requirement("create.a-device-beats-the-scope", section=SECTION)
@creators
@pytest.mark.needs_gpus(1)
def test_an_explicit_device_overrides_the_scope(backend, make):
    """Make a tensor on the device of the argument, also within a block.

    A helper that names a device means it.
    """
    with backend.on("gpu:0"):
        x = make(backend, device="cpu")
    assert backend.device_of(x) is backend.cpu()


@requirement("create.device-as-a-context", section=SECTION)
def test_a_device_is_a_context_for_the_active_backend(backend, place):
    """Make tensors of the active backend on a device within ``with device:``.

    The block reads like the frameworks' own blocks.
    """
    with d2ldev.use_backend(backend), place:
        x = backend.ones(2)
    assert backend.device_of(x) is place
    assert backend.device_of(backend.ones(2)) is backend.cpu()


@requirement("create.scopes-nest", section=SECTION)
def test_scopes_nest(backend, place):
    """Use the innermost block's device, and the outer one's after its end.

    Functions with blocks call one another.
    """
    with backend.on(place):
        with backend.on("cpu"):
            inner = backend.ones(1)
        outer = backend.ones(1)
    assert backend.device_of(inner) is backend.cpu()
    assert backend.device_of(outer) is place


@requirement("create.scopes-end", section=SECTION)
def test_a_scope_ends_also_with_an_exception(backend, place):
    """Restore the default device at the end of a block, also after an error.

    A failed cell of a notebook must not move the next one to a GPU.
    """
    before = backend.default_device()
    with pytest.raises(ZeroDivisionError), backend.on(place):
        1 / 0  # noqa: B018
    assert backend.device_of(backend.ones(1)) is backend.cpu()
    assert backend.default_device() is before


@requirement("create.scope-on-a-missing-device", section=SECTION)
def test_a_scope_on_a_missing_device_is_an_error(backend, missing):
    """Refuse a block on a device that does not exist when the block begins.

    The first creation in the block may be far away.
    """
    with pytest.raises(DeviceUnavailableError, match=str(missing)), backend.on(missing):
        pass


@requirement("create.like-beats-the-scope", section=SECTION, source="array API, device support")
def test_like_beats_the_scope(backend, route):
    """Make a tensor on the device of ``like=``, also within another block.

    ``like=`` names a device through a tensor.
    """
    scope, there = route
    like = backend.ones(1, device=there)
    with backend.on(scope):
        made = [backend.ones(2, like=like), backend.asarray([1.0], like=like)]
        made += [backend.rand(2, like=like), backend.arange(2, like=like)]
    assert [backend.device_of(x) for x in made] == [there] * len(made)


@requirement("create.a-tensor-stays-in-a-scope", section=SECTION)
def test_a_tensor_stays_where_it_is_in_a_scope(backend, route):
    """Leave an existing tensor on its device in ``asarray`` and ``to``, in any block.

    A block is about new tensors, and a silent copy would cost time.
    """
    scope, there = route
    x = backend.ones(2, device=there)
    with backend.on(scope):
        assert backend.asarray(x) is x
        assert backend.to(x, there) is x
        assert backend.device_of(backend.asarray(x, dtype="int32")) is there


@requirement("copy.a-device-beats-the-scope", section=SECTION)
def test_to_and_copy_use_the_given_device_also_in_a_scope(backend, route):
    """Move and copy to the given device, also within a block for another.

    A move names its target.
    """
    scope, target = route
    x = backend.ones(2, device=scope)
    with backend.on(scope):
        moved, copied = backend.to(x, target), backend.copy(x, target)
        batch = backend.to([x], target)
    assert [backend.device_of(y) for y in (moved, copied, *batch)] == [target] * 3
