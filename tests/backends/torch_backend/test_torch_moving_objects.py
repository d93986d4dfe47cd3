"""Objects in a batch that are not containers, and move by their own method ``to(device)``."""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from d2ldev import Trainer, UnsupportedValueError, cpu, gpu


class Graph:
    """As Lightning and accelerate want it: ``to`` returns what is on the device."""

    def __init__(self, x):
        self.x = x

    def to(self, device, **_):
        return self if self.x.device == torch.device(device) else Graph(self.x.to(device))


class InPlace(Graph):
    """As PyTorch Geometric's ``Data``: moved in place."""

    def to(self, device):
        self.x = self.x.to(device)
        return self


class Forgetful(InPlace):
    """One whose author has forgotten ``return self``."""

    def to(self, device):
        super().to(device)


class Dated:
    """An object whose ``to`` takes something else."""

    def to(self, zone):
        return zone.upper()


class Encoding(UserDict):
    """As transformers' ``BatchEncoding``: a mapping with a ``to`` and an attribute of its own."""

    def __init__(self, data):
        super().__init__(data)
        self._encodings = [object()]

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError from None

    def to(self, device):
        raise AssertionError("it is a container")


class Together(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, graph):
        return self.linear(graph.x)


@dataclass
class Plain:
    x: torch.Tensor

    def to(self, device):
        raise AssertionError("it is walked, and its items can be split")


class Table:
    """As a ``tensorclass``: a dataclass that has its fields elsewhere, and both of a tensor's."""

    __dataclass_fields__ = Plain.__dataclass_fields__

    def __init__(self, kept):
        self._kept = kept

    @property
    def x(self):
        return self._kept["x"]

    def to(self, device):
        return Table({"x": self.x.to(device)})

    def clone(self):
        return Table({"x": self.x.clone()})


@pytest.fixture
def x():
    return torch.ones(4, 2)


@pytest.mark.parametrize("cls", [Graph, InPlace, Forgetful])
def test_an_object_with_to_is_moved_by_it(virtual, x, cls):
    batch = {"graph": cls(x), "y": x}
    moved = virtual.to(batch, gpu(1))
    assert type(moved["graph"]) is cls
    assert virtual.device_of(moved["graph"].x) is virtual.device_of(moved["y"]) is gpu(1)


@pytest.mark.parametrize("cls", [Graph, InPlace, Forgetful])
def test_what_says_that_it_is_there_comes_back_itself(virtual, x, cls):
    batch = {"graph": cls(x.to("vgpu:0")), "n": 1}
    assert virtual.to(batch, gpu(0)) is batch


def test_one_object_in_two_places_is_moved_once(virtual, x):
    graph = Graph(x)
    first, second = virtual.to([graph, (graph,)], gpu(0))
    assert first is second[0] is not graph


def test_a_mapping_with_to_is_a_container(virtual, x):
    batch = Encoding({"input_ids": x})
    moved = virtual.to(batch, gpu(0))
    assert virtual.device_of(moved.input_ids) is gpu(0)
    assert moved._encodings is batch._encodings
    assert batch["input_ids"] is x
    assert virtual.to(moved, gpu(0)) is moved


def test_a_packed_sequence_keeps_its_sizes_on_the_host(virtual):
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = virtual.to({"packed": packed}, gpu(0))["packed"]
    assert virtual.device_of(moved.data) is gpu(0)
    assert moved.batch_sizes.is_cpu


def test_a_to_that_takes_no_device_is_refused_by_its_place(virtual, x):
    with pytest.raises(UnsupportedValueError, match=r"Dated\.to\(.*\) at when\.0 raised Attrib"):
        virtual.to({"x": x, "when": [Dated()]}, gpu(0))


def test_nothing_in_a_batch_has_moved_when_another_value_is_refused(virtual, x):
    graph = InPlace(x)
    with pytest.raises(UnsupportedValueError, match="at other"):
        virtual.to({"graph": graph, "other": object()}, gpu(0))
    assert graph.x is x


def test_the_trainer_takes_objects(virtual, x):
    data = [(Graph(x), torch.zeros(4, 1))] * 2
    trainer = Trainer(max_epochs=2, num_gpus=1, backend=virtual)
    history = trainer.fit(Together(), data, optimizer="sgd", lr=0.1, loss="mse")
    assert history["loss"][1] < history["loss"][0]


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: [x], lambda x: {"inner": (x,)}])
def test_an_object_beside_the_items_of_a_batch_moves(virtual, keep):
    batch = UserDict(x=torch.ones(2))
    graph = Graph(torch.ones(2))
    batch.kept, batch.names = keep(graph), ["a"]
    moved = virtual.to(batch, gpu(1))
    assert moved.names is batch.names
    inner = moved.kept
    while not isinstance(inner, Graph):
        inner = inner["inner"] if isinstance(inner, dict) else inner[0]
    assert virtual.device_of(inner.x) is gpu(1)
    assert virtual.device_of(graph.x) is cpu()


def test_a_dataclass_with_to_is_walked(virtual, x):
    first, second = virtual.split({"batch": Plain(x)}, [gpu(0), gpu(1)])
    assert first["batch"].x.shape == second["batch"].x.shape == (2, 2)


def test_a_dataclass_with_both_methods_of_a_tensor_moves_by_itself(virtual, x):
    batch = {"table": Table({"x": x})}
    moved, copied = virtual.to(batch, gpu(1))["table"], virtual.copy(batch, gpu(0))["table"]
    assert (virtual.device_of(moved.x), virtual.device_of(copied.x)) == (gpu(1), gpu(0))
    assert virtual.copy(batch)["table"].x.data_ptr() != x.data_ptr()


class Rows(Mapping):
    """As a ``TensorDict``: iteration gives rows, and it has both methods of a tensor."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, key):
        return getattr(self, key)

    def __iter__(self):
        return iter(self.x)

    def __len__(self):
        return len(self.x)

    def to(self, device):
        return Rows(self.x.to(device))

    def clone(self):
        return Rows(self.x.clone())


def test_a_mapping_that_moves_by_itself_is_one_input(virtual, x):
    trainer, net = Trainer(1, num_gpus=1, backend=virtual), Together()
    y = torch.zeros(4, 1)
    assert trainer.predict(net, [Rows(x)])[0].shape == (4, 1)
    assert trainer.predict(net, [(Rows(x), y)])[0].shape == (4, 1)
    assert len(trainer.fit(net, [(Rows(x), y)])["loss"]) == 1


@pytest.mark.parametrize("size", [[], [4]], ids=["alone", "rows"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_tensordict_moves_and_is_copied(virtual, x, size, device):
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": x, "inner": {"y": x}}, size, device=device)
    moved = virtual.to({"batch": batch, "y": x}, gpu(1))["batch"]
    assert type(moved) is type(batch)
    assert {virtual.device_of(moved["x"]), virtual.device_of(moved["inner", "y"])} == {gpu(1)}
    assert moved.batch_size == batch.batch_size
    copied = virtual.copy(batch)
    assert copied["x"].data_ptr() != x.data_ptr()
    assert virtual.device_of(virtual.copy(batch, gpu(0))["x"]) is gpu(0)
    (ahead,) = virtual.prefetch([batch], gpu(0))
    assert virtual.device_of(ahead["inner", "y"]) is gpu(0)
