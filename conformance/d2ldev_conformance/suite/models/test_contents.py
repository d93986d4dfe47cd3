"""D2L 6.7.3: what an object keeps moves with it, as the object itself shows.

A model computes on a device only if each of its tensors is there. A backend that forgets one kind
cannot find it by its own list.

The other tests of ``place`` ask ``placement`` and ``named_tensors``, which find the tensors as
``place`` does. They do not miss what all of them overlook.
"""

from __future__ import annotations

from d2ldev_conformance.provision import buffers, gradients, optimizer_states, ties
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, read_contents

SECTION = "6.7.3"
SOURCE = "D2L"


def check_move(backend, route, contents):
    """Check that ``place`` moves tensors of an object with their values; return the object."""
    source, target = route
    build, list_tensors = contents
    obj = build(1, source)
    before = list_tensors(obj)
    values = read_contents(backend, before)
    assert {backend.device_of(x) for x in before} == {source}
    placed = backend.place(obj, target)
    after = list_tensors(placed)
    assert [backend.device_of(x) for x in after] == [target] * len(values)
    for x, value in zip(after, values, strict=True):
        assert_same(backend.to_numpy(x), value)
    return placed


@requirement("place.moves-buffers", section=SECTION)
def test_what_a_model_does_not_train_moves_with_it(backend, route, buffered):
    """Move the buffers of a model, such as running means, with their values."""
    check_move(backend, route, buffers(backend)[buffered])


@requirement("place.moves-gradients", section=SECTION)
def test_gradients_move_with_what_they_are_of(backend, route, graded):
    """Move gradients to the device of their parameters, with their values."""
    check_move(backend, route, gradients(backend)[graded])


@requirement("place.moves-states-of-optimizers", section=SECTION)
def test_the_state_of_an_optimizer_moves_with_it(backend, route, optimized):
    """Move the state of each optimizer with its values."""
    check_move(backend, route, optimizer_states(backend)[optimized])


@requirement("place.keeps-ties-of-a-model", section=SECTION)
def test_a_tensor_in_several_places_is_still_one(backend, route, tied):
    """Move a tensor in several places of a model as one tensor.

    Tied weights would drift apart in training.
    """
    contents = ties(backend)[tied]
    placed = check_move(backend, route, contents)
    tensors = contents[1](placed)
    assert len(tensors) > 1
    assert len({backend.address(x) for x in tensors}) == 1
