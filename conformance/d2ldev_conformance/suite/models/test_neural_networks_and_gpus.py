"""D2L 6.7.3, "Neural Networks and GPUs": models and optimizers are moved once, and whole.

A model and its optimizer are moved as one, with all tensors and without a change of their values.
Otherwise the training that follows is another one.
"""

from __future__ import annotations

import re
import threading
import types
import warnings

import numpy as np
import pytest

from d2ldev import D2LDevWarning, DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework import Role
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.provision import loops, samples
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_values, read_saved_values, room_for, values_of
from d2ldev_conformance.suite.devices.queues import becomes_idle
from d2ldev_conformance.suite.memory import Held

SECTION = "6.7.3"
SOURCE = "contract"


def _ties(backend, obj):
    """Return which names are one tensor: a set of groups of names."""
    groups = {}
    for name, x in backend.named_tensors(obj, gradients=True).items():
        groups.setdefault(id(x), []).append(name)
    return sorted(map(tuple, groups.values()))


@requirement("place.has-samples", section=SECTION)
def test_there_are_tensors_to_place_in_every_object(backend, sample):
    """Provide samples for ``place`` that have tensors.

    Without tensors the other requirements of ``place`` would test nothing.
    """
    assert backend.named_tensors(samples(backend)[sample](backend.cpu()))


@requirement("place.moves-everything", section=SECTION, source="D2L")
def test_place_moves_everything(backend, route, sample):
    """Move each tensor of a model, an optimizer or a nesting."""
    source, target = route
    obj = samples(backend)[sample](source)
    assert set(backend.placement(obj).values()) == {source}
    placed = backend.place(obj, target)
    assert set(backend.placement(placed).values()) == {target}


@requirement("place.keeps-names", section=SECTION)
def test_place_keeps_the_names(backend, route, sample):
    """Keep the names of ``placement`` in a move.

    Files and reports find tensors by these names.
    """
    source, target = route
    obj = samples(backend)[sample](source)
    names = list(backend.placement(obj))
    assert len(names) == len(set(names)) > 0
    assert list(backend.placement(backend.place(obj, target))) == names


@requirement("place.keeps-values", section=SECTION)
def test_place_keeps_every_value(backend, route, sample):
    """Keep each value in a move, also if the old memory is overwritten.

    Virtual GPUs are in one memory, and another holder may still have the old tensors.
    """
    source, target = route
    obj = samples(backend)[sample](source)
    held = Held(backend, obj)
    held.check_apart(backend.place(obj, target))


@requirement("place.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks")
def test_what_is_placed_is_computed_without_a_wait(backend, route, sample):
    """Compute the tensors that ``place`` has moved, although nobody waits for them.

    A recorded move keeps the old tensors in memory.
    """
    source, target = route
    obj = samples(backend)[sample](source)
    backend.synchronize()
    placed = backend.place(obj, target)
    assert becomes_idle(backend, target)
    del placed


@requirement("place.keeps-ties", section=SECTION)
def test_place_keeps_ties(backend, route, sample):
    """Keep one tensor under two names as one tensor in a move.

    Tied weights would drift apart in training.
    """
    source, target = route
    obj = samples(backend)[sample](source)
    ties = _ties(backend, obj)
    assert _ties(backend, backend.place(obj, target)) == ties


@requirement("place.there-and-back", section=SECTION)
def test_place_there_and_back_changes_nothing(backend, route, sample):
    """Return the same values after a move to another device and back."""
    source, target = route
    obj = samples(backend)[sample](source)
    values = values_of(backend, obj)
    back = backend.place(backend.place(obj, target), source)
    assert set(backend.placement(back).values()) == {source}
    assert_same_values(backend, back, values)


@requirement("place.noop-returns-same-object", section=SECTION)
def test_placing_on_the_same_device_is_a_no_op(backend, place, sample, monkeypatch):
    """Return the object itself without a copy if all of it is on the device.

    A call before each epoch costs nothing.

    A framework may make the handle of a tensor anew. So the test looks for copies.
    """
    tensors, copied = framework_of(backend).tensors, []
    obj = samples(backend)[sample](place)
    values = values_of(backend, obj)
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "transfer", lambda xs, *_, **__: copied.append(xs) or xs)
        assert backend.place(obj, place) is obj
    assert copied == []
    assert_same_values(backend, obj, values)


@requirement("place.copies-nothing-twice", section=SECTION)
def test_place_copies_each_tensor_once(backend, route, sample, monkeypatch):
    """Copy each tensor once, also if it has several names.

    Twice the memory may not fit on the card.
    """
    source, target = route
    obj = samples(backend)[sample](source)
    original, copied = framework_of(backend).tensors.transfer, []

    def count(xs, native, *, copy):
        copied.extend(xs)
        return original(xs, native, copy=copy)

    monkeypatch.setattr(framework_of(backend).tensors, "transfer", count)
    distinct = {id(x) for x in backend.named_tensors(obj, gradients=True).values()}
    backend.place(obj, target)
    assert len(copied) == len({id(x) for x in copied}) == len(distinct)


@requirement("place.all-or-nothing", section=SECTION)
def test_a_failure_halfway_leaves_everything_where_it_was(backend, route, sample, monkeypatch):
    """Leave each tensor where it was if a copy fails halfway.

    A half-moved model can neither be used nor moved again.
    """
    source, target = route
    obj = samples(backend)[sample](source)
    tensors, values = backend.named_tensors(obj, gradients=True), values_of(backend, obj)
    last = len({id(x) for x in tensors.values()}) - 1
    monkeypatch.setattr(
        framework_of(backend).tensors,
        "transfer",
        room_for(last, framework_of(backend).tensors.transfer),
    )
    with pytest.raises(MemoryError):
        backend.place(obj, target)
    assert set(backend.placement(obj).values()) == {source}
    assert_same_values(backend, obj, values)


# One way alone: JAX compiles a loop for each device.
@requirement("place.loops-go-on", section=SECTION, source="D2L")
@pytest.mark.needs_gpus(1)
def test_a_loop_goes_on_where_its_model_and_optimizer_were_placed(backend, loop):
    """Continue a loop by hand on a GPU as the CPU would have continued it.

    An optimizer has to find the moved parameters.
    """
    source, target = backend.cpu(), backend.gpu(0)
    begin, go_on = loops(backend)[loop]
    unbroken, parts = begin(1, source), begin(1, source)
    # In fewer bits of a GPU an optimizer would soon take other steps.
    with backend.matmul_precision("highest"):
        go_on(source, **unbroken)
        go_on(source, **unbroken)
        go_on(source, **parts)
        placed = backend.place(parts, target)
        assert set(backend.placement(placed).values()) == {target}
        go_on(target, **placed)
    found = read_saved_values(backend, placed["net"])
    # Devices add in other orders, and optimizers divide by what is nearly 0.
    for name, value in read_saved_values(backend, unbroken["net"]).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4)


@requirement("place.missing-device", section=SECTION)
def test_place_on_a_missing_device_moves_nothing(backend, place, missing, sample):
    """Refuse a device that does not exist, and move nothing."""
    obj = samples(backend)[sample](place)
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        backend.place(obj, missing)
    assert set(backend.placement(obj).values()) == {place}


@requirement("place.result-is-where-the-model-is", section=SECTION, source="D2L")
def test_a_placed_model_computes_where_it_is(backend, route):
    """Compute the result of a placed model on its device."""
    source, target = route
    net = backend.place(backend.mlp([3, 4, 1], device=source), target)
    y = net(backend.ones((2, 3), device=target))
    assert backend.device_of(y) is target


@requirement("place.same-function", section=SECTION)
@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_a_placed_model_is_the_same_function(backend, route, activation):
    """Compute the same function after a move, with each activation.

    A transposed or shuffled weight keeps its values, and computes something else.
    """
    source, target = route
    net = backend.mlp([3, 16, 2], activation=activation, device=source)
    x = backend.rand((5, 3), seed=0, device=source)
    before = backend.to_numpy(net(x))
    net = backend.place(net, target)
    after = backend.to_numpy(net(backend.to(x, target)))
    # Devices add in other orders: a few units in the last place of sums of 16 terms.
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@requirement("place.leaves-the-default-device", section=SECTION)
def test_place_leaves_the_default_device_alone(backend, route):
    """Leave the default device alone in a placement.

    Some frameworks move a model within a block of theirs.
    """
    source, target = route
    before = backend.default_device()
    backend.place(backend.mlp([3, 1], device=source), target)
    assert backend.default_device() is before
    assert backend.device_of(backend.ones(1)) is backend.cpu()


@requirement("place.pytrees", section=SECTION, source="JAX, pytrees")
def test_a_pytree_of_parameters_is_placed(backend, route):
    """Place a nesting of parameters, with ties, and leave numbers and texts alone."""
    source, target = route
    weight = backend.ones((2, 2), device=source)
    tree = {"layers": [{"weight": weight}, {"weight": weight}], "step": 3, "name": "net"}
    placed = backend.place(tree, target)
    assert backend.placement(placed) == {
        "layers.0.weight": target,
        "layers.1.weight": target,
    }
    assert placed["layers"][0]["weight"] is placed["layers"][1]["weight"]
    assert (placed["step"], placed["name"]) == (3, "net")


@requirement("place.several-at-once", section=SECTION)
def test_several_objects_are_placed_at_once(backend, route, sample):
    """Place several objects in one call, and return them in their container.

    A model and its optimizer have to move together.
    """
    source, target = route
    pair = (samples(backend)[sample](source), [backend.ones(1, device=source)])
    placed = backend.place(pair, target)
    assert type(placed) is tuple
    assert set(backend.placement(placed).values()) == {target}


@requirement("place.refuses-others", section=SECTION)
@pytest.mark.parametrize(
    "value", [object(), {"net": object()}, np.zeros(2)], ids=lambda value: type(value).__name__
)
def test_an_object_that_is_not_a_model_is_refused(backend, place, value):
    """Refuse an object that is not a model, an optimizer or a nesting of tensors.

    An object that passes through would stay on the wrong device.
    """
    with pytest.raises(UnsupportedValueError, match="place"):
        backend.place(value, place)


@requirement("place.named-tensors", section=SECTION)
def test_named_tensors_are_those_of_the_placement(backend, place, sample):
    """Return from ``named_tensors`` the tensors that ``placement`` lists.

    Both are ways to check what has moved.
    """
    obj = samples(backend)[sample](place)
    named = backend.named_tensors(obj, gradients=True)
    assert {name: backend.device_of(x) for name, x in named.items()} == backend.placement(obj)
    assert all(isinstance(x, framework_of(backend).tensors.types) for x in named.values())


# -- what a model keeps beside what the framework counts ------------------------------------------


class Own:
    """An object of the user's, with what must not run in a search."""

    def __init__(self, **kept):
        vars(self).update(kept)

    @property
    def computed(self):
        raise AssertionError("a property was read")

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")

    def method(self):
        """Do nothing: it is kept, and not called."""


@pytest.fixture
def model(backend):
    """Makes a model of the framework's own class, with an attribute."""

    def make(kept, device, name="kept"):
        net = backend.mlp([2, 1], device=device)
        if not isinstance(net, framework_of(backend).models.types):
            pytest.skip("its models are containers, which hold nothing else")
        try:
            setattr(net, name, kept)
        except ValueError as error:  # the newest Flax wants to know where tensors are
            pytest.skip(f"the framework refuses such an attribute: {str(error)[:80]}")
        return net

    return make


@pytest.fixture
def uncounted(backend, model):
    """Makes a model with an attribute that holds tensors, which the framework does not count."""

    def make(kept, device, name="kept"):
        net = model(kept, device, name)
        slots = {each.name: each for each in framework_of(backend).models.members(net)}
        if type(kept) is not Own and slots[name].role is not Role.ATTRIBUTE:
            pytest.skip("the framework counts the tensors in lists, tuples and dicts")
        return net

    return make


@requirement("place.moves-attributes", section=SECTION, source="contract, What place does not move")
def test_a_tensor_that_is_an_attribute_moves(backend, route, model):
    """Move a tensor in an attribute of a model, which need not be a parameter.

    A mask that stays behind fails in the first step.
    """
    source, target = route
    net = backend.place(model(backend.asarray([1.0, 2.0], device=source), source), target)
    assert backend.device_of(net.kept) is target
    assert backend.to_numpy(net.kept).tolist() == [1.0, 2.0]
    assert {*backend.placement(net).values()} == {target}


NESTINGS = {
    "list": (lambda x: [x], "0", lambda kept: kept[0]),
    "tuple": (lambda x: (None, x), "1", lambda kept: kept[1]),
    "dict": (lambda x: {"of": [x]}, "of.0", lambda kept: kept["of"][0]),
    "object": (lambda x: Own(held=(x,)), "held.0", lambda kept: kept.held[0]),
}


@requirement("place.names-what-stays", section=SECTION, source="contract, What place does not move")
@pytest.mark.parametrize("kind", NESTINGS)
def test_a_tensor_that_stays_is_named_once(backend, route, uncounted, kind):
    """Leave a tensor in a list or an object of a model, unless it is trained, and name it once.

    The model may keep it for the host, and the framework's own move leaves it there. The warning
    has the line that registers it, and ``placement`` lists it.
    """
    source, target = route
    nest, place, find = NESTINGS[kind]
    x = backend.ones(2, device=source)
    # A warning is given once for each name.
    name = f"of_{source}_{target}".replace(":", "_")
    net = uncounted(nest(x), source, name)
    identifier = f"{name}_{place}".replace(".", "_")
    slots = {slot.name: slot for slot in framework_of(backend).models.members(net)}
    line = re.escape(slots[name].registration.format(identifier))
    words = rf"{name}\.{place} is on {source}, and stays there; {line} registers it"
    with pytest.warns(D2LDevWarning, match=words):
        net = backend.place(net, target)
    assert find(getattr(net, name)) is x
    assert backend.placement(net)[f"{name}.{place}"] is source
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.place(net, target)


@requirement("place.moves-all-names", section=SECTION, source="contract, What place does not move")
@pytest.mark.parametrize("kind", NESTINGS)
def test_what_moves_moves_under_every_name(backend, route, uncounted, kind, recwarn):
    """Move a tensor under each of its names, if it moves under one of them.

    Two values would be there, and only one would change.
    """
    source, target = route
    nest, _, find = NESTINGS[kind]
    x = backend.ones(2, device=source)
    net = uncounted(nest(x), source)
    net.also = x
    backend.place(net, target)
    assert find(net.kept) is net.also
    assert backend.device_of(net.also) is target
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]


@requirement(
    "place.leaves-other-objects", section=SECTION, source="contract, What place does not move"
)
def test_objects_outside_the_model_are_not_entered(backend, route, model, recwarn):
    """Leave the objects alone to which an object of a model refers: threads, functions, trainers.

    A model must not move the program around it, and the framework's own move does not enter them.
    """
    source, target = route
    x = backend.ones(2, device=source)
    thread = threading.Thread()
    thread.x = x
    kept = Own(cls=Own, module=types, lock=threading.Lock(), thread=thread)
    vars(kept).update(itself=kept, trainer=Own(x=x), function=lambda: x, method=kept.method)
    net = model(kept, source)
    backend.place(net, target)
    assert thread.x is kept.trainer.x is x
    assert net.kept is kept
    assert {*backend.placement(net).values()} == {target}
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]
