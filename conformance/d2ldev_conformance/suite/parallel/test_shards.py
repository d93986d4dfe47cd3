"""D2L 13.5: a batch is split, and parameters are copied, by hand.

Each GPU computes with a part of the batch. A wrong split trains on other pairs of inputs and
labels, without a sign.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

import numpy as np
import pytest

from d2ldev import Broadcast, DeviceUnavailableError, InvalidDeviceError, UnsupportedValueError
from d2ldev_conformance.provision import samples
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, read_saved_values
from d2ldev_conformance.suite.devices.queues import becomes_idle
from d2ldev_conformance.suite.memory import Held, flip_tensor

SECTION = "13.5"
SOURCE = "contract, What of a batch is split"
PAIR = ("gpu:0", "gpu:1")
two_gpus = pytest.mark.needs_gpus(2)


@requirement("split.gives-each-its-part", section=SECTION, source="D2L")
@pytest.mark.parametrize(
    ("length", "lengths"), [(4, [2, 2]), (5, [3, 2]), (1, [1, 0])], ids=["even", "odd", "one"]
)
@two_gpus
def test_each_device_gets_its_shard_in_order(backend, length, lengths):
    """Split a tensor over devices in order, the first ones a row longer."""
    data = np.arange(3 * length, dtype="float32").reshape(length, 3)
    shards = backend.split(backend.asarray(data, device="gpu:0"), PAIR)
    assert [str(backend.device_of(shard)) for shard in shards] == list(PAIR)
    assert [shard.shape[0] for shard in shards] == lengths
    assert_same(np.concatenate([backend.to_numpy(shard) for shard in shards]), data)


@requirement("split.takes-nestings", section=SECTION, source="D2L")
@two_gpus
def test_tensors_and_numpy_arrays_in_a_nesting_are_split_together(backend):
    """Split all tensors and arrays of a nesting together, and leave scalars whole."""
    batch = {
        "x": np.zeros((4, 2), "float32"),
        "rest": [backend.ones(4), backend.ones(()), "a", None],
    }
    for shard, name in zip(backend.split(batch, PAIR), PAIR, strict=True):
        first, second, *others = shard["rest"]
        assert [tuple(x.shape) for x in (shard["x"], first, second)] == [(2, 2), (2,), ()]
        assert {str(backend.device_of(x)) for x in (shard["x"], first, second)} == {name}
        assert others == ["a", None]


TEXTS = {
    "str": np.array(["a", "b", "c"]),
    "bytes": np.array([b"a", b"b", b"c"]),
    "objects": np.array(["a", "b", "c"], dtype=object),
}


@requirement("split.takes-text", section=SECTION)
@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
@two_gpus
def test_an_array_of_text_is_split_as_a_tensor(backend, text):
    """Split arrays of text like tensors.

    File names belong to their rows.
    """
    shards = backend.split({"x": backend.ones(3), "text": text}, PAIR)
    assert [shard["text"].tolist() for shard in shards] == [text[:2].tolist(), text[2:].tolist()]
    with pytest.raises(UnsupportedValueError, match="text has 3"):
        backend.split({"text": text, "x": backend.ones(4)}, PAIR)


class Field(NamedTuple):
    """A container of fields."""

    lengths: list[int]
    note: str


@requirement("split.takes-sequences", section=SECTION)
@pytest.mark.parametrize(
    ("length", "lengths"), [(5, [3, 2]), (2, [1, 1]), (1, [1, 0])], ids=["odd", "two", "one"]
)
@two_gpus
def test_a_sequence_with_an_item_for_each_example_is_split(backend, length, lengths):
    """Split a sequence that has an item for each example.

    Labels and boxes come as lists.
    """

    def images(sizes):
        return [np.full((3, size + 1, 2), size, "float32") for size in sizes]

    names, numbers = [f"name {i}" for i in range(length)], list(range(length))
    batch = {
        "x": np.zeros((length, 2), "float32"),
        "labels": numbers,
        "names": tuple(names),
        "nested": [[i, [i]] for i in numbers],
        "range": range(length),
        "queue": deque(numbers),
        "images": images(numbers),
        "fields": Field(numbers, "a note"),
        "rest": [np.zeros(length, "float32"), names, None],
        "empty": [],
        "number": 3.5,
        "nothing": None,
    }
    start = 0
    for shard, count in zip(backend.split(batch, PAIR), lengths, strict=True):
        own = numbers[start : start + count]
        assert tuple(shard["x"].shape) == (count, 2)
        assert shard["labels"] == own
        assert shard["names"] == tuple(names[start : start + count])
        assert shard["nested"] == [[i, [i]] for i in own]
        assert list(shard["range"]) == own
        assert shard["queue"] == deque(own)
        assert shard["fields"] == Field(own, "a note")
        assert tuple(shard["rest"][0].shape) == (count,)
        assert shard["rest"][1:] == [names[start : start + count], None]
        assert (shard["empty"], shard["number"], shard["nothing"]) == ([], 3.5, None)
        for image, wanted in zip(shard["images"], images(own), strict=True):
            assert_same(backend.to_numpy(image), wanted)
        start += count


@requirement("split.counts-sequences", section=SECTION)
@two_gpus
def test_sequences_alone_say_how_many_examples_there_are(backend):
    """Take the number of examples from sequences if there is no tensor.

    Images of several sizes are in a list.
    """
    images = [np.full((3, 2, 2), i, "float32") for i in range(4)]
    for (shard, labels), first in zip(
        backend.split((images, [0, 1, 2, 3]), PAIR), (0, 2), strict=True
    ):
        assert labels == [first, first + 1]
        for image, number in zip(shard, labels, strict=True):
            assert_same(backend.to_numpy(image), images[number])


@requirement("split.knows-fields", section=SECTION)
@two_gpus
def test_two_tensors_are_not_two_examples(backend):
    """Read a pair of tensors as two fields, and not as two examples.

    ``(x, y)`` is the most common batch of all.
    """
    x, y = np.zeros((2, 2), "float32"), np.zeros(2, "float32")
    numbers = x.astype("int32")
    for batch in (
        [x, y],
        (x, y),
        {"pair": (x, x), "y": y},
        {"pair": [x, y], "x": x},
        {"pair": [x, numbers], "y": y},
        {"pair": [{"a": x}, {"b": x}], "y": y},
    ):
        first, second = backend.split(batch, PAIR)
        for shard in (first, second):
            leaves = list(backend.named_tensors(shard).values())
            assert {int(each.shape[0]) for each in leaves} == {1}


@requirement("split.refuses-other-sequences", section=SECTION)
@pytest.mark.parametrize(
    "sequence",
    [[1, 2, 3], (1, 2, 3), ["a", "b", "c"], range(3), {1, 2, 3, 4}, [None], [np.ones(3)]],
    ids=["list", "tuple", "names", "range", "set", "None", "tensor"],
)
def test_a_sequence_of_another_length_is_refused(backend, sequence):
    """Refuse a sequence of another length, and name it.

    Whether it is for all parts is the caller's decision.
    """
    batch = {"x": backend.ones((4, 2)), "inner": {"odd": sequence}}
    with pytest.raises(UnsupportedValueError) as caught:
        backend.split(batch, ["cpu"])
    assert f"inner.odd is a {type(sequence).__name__} of {len(sequence)}" in str(caught.value)
    assert "the batch has 4 examples" in str(caught.value)
    assert "Broadcast(value)" in caught.value.fix


@requirement("split.refuses-what-may-be-either", section=SECTION)
@pytest.mark.parametrize("case", ["images", "beside names", "all", "of any size", "boxes"])
def test_a_list_that_may_be_fields_or_examples_is_refused(backend, case):
    """Refuse a list that may be fields or examples.

    A guess is wrong for half of the users.
    """
    images = [np.ones((3, 5, 5), "float32") for _ in range(3)]
    # Three boxes in each of three images: there may be as many classes.
    boxes = [{"box": np.ones((3, 4), "float32"), "class": np.ones(3, "int32")} for _ in range(3)]
    batch = {
        "of any size": {"images": [*images[:2], np.ones((3, 7, 6), "float32")], "y": np.ones(3)},
        "boxes": {"x": np.ones((3, 1, 8, 8), "float32"), "images": boxes},
        "images": {"images": images, "y": np.ones(3, "float32")},
        "beside names": {"images": tuple(images), "names": ["a", "b", "c"]},
        "all": {"images": images * 2, "masks": images * 2},
    }[case]
    with pytest.raises(
        UnsupportedValueError, match=r"images is a .*may be . examples, or . fields"
    ):
        backend.split(batch, ["cpu"])


@requirement("split.keeps-what-is-marked", section=SECTION)
@two_gpus
def test_broadcast_values_are_the_same_for_all_shards(backend):
    """Give each part the whole value of a ``Broadcast``.

    Class weights are the same for all rows.
    """
    sizes, table = [16, 32, 64], np.arange(6, dtype="float32").reshape(3, 2)
    batch = (np.zeros((4, 2), "float32"), Broadcast({"sizes": sizes, "table": table}))
    for (x, marked), name in zip(backend.split(batch, PAIR), PAIR, strict=True):
        assert tuple(x.shape) == (2, 2)
        assert marked["sizes"] == sizes
        assert str(backend.device_of(marked["table"])) == name
        assert_same(backend.to_numpy(marked["table"]), table)


@requirement("split.asks-for-one-length", section=SECTION)
def test_tensors_of_two_lengths_are_refused(backend):
    """Refuse tensors of two lengths, and name both.

    Cutting off the rest loses examples.
    """
    batch = {"x": backend.ones((4, 2)), "y": backend.ones(3)}
    with pytest.raises(UnsupportedValueError, match="x has 4, y has 3"):
        backend.split(batch, ["cpu"])


@requirement("split.asks-for-examples", section=SECTION)
@pytest.mark.parametrize("batch", [None, {}, 3.0], ids=["None", "empty", "number"])
def test_a_batch_without_examples_is_refused(backend, batch):
    """Refuse a batch without examples.

    There is nothing to share.
    """
    with pytest.raises(UnsupportedValueError, match="counts the examples"):
        backend.split(batch, ["cpu"])


@requirement("split.refuses-devices", section=SECTION, source="contract, Several GPUs")
@pytest.mark.parametrize(
    "devices",
    [[], "gpu:0", None, ["cpu", "cpu"], [object()]],
    ids=["none", "text", "None", "twice", "other"],
)
@pytest.mark.parametrize("method", ["split", "replicate"])
def test_an_invalid_list_of_devices_is_refused(backend, method, devices):
    """Refuse an empty, repeated or invalid list of devices.

    A device that is named twice would count its rows twice.
    """
    with pytest.raises(InvalidDeviceError):
        getattr(backend, method)(backend.ones((2, 2)), devices)


@requirement("split.needs-devices", section=SECTION, source="contract, Several GPUs")
@pytest.mark.parametrize("method", ["split", "replicate"])
def test_a_device_that_does_not_exist_is_refused(backend, missing, method):
    """Refuse a list with a device that does not exist.

    Fewer parts than asked for would be another program.
    """
    with pytest.raises(DeviceUnavailableError):
        getattr(backend, method)(backend.ones((2, 2)), ["cpu", missing])


@requirement("split.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks")
@two_gpus
def test_shards_are_computed_without_a_wait(backend):
    """Compute the shards of a batch, although nobody waits for them.

    A recorded shard keeps the whole batch in memory.
    """
    # Its shard on its own device is the last: a move would compute what was recorded before.
    x = backend.ones((4, 2), device="gpu:1")
    backend.synchronize()
    shards = backend.split({"y": np.ones(4, "float32"), "x": x}, PAIR)
    assert [becomes_idle(backend, backend.device(name)) for name in PAIR] == [True, True]
    del shards


@requirement(
    "replicate.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks"
)
@two_gpus
def test_replicas_are_computed_without_a_wait(backend):
    """Compute the copies of parameters and of a model, although nobody waits for them.

    A recorded copy sees what a step writes into the original.
    """
    # As above, the last copies are on their own device.
    obj = [backend.ones(3, device="gpu:1"), backend.mlp([2, 1], device="gpu:1")]
    backend.synchronize()
    copies = backend.replicate(obj, PAIR)
    assert [becomes_idle(backend, backend.device(name)) for name in PAIR] == [True, True]
    del copies


@requirement("replicate.copies-parameters", section=SECTION, source="D2L")
@two_gpus
def test_each_device_gets_parameters_of_its_own(backend):
    """Give each device its own copy of parameters, with ties."""
    shared = backend.ones((2, 3), device="gpu:0")
    params = {"w1": shared, "tied": shared, "b1": backend.zeros(3, device="gpu:0")}
    for copy, name in zip(backend.replicate(params, PAIR), PAIR, strict=True):
        assert set(backend.placement(copy).values()) == {backend.device(name)}
        assert copy["w1"] is copy["tied"]
        assert copy["w1"] is not shared
        assert_same(backend.to_numpy(copy["w1"]), np.ones((2, 3), "float32"))
    assert params["w1"] is shared


@requirement("replicate.copies-models", section=SECTION, source="contract, Several GPUs")
@two_gpus
def test_each_device_gets_a_model_of_its_own(backend):
    """Give each device its own copy of a model, which trains apart.

    Shared memory would add up updates of two devices.
    """
    net = backend.place(backend.mlp([2, 3, 1]), "gpu:0")
    values = read_saved_values(backend, net)
    copies = backend.replicate(net, PAIR)
    x = backend.ones((4, 2))
    predictions = [
        backend.to_numpy(copy(backend.to(x, name))) for copy, name in zip(copies, PAIR, strict=True)
    ]
    np.testing.assert_allclose(predictions[1], predictions[0], rtol=1e-6)
    learner = backend.learner(copies[0], lr=0.5)
    learner.step((backend.to(x, "gpu:0"),), backend.ones((4, 1), device="gpu:0"))
    learner.sync()
    for other, name in ((net, "gpu:0"), (copies[1], "gpu:1")):
        assert set(backend.placement(other).values()) == {backend.device(name)}
        after = read_saved_values(backend, other)
        assert list(after) == list(values)
        for key, value in values.items():
            assert_same(after[key], value)


@requirement("replicate.shares-no-memory", section=SECTION, source="contract, Several GPUs")
@pytest.mark.filterwarnings("ignore::d2ldev.D2LDevWarning")  # of what a model keeps for the host
def test_a_copy_has_memory_of_its_own(backend, sample):
    """Share no memory between an object and its copies.

    A framework's own deep copy may share it until the first write, or for ever.

    Of an optimizer, which is not copied by itself, the tensors are.
    """
    devices = backend.devices()
    obj = samples(backend)[sample](devices[-1])
    try:
        copies = backend.replicate(obj, devices)
    except UnsupportedValueError:
        obj = dict(backend.named_tensors(obj))
        copies = backend.replicate(obj, devices)
    held, saved = Held(backend, obj), backend.named_tensors(obj)
    others = {name: flip_tensor(backend, x) for name, x in saved.items()}
    backend.load_into(obj, others)
    for copy in copies:
        held.check_apart(copy)
    for copy, other in itertools.pairwise(copies):
        Held(backend, copy).check_apart(other)
