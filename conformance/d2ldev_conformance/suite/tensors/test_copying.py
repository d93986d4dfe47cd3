"""D2L 6.7.2.2, "Copying": moving is explicit, complete, and free where nothing has to move.

A move costs time and memory. It has to be complete, to leave its source alone, and to cost nothing
if nothing moves.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from d2ldev import DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, numbers
from d2ldev_conformance.suite.memory import Held

SECTION = "6.7.2.2"
SOURCE = "contract"


@requirement("copy.to-moves", section=SECTION, source="D2L")
def test_to_moves_a_tensor(backend, route):
    """Return from ``to`` a tensor on the given device."""
    source, target = route
    moved = backend.to(backend.ones((2, 3), device=source), target)
    assert backend.device_of(moved) is target


@requirement("copy.to-keeps-values", section=SECTION)
def test_every_value_survives_a_move(backend, route, dtype):
    """Keep each value of each dtype in a move."""
    source, target = route
    data = numbers(dtype)
    moved = backend.to(backend.asarray(data, device=source), target)
    assert_same(backend.to_numpy(moved), data)


@requirement("copy.to-keeps-the-dtype", section=SECTION)
def test_the_dtype_survives_a_move(backend, route, dtype):
    """Keep the dtype in a move.

    Some frameworks cast on the way to a device that lacks a dtype.
    """
    source, target = route
    x = backend.ones(3, dtype=dtype, device=source)
    assert backend.dtype_of(backend.to(x, target)) == dtype


@requirement("copy.to-keeps-the-shape", section=SECTION)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1, 1), (5, 1, 2)])
def test_the_shape_survives_a_move(backend, route, shape):
    """Keep the shape in a move, also without axes or without elements."""
    source, target = route
    data = numbers("float32", shape)
    moved = backend.to(backend.asarray(data, device=source), target)
    assert_same(backend.to_numpy(moved), data)


@requirement("copy.to-keeps-special-values", section=SECTION)
def test_nan_infinity_and_the_sign_of_zero_survive_a_move(backend, route):
    """Keep NaN, infinity, the sign of zero and the smallest numbers in a move.

    A copy is made of bytes, and does not compute.
    """
    source, target = route
    data = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], "float32")
    moved = backend.to(backend.asarray(data, device=source), target)
    assert_same(backend.to_numpy(moved), data)


@requirement("copy.to-takes-large-tensors", section=SECTION)
def test_every_value_of_a_large_tensor_survives_a_move(backend, route):
    """Keep each value of a tensor with a million elements in a move.

    Large copies take another path than small ones.
    """
    source, target = route
    data = np.arange(1_000_003, dtype=np.int32)
    moved = backend.to(backend.asarray(data, device=source), target)
    assert_same(backend.to_numpy(moved), data)


@requirement("copy.there-and-back", section=SECTION)
def test_there_and_back_is_the_same_data(backend, route):
    """Return the same values after a move to another device and back."""
    source, target = route
    x = backend.rand((5, 7), seed=0, device=source)
    back = backend.to(backend.to(x, target), source)
    assert backend.device_of(back) is source
    assert_same(backend.to_numpy(back), backend.to_numpy(x))


@requirement("copy.noop-returns-same-object", section=SECTION, source="D2L")
def test_a_tensor_already_on_the_device_is_returned_itself(backend, place):
    """Return from ``to`` the tensor itself if it is on the device.

    The book promises that nothing is copied then.
    """
    x = backend.ones((2, 3), device=place)
    assert backend.to(x, place) is x


@requirement("copy.noop-in-every-spelling", section=SECTION)
def test_a_tensor_does_not_move_for_any_spelling_of_its_device(backend, place):
    """Return the tensor itself for each spelling of its device.

    The spelling must not decide about a copy.
    """
    x = backend.ones(1, device=place)
    for spelling in (place, str(place), str(place).upper(), backend.native(place)):
        assert backend.to(x, spelling) is x


@requirement("copy.noop-after-a-move", section=SECTION)
def test_a_tensor_that_was_moved_is_there(backend, route):
    """Return a moved tensor itself when it is moved to the same device again.

    Code calls ``to`` at each boundary, to be safe.
    """
    source, target = route
    moved = backend.to(backend.ones(2, device=source), target)
    assert backend.to(moved, target) is moved


@requirement("copy.to-leaves-the-source", section=SECTION)
def test_the_source_stays_where_and_as_it_was(backend, route):
    """Leave the source of a move on its device, with its values.

    Other names refer to the same tensor.
    """
    source, target = route
    x = backend.arange(6, dtype="float32", device=source)
    backend.to(x, target)
    assert backend.device_of(x) is source
    assert_same(backend.to_numpy(x), np.arange(6, dtype="float32"))


@requirement("copy.to-shares-no-memory", section=SECTION)
@pytest.mark.usefixtures("mutable")
def test_a_moved_tensor_is_independent_of_its_source(backend, route):
    """Share no memory between a moved tensor and its source.

    Virtual GPUs are in one memory, and a write would show in both.
    """
    source, target = route
    x = backend.ones(3, device=source)
    moved, unread = backend.to(x, target), backend.to(x, target)
    moved[0] = 9.0
    assert_same(backend.to_numpy(x), np.ones(3, "float32"))
    x[1] = 7.0
    assert_same(backend.to_numpy(moved), np.array([9, 1, 1], "float32"))
    assert_same(backend.to_numpy(unread), np.ones(3, "float32"))


@requirement("copy.copy-is-new-memory", section=SECTION)
def test_copy_is_new_memory_also_where_it_was(backend, place):
    """Return new memory from ``copy``, also on the tensor's own device."""
    x = backend.ones(64, device=place)
    held, copies = Held(backend, {"x": x}), [backend.copy(x), backend.copy(x, place)]
    addresses = {backend.address(tensor) for tensor in (x, *copies)}
    assert len(addresses) == 3
    assert [backend.device_of(c) for c in copies] == [place, place]
    for each in copies:
        held.check_apart({"x": each})


@requirement("copy.new-memory-each-time", section=SECTION)
def test_each_copy_of_a_tensor_has_memory_of_its_own(backend, route):
    """Return other memory from each ``to``, ``copy`` and ``asarray`` that copies.

    A cache of copies would let two results change together.
    """
    source, target = route
    x = backend.ones(64, device=source)
    ways = (
        lambda: backend.to(x, target),
        lambda: backend.copy(x, target),
        lambda: backend.asarray(x, device=target, copy=True),
        lambda: backend.to([x], target)[0],
    )
    copies = [way() for way in ways for _ in range(2)]
    assert len({backend.address(tensor) for tensor in (x, *copies)}) == 1 + len(copies)


@requirement("copy.copy-never-aliases", section=SECTION)
@pytest.mark.usefixtures("mutable")
def test_writing_to_one_does_not_show_in_the_other(backend, place):
    """Keep a tensor and its copies apart when one of them is written to.

    Some frameworks copy only at the first write, and some never.
    """
    x = backend.ones(3, device=place)
    same_place, said_place = backend.copy(x), backend.copy(x, place)
    x[0] = 9.0
    same_place[1] = 7.0
    assert_same(backend.to_numpy(said_place), np.ones(3, "float32"))
    assert_same(backend.to_numpy(same_place), np.array([1, 7, 1], "float32"))
    assert_same(backend.to_numpy(x), np.array([9, 1, 1], "float32"))


@requirement("copy.copy-keeps-values", section=SECTION)
def test_every_value_survives_a_copy(backend, place, dtype):
    """Keep each value of each dtype in a copy."""
    data = numbers(dtype)
    assert_same(backend.to_numpy(backend.copy(backend.asarray(data, device=place))), data)


@requirement("copy.copy-goes-where-it-is-told", section=SECTION)
def test_copy_goes_to_a_device(backend, route):
    """Return from ``copy(x, device)`` a copy on this device."""
    source, target = route
    x = backend.rand(5, seed=0, device=source)
    copied = backend.copy(x, target)
    assert backend.device_of(copied) is target
    assert_same(backend.to_numpy(copied), backend.to_numpy(x))


@requirement("copy.copy-stays-unless-told", section=SECTION)
def test_copy_stays_where_the_tensor_is_also_in_a_scope(backend, route):
    """Return a copy on the tensor's own device, also within another block.

    ``copy`` is about memory, and not about devices.
    """
    scope, there = route
    x = backend.ones(1, device=there)
    with backend.on(scope):
        copied = backend.copy(x)
    assert backend.device_of(copied) is there


@requirement("copy.to-a-missing-device", section=SECTION)
@pytest.mark.parametrize("method", ["to", "copy"])
def test_a_missing_device_is_an_error_and_never_the_cpu(backend, place, missing, method):
    """Refuse to move or copy to a missing device, and do not use the CPU.

    A silent fallback shows only in the time of a training.
    """
    x = backend.ones(2, device=place)
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        getattr(backend, method)(x, missing)
    assert backend.device_of(x) is place


@requirement("copy.to-leaves-the-default-device", section=SECTION)
def test_a_move_leaves_the_default_device_alone(backend, route):
    """Leave the default device alone in a move.

    Some frameworks switch to the device for the copy.
    """
    source, target = route
    before = backend.default_device()
    backend.copy(backend.to(backend.ones(1, device=source), target))
    assert backend.default_device() is before
    assert backend.device_of(backend.ones(1)) is backend.cpu()


@requirement("copy.sum-stays", section=SECTION, source="D2L")
def test_the_sum_of_two_tensors_of_a_gpu_is_there(backend, route):
    """Add two tensors of a GPU there, after one of them has moved to it."""
    source, target = route
    x, y = backend.ones((2, 3), device=source), backend.full((2, 3), 2.0, device=target)
    z = y + backend.to(x, target)
    assert backend.device_of(z) is target
    assert_same(backend.to_numpy(z), np.full((2, 3), 3.0, "float32"))


@requirement("copy.views-move-whole", section=SECTION)
def test_a_part_of_a_tensor_moves_as_a_tensor(backend, route):
    """Move a slice of a tensor with its own values.

    A view has the memory of the whole tensor below it.
    """
    source, target = route
    data = numbers("float32", (4, 6))
    part = backend.asarray(data, device=source)[1, :]
    assert_same(backend.to_numpy(backend.to(part, target)), np.ascontiguousarray(data[1]))


@requirement("copy.ties-are-copied-once", section=SECTION)
def test_a_tensor_in_several_places_of_a_batch_is_copied_once(backend, place, monkeypatch):
    """Copy a tensor in several places of a batch once.

    Tied weights take their memory once.
    """
    x, original, copied = backend.ones(2, device=place), framework_of(backend).tensors.transfer, []

    def count(xs, native, *, copy):
        copied.extend(xs)
        return original(xs, native, copy=copy)

    monkeypatch.setattr(framework_of(backend).tensors, "transfer", count)
    backend.copy({"x": x, "again": [x, (x,)]}, place)
    assert len(copied) == 1


@requirement("copy.refuses-what-is-no-tensor", section=SECTION)
@pytest.mark.parametrize(
    ("method", "value"),
    [
        *itertools.product(("to", "copy"), (object(), {"a": object()})),
        ("copy", np.zeros(2)),  # ``to`` makes a tensor of it
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_object_that_is_not_a_tensor_is_refused_with_the_fix(backend, place, method, value):
    """Refuse an object that is not a tensor, with a line that helps.

    An object that passes through would stay on the wrong device.
    """
    with pytest.raises(UnsupportedValueError) as caught:
        getattr(backend, method)(value, place)
    assert caught.value.fix


@requirement(
    "copy.out-of-memory-leaves-the-source",
    section=SECTION,
    source="contract, Containers and errors",
)
@pytest.mark.parametrize("batch", [lambda x: x, lambda x: {"x": x}], ids=["tensor", "batch"])
def test_a_copy_that_fails_is_translated_and_leaves_the_source(backend, place, monkeypatch, batch):
    """Translate a failed copy into d2ldev's error, and leave the source alone.

    The caller goes on with what it has.
    """
    x = backend.ones(2, device=place)

    def full(*_, **__):
        raise MemoryError("none left")

    monkeypatch.setattr(framework_of(backend).tensors, "transfer", full)
    with pytest.raises(MemoryError, match="none left") as caught:
        backend.copy(batch(x), place)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert backend.device_of(x) is place
