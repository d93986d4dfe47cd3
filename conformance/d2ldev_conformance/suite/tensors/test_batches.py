"""D2L 6.7.2.2, "Copying", for whole batches: nestings of tensors move as one.

Data loaders return tensors in containers of all kinds. A batch has to arrive as it was, with each
of its tensors on the device.

Every test that takes ``transfer`` runs with ``copy`` on each device, and with ``to`` wherever there
is another device. Every test that takes ``take`` runs with all that take a batch of data: ``to``,
``prefetch`` and ``Trainer``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import threading
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

import d2ldev
from d2ldev import ArrayLoader, DeviceUnavailableError, Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, room_for

SECTION = "6.7.2.2"
SOURCE = "contract, Containers and errors"


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    label: str


@dataclasses.dataclass
class Counted:
    x: Any
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


class Tagged(dict):
    tag = "none"


@dataclasses.dataclass
class Masked:
    x: Any

    def __post_init__(self) -> None:
        self.mask = self.x


class Row(list):
    """A list with attributes."""


class Point(tuple):
    """A tuple with attributes."""


class Ends(collections.deque):
    """A deque with attributes."""


class Fields(collections.UserDict):
    """A mapping that keeps its items in an attribute."""


def _with_attributes(container: Any, x: Any) -> Any:
    container.mask, container.inner, container.other = x, {"of": [x]}, threading
    return container


WITH_ATTRIBUTES = {
    "dataclass": Masked,
    "dict": lambda x: Tagged(x=x),
    "list": lambda x: Row([x]),
    "tuple": lambda x: Point([x]),
    "deque": lambda x: Ends([x]),
    "mapping": lambda x: Fields(x=x),
    "without items": lambda _: Row(),
}


class Batch:
    """A container that d2ldev has not heard of."""

    def __init__(self, x: Any, path: str) -> None:
        self.x, self.path = x, path


class Watched(Batch):
    """A container that is asked for its children as often as it is walked."""


@pytest.fixture(
    params=[
        pytest.param(("copy", "cpu", "cpu"), id="copy-cpu"),
        pytest.param(("copy", "gpu:0", "gpu:0"), id="copy-gpu0", marks=pytest.mark.needs_gpus(1)),
        pytest.param(("to", "cpu", "gpu:0"), id="cpu-gpu0", marks=pytest.mark.needs_gpus(1)),
        pytest.param(("to", "gpu:0", "cpu"), id="gpu0-cpu", marks=pytest.mark.needs_gpus(1)),
        pytest.param(("to", "gpu:0", "gpu:1"), id="gpu0-gpu1", marks=pytest.mark.needs_gpus(2)),
    ]
)
def transfer(request, backend):
    """Make a tensor at the source, and take something to the target."""
    method, source, target = request.param

    class Transfer:
        @staticmethod
        def tensor(value=1.0):
            return backend.full((2,), value, device=source)

        @staticmethod
        def of(x):
            return getattr(backend, method)(x, target)

        @staticmethod
        def check(x, value=1.0):
            assert backend.device_of(x) is backend.device(target)
            assert_same(backend.to_numpy(x), np.full(2, value, "float32"))

    return Transfer()


@requirement("containers.dict", section=SECTION, source="JAX, pytrees")
def test_a_dict_stays_a_dict_in_its_order(transfer):
    """Move a dict as a dict, in its order."""
    moved = transfer.of({"b": transfer.tensor(1.0), "a": transfer.tensor(2.0), 3: None})
    assert type(moved) is dict
    assert list(moved) == ["b", "a", 3]
    transfer.check(moved["b"], 1.0)
    transfer.check(moved["a"], 2.0)


@requirement("containers.list-and-tuple", section=SECTION, source="JAX, pytrees")
@pytest.mark.parametrize("cls", [list, tuple])
def test_a_list_stays_a_list_and_a_tuple_a_tuple(transfer, cls):
    """Move a list as a list, and a tuple as a tuple."""
    moved = transfer.of(cls([transfer.tensor(1.0), transfer.tensor(2.0)]))
    assert type(moved) is cls
    transfer.check(moved[0], 1.0)
    transfer.check(moved[1], 2.0)


@requirement("containers.namedtuple", section=SECTION, source="JAX, pytrees")
def test_a_namedtuple_stays_one(transfer):
    """Move a namedtuple as its own class.

    Code reads its fields by name.
    """
    moved = transfer.of(Pair(transfer.tensor(), 5))
    assert type(moved) is Pair
    transfer.check(moved.x)
    assert moved.y == 5


@requirement("containers.frozen-dataclass", section=SECTION)
def test_a_frozen_dataclass_stays_one(transfer):
    """Move a frozen dataclass, which cannot be assigned to."""
    moved = transfer.of(Frozen(transfer.tensor(), "cat"))
    assert type(moved) is Frozen
    transfer.check(moved.x)
    assert moved.label == "cat"


@requirement("containers.no-constructor-runs", section=SECTION)
def test_a_dataclass_is_not_initialised_again(transfer):
    """Move a dataclass without running its ``__post_init__`` again.

    A constructor counts, checks, or opens files.
    """
    moved = transfer.of(Counted(transfer.tensor()))
    transfer.check(moved.x)
    assert moved.made == 1


@requirement("containers.defaultdict", section=SECTION)
def test_a_defaultdict_keeps_its_factory(transfer):
    """Keep the factory of a ``defaultdict`` in a move."""
    batch = collections.defaultdict(list, x=transfer.tensor())
    moved = transfer.of(batch)
    assert type(moved) is collections.defaultdict
    assert moved["new"] == []
    transfer.check(moved["x"])
    assert "new" not in batch


@requirement("containers.ordereddict", section=SECTION)
def test_an_ordereddict_keeps_its_order(transfer):
    """Keep the order of an ``OrderedDict`` in a move.

    JAX sorts the keys of a dict, but not of this class.
    """
    batch = collections.OrderedDict(z=transfer.tensor(), a=transfer.tensor())
    batch.move_to_end("z")
    moved = transfer.of(batch)
    assert type(moved) is collections.OrderedDict
    assert list(moved) == ["a", "z"]
    transfer.check(moved["z"])


@requirement("containers.deque", section=SECTION)
def test_a_deque_keeps_its_maximal_length(transfer):
    """Keep the maximal length of a ``deque`` in a move."""
    moved = transfer.of(collections.deque([transfer.tensor(), 1], maxlen=3))
    assert type(moved) is collections.deque
    assert moved.maxlen == 3
    transfer.check(moved[0])


@requirement("containers.subclass-attributes", section=SECTION)
def test_a_subclass_keeps_its_attributes(transfer):
    """Keep class and attributes of a subclass of ``dict`` in a move.

    Libraries return such batches, with settings in attributes.
    """
    batch = Tagged(x=transfer.tensor())
    batch.tag = "train"
    moved = transfer.of(batch)
    assert type(moved) is Tagged
    assert moved.tag == "train"
    transfer.check(moved["x"])


@requirement("containers.attributes-move", section=SECTION)
@pytest.mark.parametrize("make", WITH_ATTRIBUTES.values(), ids=list(WITH_ATTRIBUTES))
def test_attributes_beside_fields_and_items_move_with_them(transfer, make):
    """Move tensors in attributes of a container along with its items.

    A mask in an attribute would stay on the CPU.
    """
    x = transfer.tensor()
    batch = _with_attributes(make(x), x)
    moved = transfer.of(batch)
    assert type(moved) is type(batch)
    transfer.check(moved.mask)
    assert moved.inner["of"][0] is moved.mask
    assert moved.other is threading
    assert batch.mask is batch.inner["of"][0] is x


@requirement("containers.attributes-noop", section=SECTION)
@pytest.mark.parametrize("make", WITH_ATTRIBUTES.values(), ids=list(WITH_ATTRIBUTES))
def test_a_container_with_attributes_already_on_the_device_is_returned_itself(backend, place, make):
    """Return a container with attributes itself if all of it is on the device.

    A walk through attributes must not count as a change.
    """
    x = backend.ones(2, device=place)
    batch = _with_attributes(make(x), x)
    assert backend.to(batch, place) is batch


@requirement("containers.mapping-proxy", section=SECTION)
def test_a_read_only_mapping_stays_one(transfer):
    """Move a read-only mapping as a read-only mapping."""
    moved = transfer.of(types.MappingProxyType({"x": transfer.tensor()}))
    assert type(moved) is types.MappingProxyType
    transfer.check(moved["x"])


@requirement("containers.nested", section=SECTION, source="JAX, pytrees")
def test_nestings_move_at_every_depth(transfer):
    """Move tensors at each depth of a nesting."""
    moved = transfer.of({"a": [Pair((transfer.tensor(),), {"b": transfer.tensor(2.0)})]})
    transfer.check(moved["a"][0].x[0])
    transfer.check(moved["a"][0].y["b"], 2.0)


@requirement("containers.empty", section=SECTION)
@pytest.mark.parametrize("empty", [{}, [], (), None, {"a": []}, [()]], ids=repr)
def test_an_object_without_tensors_is_returned_itself(transfer, empty):
    """Return a container without tensors itself.

    There is nothing to rebuild.
    """
    assert transfer.of(empty) is empty


@requirement("containers.plain-values", section=SECTION)
@pytest.mark.parametrize("value", [None, 1, 1.5, 1j, True, "x", b"x", np.float32(1), np.bool_(1)])
def test_plain_values_pass_through(transfer, value):
    """Leave numbers, texts and None in a batch as the same objects.

    File names and scales travel beside tensors.
    """
    moved = transfer.of([transfer.tensor(), value])
    assert moved[1] is value
    transfer.check(moved[0])


@requirement("containers.tied-tensors", section=SECTION)
def test_tied_tensors_stay_tied(transfer):
    """Keep one tensor in two places as one tensor.

    Two copies cost twice the memory, and drift apart when written to.
    """
    x = transfer.tensor()
    moved = transfer.of({"a": x, "b": [x], "c": transfer.tensor()})
    assert moved["a"] is moved["b"][0]
    assert moved["a"] is not moved["c"]
    transfer.check(moved["a"])


@requirement("containers.tied-containers", section=SECTION)
def test_a_list_in_two_places_stays_one_list(transfer):
    """Keep one list in two places as one list.

    A write through one name shows under the other.
    """
    shared = [transfer.tensor()]
    moved = transfer.of((shared, {"again": shared}))
    assert moved[0] is moved[1]["again"]
    transfer.check(moved[0][0])


@requirement("containers.input-unchanged", section=SECTION)
def test_the_callers_containers_are_not_changed(transfer):
    """Leave the caller's containers as they were.

    The loader may yield the same object again.
    """
    x = transfer.tensor()
    inner = [x]
    batch = {"x": x, "inner": inner}
    moved = transfer.of(batch)
    assert moved is not batch
    assert batch["x"] is x
    assert batch["inner"] is inner
    assert inner[0] is x


@requirement("containers.noop-returns-same-object", section=SECTION)
def test_a_container_already_on_the_device_is_returned_itself(backend, place):
    """Return a container itself if all of its tensors are on the device.

    A step without moves has no cost of copies.
    """
    x = backend.ones(1, device=place)
    for batch in ({"x": x, "y": [x, x]}, [x], (x, (x, None)), Pair(x, 1), Frozen(x, "a")):
        assert backend.to(batch, place) is batch


@requirement("containers.noop-inside", section=SECTION)
def test_only_containers_with_tensors_that_move_are_rebuilt(backend, route):
    """Rebuild only those containers in which a tensor moves.

    Large parts of a batch may be on the device for the whole run.
    """
    source, target = route
    there = [backend.ones(1, device=target)]
    moved = backend.to({"there": there, "here": backend.ones(1, device=source)}, target)
    assert moved["there"] is there
    assert backend.device_of(moved["here"]) is target


@requirement("containers.registered", section=SECTION, source="JAX, pytrees")
def test_a_registered_container_moves(transfer):
    """Move a class that the user has registered, by its functions.

    Only its author knows its children.
    """
    d2ldev.register_container(Batch, lambda b: [b.x], lambda old, new: Batch(new[0], old.path))
    moved = transfer.of({"batch": Batch(transfer.tensor(), "a.png")})
    transfer.check(moved["batch"].x)
    assert moved["batch"].path == "a.png"


@requirement("containers.registered-children-are-a-list", section=SECTION)
@pytest.mark.parametrize("kind", ["dict", "text", "tensor"])
def test_registered_children_that_are_no_list_are_refused(transfer, kind):
    """Refuse a registered container whose children are a dict, a text or a tensor, at its walk.

    A walk through a dict takes its keys, and would move nothing without a word.
    """

    class Batch:
        def __init__(self, x):
            self.x = x

    made = {"dict": lambda b: {"x": b.x}, "text": lambda _: "x", "tensor": lambda b: b.x}
    d2ldev.register_container(Batch, made[kind], lambda _, new: Batch(*new))
    with pytest.raises(UnsupportedValueError, match=r"has to return a list: \[batch\.x"):
        transfer.of({"batch": Batch(transfer.tensor())})


@requirement("containers.walked-once", section=SECTION)
def test_a_batch_is_taken_apart_once(backend, route):
    """Take a batch apart once in ``to``, and once in ``prefetch``.

    A walk in Python costs time in each step.
    """
    source, target = route
    walks = []
    children = lambda batch: walks.append(batch) or [batch.x]  # noqa: E731
    d2ldev.register_container(Watched, children, lambda old, new: Watched(new[0], old.path))
    batch = [Watched(backend.ones(1, device=source), "a.png"), backend.ones(1, device=target)]
    moved = backend.to(batch, target)
    assert len(walks) == 1
    assert backend.to(moved, target) is moved
    assert len(walks) == 2
    assert len(list(backend.prefetch([batch, batch], target))) == 2
    assert len(walks) == 4


@requirement("containers.unknown-object-is-named", section=SECTION)
def test_an_unknown_object_is_refused_by_name(transfer):
    """Refuse an unknown object in a batch, and name its path.

    An object that passes through would stay on the wrong device.
    """
    with pytest.raises(UnsupportedValueError) as caught:
        transfer.of({"x": transfer.tensor(), "meta": [1, object()]})
    assert "meta.1" in str(caught.value)
    assert "object" in str(caught.value)


@requirement("containers.cycles-are-refused", section=SECTION)
def test_a_container_that_contains_itself_is_refused(transfer):
    """Refuse a container that contains itself.

    The walk would never end.
    """
    batch = {"x": transfer.tensor(), "more": []}
    batch["more"].append(batch)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        transfer.of(batch)


@requirement("containers.too-deep-is-refused", section=SECTION)
def test_a_nesting_that_is_too_deep_is_refused(transfer):
    """Refuse a nesting that is too deep for Python.

    Python's own limit may end the process.
    """
    batch = [transfer.tensor()]
    for _ in range(100_000):
        batch = [batch]
    with pytest.raises(UnsupportedValueError, match="deep"):
        transfer.of(batch)


@requirement("containers.missing-device", section=SECTION)
def test_a_missing_device_leaves_a_batch_alone(backend, place, missing):
    """Leave a batch alone if the device does not exist.

    The caller can try another device with the same batch.
    """
    x = backend.ones(1, device=place)
    batch = {"x": x, "y": [x]}
    with pytest.raises(DeviceUnavailableError):
        backend.to(batch, missing)
    assert batch["x"] is batch["y"][0] is x
    assert backend.device_of(x) is place


@requirement("containers.all-or-nothing", section=SECTION)
def test_a_failure_halfway_leaves_a_batch_alone(backend, transfer, monkeypatch):
    """Leave a batch alone if a copy fails halfway.

    A half-moved batch fails later, far from the cause.
    """
    batch = {"x": transfer.tensor(1.0), "y": [transfer.tensor(2.0), transfer.tensor(3.0)]}
    before = [batch["x"], *batch["y"]]
    tensors = framework_of(backend).tensors
    monkeypatch.setattr(tensors, "transfer", room_for(1, tensors.transfer))
    with pytest.raises(MemoryError):
        transfer.of(batch)
    after = [batch["x"], *batch["y"]]
    assert all(now is then for now, then in zip(after, before, strict=True))


# -- data: what is not a tensor yet ---------------------------------------------------------------


@pytest.fixture(params=["to", "prefetch", "Trainer"])
def take(request, backend, place):
    """Take a batch of data to the place, in one of three ways."""
    if request.param == "to":
        return lambda batch: backend.to(batch, place)
    if request.param == "prefetch":
        return lambda batch: next(backend.prefetch([batch], place))
    trainer = Trainer(1, backend=backend)
    trainer.device = place
    return trainer.prepare_batch


def _check(backend, place, x, array):
    assert isinstance(x, framework_of(backend).tensors.types)
    assert backend.device_of(x) is place
    assert_same(backend.to_numpy(x), array)


@requirement("containers.arrays-become-tensors", section=SECTION)
def test_arrays_become_tensors_beside_tensors(backend, place, take):
    """Turn NumPy arrays in a batch into tensors on the device.

    Data loaders of NumPy need no step of conversion.
    """
    array, integers = np.full((2, 3), 1.5, "float32"), np.arange(4, dtype="int32")
    there = backend.ones(2, device=place)
    taken = take({"a": [array, (integers, None)], "there": there, "n": 3})
    _check(backend, place, taken["a"][0], array)
    _check(backend, place, taken["a"][1][0], integers)
    assert taken["there"] is there
    assert (taken["a"][1][1], taken["n"]) == (None, 3)


@requirement("containers.arrays-become-tensors", section=SECTION)
def test_an_array_on_its_own_becomes_a_tensor(backend, place, take):
    """Turn a single NumPy array into a tensor with memory of its own.

    The loader may fill its array again.
    """
    array = np.arange(3, dtype="float32")
    taken = take(array)
    _check(backend, place, taken, array)
    array[0] = 9.0
    assert_same(backend.to_numpy(taken), np.arange(3, dtype="float32"))


class Rows(collections.abc.Mapping):
    """A mapping whose iteration gives rows, as that of a tensor does."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, key):
        return {"x": self.x}[key]

    def keys(self):
        return {"x": self.x}.keys()

    def values(self):
        return {"x": self.x}.values()

    def __iter__(self):
        return iter([0, 1])

    def __len__(self):
        return 2


@pytest.fixture(params=["object", "mapping"])
def moving(backend, request):
    """Makes an object that is moved by the first of the framework's ``own_methods``."""
    methods = framework_of(backend).tensors.own_methods
    if methods is None:
        pytest.skip("the framework's users have agreed on no method by which objects move")

    def move(self, native):
        moved = backend.to(self.x, native)
        return self if moved is self.x else type(self)(moved)

    def make(device, *, can_copy=False):
        base = Rows if request.param == "mapping" else object
        own = {"__init__": lambda self, x: setattr(self, "x", x), methods[0]: move}
        if can_copy:
            own[methods[1]] = lambda self: type(self)(backend.copy(self.x))
        return type("Moving", (base,), own)(backend.ones(2, device=device))

    return make


@requirement("containers.objects-that-move", section=SECTION)
def test_an_object_that_moves_by_itself_is_moved(backend, place, take, moving):
    """Move an object by the method that the framework's users have agreed on.

    A graph of PyTorch Geometric is not a container, and has a ``to``. The iteration of a
    ``TensorDict`` gives rows.
    """
    obj = moving("cpu")
    taken = take({"a": [obj, np.zeros(2, "float32")]})
    assert type(taken["a"][0]) is type(obj)
    _check(backend, place, taken["a"][0].x, np.ones(2, "float32"))
    _check(backend, place, taken["a"][1], np.zeros(2, "float32"))
    assert backend.device_of(obj.x) is backend.cpu()


@requirement("containers.objects-that-move", section=SECTION)
def test_an_object_that_returns_itself_from_to_stays(backend, place, moving):
    """Return an object itself if its own method says that it is there.

    An object that stays causes no new batch.
    """
    batch = [moving(place), None]
    assert backend.to(batch, place) is batch


@requirement("containers.objects-that-move-are-copied", section=SECTION)
def test_an_object_that_moves_by_itself_is_copied_by_itself(backend, route, moving):
    """Copy such an object by the other method that the framework's users have agreed on.

    A copy in other memory than the object's own would be half of it.
    """
    source, target = route
    obj = moving(source, can_copy=True)
    copied = backend.copy({"a": obj})["a"]
    assert type(copied) is type(obj)
    assert backend.device_of(copied.x) is source
    assert backend.address(copied.x) != backend.address(obj.x)
    assert backend.device_of(backend.copy({"a": obj}, target)["a"].x) is target


@requirement("containers.objects-that-move-are-copied", section=SECTION)
def test_an_object_that_cannot_be_copied_is_refused(backend, place, moving):
    """Refuse to copy an object without that method, and name the function that helps."""
    with pytest.raises(UnsupportedValueError, match=r"(?s)at a is .*register_container\(Moving"):
        backend.copy({"a": moving(place)})


@requirement("containers.objects-that-move-stay-whole", section=SECTION)
def test_an_object_that_moves_by_itself_is_not_split(backend, route, moving):
    """Refuse to split such an object over several devices, and name it.

    It does not show its examples, and each device would compute with all of them.
    """
    batch = {"x": backend.ones((4, 2)), "a": moving("cpu", can_copy=True)}
    with pytest.raises(UnsupportedValueError, match=r"(?s)at a is .*register_container\(Moving"):
        backend.split(batch, route)


@requirement("containers.incoherent-is-named", section=SECTION)
def test_a_container_whose_items_do_not_fit_its_keys_is_refused(transfer):
    """Refuse a mapping whose iteration gives rows, and say so.

    Python's own message about an iterator names nothing in the user's program.
    """
    batch = {"a": Rows(transfer.tensor())}
    with pytest.raises(UnsupportedValueError) as caught:
        transfer.of(batch)
    assert "Rows at a" in str(caught.value)
    assert "has 1 values, and more keys" in str(caught.value)


@requirement("containers.slide-prepare-batch", section=SECTION, source="D2L")
def test_the_slides_prepare_batch_takes_batches_of_an_array_loader(backend, place):
    """Take the batches of an ``ArrayLoader`` in the book's ``prepare_batch``."""
    gpus = [backend.native(place)]
    x, y = np.arange(8, dtype="float32").reshape(4, 2), np.arange(4, dtype="int32")
    batches = [[backend.to(a, gpus[0]) for a in b] for b in ArrayLoader(x, y, batch_size=2)]
    for number, batch in enumerate(batches):
        _check(backend, place, batch[0], x[2 * number : 2 * number + 2])
        _check(backend, place, batch[1], y[2 * number : 2 * number + 2])
    assert len(batches) == 2


@requirement("containers.arrays-keep-containers", section=SECTION)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: collections.OrderedDict(z=x, a=x),
        lambda x: collections.defaultdict(list, x=x),
        lambda x: collections.deque([x, 1], maxlen=3),
        lambda x: Frozen(x, "cat"),
        lambda x: Counted(x),
        lambda x: Pair(x, (x,)),
        lambda x: types.MappingProxyType({"x": x}),
    ],
    ids=["ordereddict", "defaultdict", "deque", "frozen", "dataclass", "namedtuple", "proxy"],
)
def test_containers_of_arrays_keep_their_type(backend, place, take, make):
    """Keep the class of a container whose arrays become tensors."""
    array = np.full((2,), 2.0, "float32")
    batch = make(array)
    taken = take([batch, None])[0]
    expected = backend.to(make(backend.asarray(array)), place)
    assert type(taken) is type(batch)
    for name in ("default_factory", "maxlen", "made", "label"):
        assert getattr(taken, name, None) == getattr(batch, name, None)
    kind = framework_of(backend).state.kinds[type(batch)]
    assert list(kind.labels(taken)) == list(kind.labels(expected))
    _check(backend, place, next(iter(kind.children(taken))), array)


@requirement("containers.arrays-stay-tied", section=SECTION)
def test_an_array_in_two_places_becomes_one_tensor(backend, place, take):
    """Turn an array in two places into one tensor.

    The transfer happens once.
    """
    array, shared = np.ones(2, "float32"), [np.zeros(2, "float32")]
    taken = take({"a": array, "again": [array], "shared": shared, "too": (shared,)})
    assert taken["a"] is taken["again"][0]
    assert taken["shared"] is taken["too"][0]
    _check(backend, place, taken["a"], array)


@requirement("containers.arrays-are-named", section=SECTION)
def test_an_array_without_numbers_is_refused_by_name(take):
    """Refuse an array of objects in a batch, and name its path.

    Without the path a user searches the whole loader.
    """
    batch = {"x": np.ones(2, "float32"), "meta": [1, np.array([object(), "dog"])]}
    with pytest.raises(UnsupportedValueError, match=r"meta\.1"):
        take(batch)
    assert isinstance(batch["x"], np.ndarray)


TEXTS = {
    "str": lambda: np.array(["cat", "dog"]),
    "bytes": lambda: np.array([b"cat", b"dog"]),
    "objects": lambda: np.array(["cat", b"dog"], dtype=object),
}
texts = pytest.mark.parametrize("make", TEXTS.values(), ids=list(TEXTS))


@requirement("containers.text-stays-on-the-host", section=SECTION)
@texts
def test_text_of_numpy_stays_as_it_is_beside_tensors(backend, place, take, make):
    """Leave arrays of text in a batch as they are.

    No device has text.
    """
    text = make()
    taken = take({"x": np.ones(2, "float32"), "text": text, "deep": [(text,)]})
    _check(backend, place, taken["x"], np.ones(2, "float32"))
    assert taken["text"] is taken["deep"][0][0] is text


@requirement("containers.text-stays-on-the-host", section=SECTION)
@texts
def test_a_batch_with_text_already_on_the_device_is_returned_itself(backend, place, make):
    """Return a batch with text itself if its tensors are on the device.

    Text is always where it can be.
    """
    batch = {"x": backend.ones(2, device=place), "text": make()}
    assert backend.to(batch, place) is batch


@requirement("containers.text-is-copied", section=SECTION)
@texts
def test_a_copy_of_a_batch_has_text_of_its_own(backend, place, make):
    """Copy text in ``copy``.

    A copy shares no memory with its source.
    """
    text = make()
    copied = backend.copy({"x": backend.ones(2, device=place), "text": text})["text"]
    assert type(copied) is np.ndarray
    assert not np.shares_memory(copied, text)
    assert copied.tolist() == text.tolist()
