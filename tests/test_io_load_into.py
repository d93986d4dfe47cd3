"""A file is read into what is there: all of it, or nothing."""

import collections

import numpy as np
import pytest
from d2ldev_reference.backend import ReferenceBackend
from safetensors.numpy import save_file

from d2ldev import CheckpointError, UnsupportedValueError
from d2ldev.io.layouts import same, turned

Point = collections.namedtuple("Point", "x y")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


def values(backend, x):
    return backend.to_numpy(x).tolist()


def test_a_model_takes_over_the_values_of_a_file_where_it_is(reference, path):
    saved = reference.mlp([3, 4, 1], seed=1)
    reference.save(saved, path)
    net = reference.load_into(reference.mlp([3, 4, 1], seed=2, device="gpu:1"), path)
    assert set(reference.placement(net).values()) == {reference.devices()[2]}
    for layer, its in zip(net.layers, saved.layers, strict=True):
        assert values(reference, layer["weight"]) == values(reference, its["weight"])
    assert type(net) is type(saved)


def test_a_nesting_is_made_again_with_the_values_of_the_file(reference, path):
    reference.save({"at": [Point(reference.ones(2), np.ones(3))], "step": 7, "best": 0.5}, path)
    mine = {"at": [Point(reference.zeros(2), np.zeros(3))], "step": 0, "best": None}
    loaded = reference.load_into(mine, path)
    assert values(reference, loaded["at"][0].x) == [1, 1]
    assert type(loaded["at"][0]) is Point
    assert loaded["at"][0].y.tolist() == [1, 1, 1]
    assert (loaded["step"], loaded["best"]) == (7, 0.5)
    assert values(reference, mine["at"][0].x) == [0, 0]
    assert mine["step"] == 0


def test_a_set_of_names_is_that_of_the_file(reference, path):
    reference.save({"seen": {"a", "b"}}, path)
    assert reference.load_into({"seen": {"c"}}, path) == {"seen": {"a", "b"}}


def test_a_tie_stays_one(reference, path):
    x = reference.ones(2)
    reference.save([x, {"a": x}], path)
    y = reference.zeros(2)
    loaded = reference.load_into([y, {"a": y}], path)
    assert loaded[0] is loaded[1]["a"]


def test_what_is_not_one_tensor_here_is_not_one_afterwards(reference, path):
    x = reference.ones(2)
    reference.save([x, x], path)
    first, second = reference.load_into([reference.zeros(2), reference.zeros(2)], path)
    assert first is not second
    assert values(reference, first) == values(reference, second) == [1, 1]


def test_one_tensor_that_is_two_in_the_file_is_refused(reference, path):
    reference.save([reference.ones(2), reference.zeros(2)], path)
    x = reference.zeros(2)
    with pytest.raises(CheckpointError, match="1 is one tensor under two names"):
        reference.load_into([x, x], path)


def test_everything_that_does_not_fit_is_listed(reference, path):
    reference.save(
        {"a": reference.ones(2), "b": reference.ones(2, dtype="int32"), "more": 1, "n": 1}, path
    )
    mine = {"a": reference.zeros(3), "b": reference.zeros(2), "less": [reference.zeros(1)], "n": ""}
    with pytest.raises(CheckpointError) as caught:
        reference.load_into(mine, path)
    assert "it lacks less; it has unexpected more" in caught.value.problem
    assert "a is float32 (3,), and the file has float32 (2,)" in caught.value.problem
    assert "b is float32 (2,), and the file has int32 (2,)" in caught.value.problem
    assert "n is a str, and the file has 1, of type int" in caught.value.problem


def test_many_names_that_are_missing_are_counted(reference, path):
    reference.save({}, path)
    with pytest.raises(CheckpointError, match="x9 and 90 more"):
        reference.load_into({f"x{i}": i for i in range(100)}, path)


@pytest.mark.parametrize("other", [1, [1], {"b": 1}, None], ids=repr)
def test_another_nesting_is_refused(reference, path, other):
    reference.save(other, path)
    with pytest.raises(CheckpointError):
        reference.load_into({"a": reference.zeros(2)}, path)


def test_what_no_file_holds_is_refused(reference, path):
    reference.save([1], path)
    with pytest.raises(UnsupportedValueError, match="at 0 "):
        reference.load_into([object()], path)


class Cell:
    """A model that keeps its tensors, in which they are filled in place, or replaced."""

    def __init__(self, **tensors):
        self.tensors = tensors


class Optimizer:
    def __init__(self, steps, moment):
        self.steps, self.moment = steps, moment


@pytest.fixture
def framework(reference):
    """A backend with models that it fills in place, optimizers, and known layouts."""
    from d2ldev.placing import Part

    class Framework(ReferenceBackend):
        object_types = (Cell, Optimizer)
        refilled = True
        layouts = {}

        def _parts(self, obj):
            for name, x in getattr(obj, "tensors", {}).items():
                yield Part(name, x, lambda new, name=name: obj.tensors.__setitem__(name, new))

        def _is_refilled(self, x):
            return self.refilled

        def _refill(self, x, new):
            x._array[...] = new._array

        def _layouts(self, obj):
            return self.layouts.get(id(obj))

        def _state(self, optimizer):
            if isinstance(optimizer, Optimizer):
                return {"steps": optimizer.steps, "moment": [optimizer.moment]}
            return None

        def _state_put(self, optimizer, state):
            if state["moment"][0].shape != optimizer.moment.shape:
                raise ValueError("its moment has another shape")
            return lambda: vars(optimizer).update(steps=state["steps"], moment=state["moment"][0])

    return Framework(virtual_gpus=2)


def test_a_tensor_that_is_filled_in_place_stays_the_same_object(framework, path):
    framework.save(Cell(w=framework.ones(2)), path)
    cell = Cell(w=framework.zeros(2))
    before = cell.tensors["w"]
    assert framework.load_into(cell, path) is cell
    assert cell.tensors["w"] is before
    assert values(framework, before) == [1, 1]


def test_a_tensor_that_is_not_is_put_into_the_model(framework, path):
    framework.refilled = False
    framework.save({"net": Cell(w=framework.ones(2))}, path)
    cell = Cell(w=framework.zeros(2))
    loaded = framework.load_into({"net": cell}, path)
    assert loaded["net"] is cell
    assert values(framework, cell.tensors["w"]) == [1, 1]


def test_an_optimizer_takes_over_its_state(framework, path):
    framework.save((Cell(w=framework.ones(2)), Optimizer(5, framework.ones(3))), path)
    cell, optimizer = Cell(w=framework.zeros(2)), Optimizer(0, framework.zeros(3))
    framework.load_into((cell, optimizer), path)
    assert optimizer.steps == 5
    assert values(framework, optimizer.moment) == [1, 1, 1]
    assert values(framework, cell.tensors["w"]) == [1, 1]


def test_an_optimizer_that_refuses_its_state_leaves_the_model_alone(framework, path):
    framework.save((Cell(w=framework.ones(2)), Optimizer(5, framework.ones(3))), path)
    cell, optimizer = Cell(w=framework.zeros(2)), Optimizer(0, framework.zeros(4))
    with pytest.raises(CheckpointError, match="its moment has another shape"):
        framework.load_into((cell, optimizer), path)
    assert values(framework, cell.tensors["w"]) == [0, 0]
    assert optimizer.steps == 0


def test_a_damaged_tensor_leaves_the_others_alone(framework, path):
    framework.save(Cell(a=framework.ones(2), b=framework.ones(2)), path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    cell = Cell(a=framework.zeros(2), b=framework.zeros(2))
    with pytest.raises(CheckpointError, match="damaged"):
        framework.load_into(cell, path)
    assert values(framework, cell.tensors["a"]) == [0, 0]


def test_a_model_lists_its_names(framework, path):
    framework.save({"net": Cell(a=framework.ones(2), b=framework.ones(2))}, path)
    with pytest.raises(CheckpointError, match=r"it lacks net\.c; it has unexpected net\.b;"):
        framework.load_into({"net": Cell(a=framework.ones(2), c=framework.ones(2))}, path)


def test_a_foreign_file_is_read_into_a_model_by_its_names(framework, path):
    save_file({"w": np.ones(2, "float32"), "b": np.ones(1, "float32")}, path)
    cell = Cell(b=framework.zeros(1), w=framework.zeros(2))
    framework.load_into(cell, path)
    assert values(framework, cell.tensors["w"]) == [1, 1]


def test_a_foreign_file_is_read_into_a_pytree_by_its_dotted_names(reference, path):
    save_file({"layers.0.w": np.ones(2, "float32")}, path)
    loaded = reference.load_into({"layers": [{"w": reference.zeros(2)}]}, path)
    assert values(reference, loaded["layers"][0]["w"]) == [1, 1]


@pytest.fixture
def turned_file(framework, path):
    """A dense layer of a framework that has its kernel the other way round."""
    kernel = framework.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    net = Cell(kernel=kernel, extra=framework.ones(2))
    framework.layouts[id(net)] = {
        "kernel": turned("0.weight", (3, 2)),
        "extra": same("0.bias", (2,)),
    }
    framework.save(net, path)
    return path


def test_a_kernel_is_turned_where_the_layouts_of_both_are_known(framework, turned_file):
    net = Cell(weight=framework.zeros((2, 3)), bias=framework.zeros(2))
    framework.layouts[id(net)] = {
        "weight": same("0.weight", (2, 3)),
        "bias": same("0.bias", (2,)),
    }
    framework.load_into(net, turned_file)
    assert values(framework, net.tensors["weight"]) == [[1, 3, 5], [2, 4, 6]]
    assert values(framework, net.tensors["bias"]) == [1, 1]


def test_a_kernel_of_another_layer_size_is_refused(framework, turned_file):
    net = Cell(weight=framework.zeros((3, 2)), bias=framework.zeros(2))
    framework.layouts[id(net)] = {
        "weight": same("0.weight", (3, 2)),
        "bias": same("0.bias", (2,)),
    }
    with pytest.raises(CheckpointError, match=r"weight is float32 \(3, 2\)"):
        framework.load_into(net, turned_file)


def test_without_known_layouts_the_names_have_to_be_the_same(framework, turned_file):
    net = Cell(weight=framework.zeros((2, 3)), bias=framework.zeros(2))
    with pytest.raises(CheckpointError, match="it lacks weight, bias; it has unexpected"):
        framework.load_into(net, turned_file)


def test_arrays_are_read_by_their_dotted_names_too(reference, path):
    save_file({"at.0": np.ones(2, "float32"), "b": np.ones(1)}, path)
    mine = {"at": [reference.zeros(2)], "b": np.zeros(1), "n": 3, "s": np.float32(1)}
    loaded = reference.load_into(mine, path)
    assert values(reference, loaded["at"][0]) == [1, 1]
    assert loaded["b"].tolist() == [1]
    assert (loaded["n"], loaded["s"]) == (3, 1)
    assert mine["b"].tolist() == [0]
