"""A file is read into models and optimizers: in place, by names, with kernels that are turned."""

from functools import partial

import numpy as np
import pytest
from hostile_files import DATA, entry, file_of, row, tell
from reference_backend import ReferenceFiles, ReferenceFramework, ReferenceModels
from safetensors.numpy import save_file
from saved_files import values

from d2ldev import Backend, CheckpointError
from d2ldev.framework import Layer, Slot, same, turn
from d2ldev.framework.testing import framework_of
from d2ldev.operations.inventory import Search


class Cell:
    """A model that keeps its tensors, in which they are filled in place, or replaced."""

    def __init__(self, **tensors):
        self.tensors = tensors


class Optimizer:
    def __init__(self, steps, moment):
        self.steps, self.moment = steps, moment


class CellModels(ReferenceModels):
    """Models that are filled in place."""

    types = (Cell, Optimizer)
    refilled = True

    def __init__(self):
        self.finished = []

    def members(self, obj):
        for name, x in getattr(obj, "tensors", {}).items():
            yield Slot(name, x, partial(obj.tensors.__setitem__, name))

    def find_refill(self, x):
        def refill(new):
            x._array[...] = new._array

        return refill if self.refilled else None

    def finish(self, obj):
        self.finished.append(obj)


class CellFiles(ReferenceFiles):
    """Optimizers, and models that are known to be one dense layer."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.layers_of = {}

    def layers(self, model):
        return self.layers_of.get(id(model))

    def state(self, optimizer):
        if isinstance(optimizer, Optimizer):
            return {"steps": optimizer.steps, "moment": [optimizer.moment]}
        return None

    def prepare_state(self, optimizer, state):
        if state["moment"][0].shape != optimizer.moment.shape:
            raise ValueError("its moment has another shape")
        return lambda: vars(optimizer).update(steps=state["steps"], moment=state["moment"][0])


class CellFramework(ReferenceFramework):
    name = "cells"

    def __init__(self):
        super().__init__(virtual_gpus=2)
        self.models = CellModels()
        self.files = CellFiles(self.tensors)


@pytest.fixture
def framework():
    """A backend with models that it fills in place, optimizers, and known layouts."""
    return Backend(CellFramework())


def know_layers(backend, net, layout):
    """Let the framework know a model as one dense layer, its weight of this layout."""
    weight, bias = (*net.tensors.values(), None)[:2]
    framework_of(backend).files.layers_of[id(net)] = [Layer(weight, bias, layout)]


def test_a_tensor_that_is_filled_in_place_stays_the_same_object(framework, path):
    framework.save(Cell(w=framework.ones(2)), path)
    cell = Cell(w=framework.zeros(2))
    before = cell.tensors["w"]
    assert framework.load_into(cell, path) is cell
    assert cell.tensors["w"] is before
    assert values(framework, before) == [1, 1]


def test_load_into_tells_a_model_that_it_was_read_into(framework, path):
    framework.save([Cell(w=framework.ones(2))], path)
    cell = Cell(w=framework.zeros(2))
    framework.load_into([cell], path)
    assert framework_of(framework).models.finished == [cell]


def test_a_state_of_a_dtype_that_the_framework_lacks_is_refused(framework, path):
    header = tell(
        root={"at": 1},
        containers=[
            row("list", [{"tensor": 0}]),
            row("state", [1, {"at": 0}], ["steps", "moment"]),
        ],
        tensors=[["x", "bfloat16", None]],
    )
    header["x"] = entry("BF16", (2,))
    path.write_bytes(file_of(header, DATA))
    optimizer = Optimizer(0, framework.zeros(2))
    with pytest.raises(CheckpointError, match="'x' is of bfloat16, which cells does not have"):
        framework.load_into(optimizer, path)
    assert optimizer.steps == 0


def test_a_layout_that_lies_about_its_tensor_is_refused(framework, path):
    layout = ["0.weight", [2, 3], [1, 0], [3, 2]]
    model = row("model", [{"tensor": 0}], ["x"], layouts={"x": layout})
    path.write_bytes(file_of(tell(root={"at": 0}, containers=[model]), DATA))
    net = Cell(w=framework.zeros((3, 2)))
    know_layers(framework, net, same)
    with pytest.raises(CheckpointError, match=r"w is float32 \(3, 2\), and the file has float32"):
        framework.load_into(net, path)


@pytest.mark.parametrize(
    "layout",
    [
        *([[1], [1], [1]], [[1], [], [1]], [[-2, -2], [0, 1], [1]], [[1, 1], [0, 0], [1]]),
        [[0, 10**400], [0, 1], [1]],
        [[1] * 99, list(range(99)), [1]],
    ],
    ids=lambda layout: str(layout)[:20],
)
def test_a_layout_that_no_tensor_has_is_refused(framework, path, layout):
    model = row("model", [{"tensor": 0}], ["x"], layouts={"x": ["0.weight", *layout]})
    path.write_bytes(file_of(tell(root={"at": 0}, containers=[model]), DATA))
    net = Cell(w=framework.ones(1))
    know_layers(framework, net, same)
    with pytest.raises(CheckpointError, match="a layout of its tensor 'x' is damaged"):
        framework.load_into(net, path)
    assert values(framework, net.tensors["w"]) == [1]


def test_a_tensor_that_is_not_refilled_is_replaced_in_the_model(framework, path):
    framework_of(framework).models.refilled = False
    framework.save({"net": Cell(w=framework.ones(2))}, path)
    cell = Cell(w=framework.zeros(2))
    loaded = framework.load_into({"net": cell}, path)
    assert loaded["net"] is cell
    assert values(framework, cell.tensors["w"]) == [1, 1]


def test_a_list_that_a_model_has_twice_stays_one_list(framework, path):
    framework_of(framework).models.refilled = False
    ones, zeros = [framework.ones(2)], [framework.zeros(2)]
    framework.save(Cell(a=ones, b=ones), path)
    cell = framework.load_into(Cell(a=zeros, b=zeros), path)
    assert cell.tensors["a"] is cell.tensors["b"]
    assert values(framework, cell.tensors["a"][0]) == [1, 1]


@pytest.mark.parametrize("name", ["a", "b.0"])
def test_one_tensor_filled_in_place_is_read_under_whichever_name_the_file_has(
    framework, path, name
):
    save_file({name: np.ones(2, "float32")}, path)
    x = framework.zeros(2)
    assert framework.load_into({"a": x, "b": [x]}, path)["b"][0] is x
    assert values(framework, x) == [1, 1]


def test_one_tensor_filled_in_place_that_is_two_equal_ones_in_the_file_is_read(framework, path):
    nans = framework.asarray(np.array([1, np.nan], "float32"))
    framework.save([nans, framework.copy(nans)], path)
    x = framework.zeros(2)
    framework.load_into([x, x], path)
    np.testing.assert_array_equal(values(framework, x), [1, np.nan])


def test_one_tensor_filled_in_place_that_differs_from_itself_in_the_file_is_refused(
    framework, path
):
    framework.save([framework.zeros(2), -framework.zeros(2)], path)
    x = framework.ones(2)
    with pytest.raises(CheckpointError, match="0 and 1 are one tensor here, and the file has two"):
        framework.load_into([x, x], path)
    assert values(framework, x) == [1, 1]


def test_one_model_that_is_two_in_the_file_is_refused(framework, path):
    framework_of(framework).models.refilled = False
    framework.save([Cell(w=framework.ones(2)), Cell(w=framework.zeros(2))], path)
    cell = Cell(w=framework.zeros(2))
    with pytest.raises(CheckpointError, match=r"0\.w and 1\.w are one tensor here"):
        framework.load_into([cell, cell], path)


@pytest.mark.parametrize("refilled", [False, True])
@pytest.mark.parametrize("names", [["a"], ["b"], ["a", "b"], ["a.self.self", "b.self"]], ids=str)
def test_one_model_is_read_under_whichever_of_its_names_are_there(framework, names, refilled):
    framework_of(framework).models.refilled = refilled
    cell = Cell(w=framework.zeros(2))
    cell.tensors["self"] = cell
    given = {f"{name}.w": np.ones(2, "float32") for name in names}
    result = framework.load_into({"a": cell, "b": cell}, given, strict=False)
    assert result.matched == list(dict.fromkeys(["a.w", *given]))
    assert (result.missing, result.unexpected) == ([], [])
    assert values(framework, cell.tensors["w"]) == [1, 1]


@pytest.mark.parametrize("refilled", [False, True])
def test_one_model_whose_values_differ_under_its_names_is_refused(framework, refilled):
    framework_of(framework).models.refilled = refilled
    cell = Cell(w=framework.zeros(2))
    given = {"a.w": np.ones(2, "float32"), "b.w": np.zeros(2, "float32")}
    with pytest.raises(CheckpointError, match=r"a\.w and b\.w are one tensor here"):
        framework.load_into({"a": cell, "b": cell}, given)
    assert values(framework, cell.tensors["w"]) == [0, 0]


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


@pytest.fixture
def turned_file(framework, path):
    """A dense layer of a framework that has its kernel the other way round."""
    kernel = framework.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    net = Cell(kernel=kernel, extra=framework.ones(2))
    know_layers(framework, net, turn)
    framework.save(net, path)
    return path


def test_a_kernel_is_turned_where_the_layouts_of_both_are_known(framework, turned_file):
    net = Cell(weight=framework.zeros((2, 3)), bias=framework.zeros(2))
    know_layers(framework, net, same)
    framework.load_into(net, turned_file)
    assert values(framework, net.tensors["weight"]) == [[1, 3, 5], [2, 4, 6]]
    assert values(framework, net.tensors["bias"]) == [1, 1]


def test_a_kernel_of_another_layer_size_is_refused(framework, turned_file):
    net = Cell(weight=framework.zeros((3, 2)), bias=framework.zeros(2))
    know_layers(framework, net, same)
    with pytest.raises(CheckpointError, match=r"weight is float32 \(3, 2\)"):
        framework.load_into(net, turned_file)


def test_without_known_layouts_the_names_have_to_be_the_same(framework, turned_file):
    net = Cell(weight=framework.zeros((2, 3)), bias=framework.zeros(2))
    with pytest.raises(CheckpointError, match="it lacks weight, bias; it has unexpected"):
        framework.load_into(net, turned_file)


def test_a_missing_tensor_with_two_names_is_named_once(framework):
    x = framework.zeros(2)
    loaded = framework.load_into(Cell(first=x, second=x), {}, strict=False)
    assert loaded.missing == ["first"]
    with pytest.raises(CheckpointError, match="it lacks first; it has unexpected other"):
        framework.load_into(Cell(first=x, second=x), {"other": np.ones(2, "float32")})


def test_models_and_optimizers_that_were_read_are_listed(framework, path):
    framework.save({"net": Cell(a=framework.ones(2)), "o": Optimizer(5, framework.ones(3))}, path)
    mine = {"net": Cell(a=framework.zeros(2), b=framework.zeros(2)), "p": framework.zeros(1)}
    mine["o"] = Optimizer(0, framework.zeros(3))
    loaded = framework.load_into(mine, path, strict=False)
    assert (loaded.matched, loaded.missing) == (["net.a", "o"], ["net.b", "p"])
    assert mine["o"].steps == 5
    assert values(framework, mine["net"].tensors["a"]) == [1, 1]


def test_a_model_is_looked_through_once_in_a_call(framework, path, monkeypatch):
    net = Cell(weight=framework.zeros((2, 3)), bias=framework.zeros(2))
    know_layers(framework, net, same)
    searched, search = [], Search.__init__

    def record(self, framework, obj, *args, **options):
        searched.append(obj)
        search(self, framework, obj, *args, **options)

    monkeypatch.setattr(Search, "__init__", record)
    framework.save({"net": net}, path)
    assert searched == [net]
    framework.load_into({"net": net}, path)
    assert searched == [net, net]


def test_names_that_are_equal_when_shortened_are_distinguished(framework, path):
    saved = {"a.b": framework.ones(1), "a": {"b": framework.zeros(1)}, 1: 3, "1": 4}
    framework.save(saved, path)
    mine = {"a.b": framework.full(1, 5.0), "a": {"b": framework.full(1, 5.0)}, 1: 0, "1": 0}
    loaded = framework.load_into(mine, path)
    assert values(framework, loaded["a.b"]) == [1]
    assert values(framework, loaded["a"]["b"]) == [0]
    assert (loaded[1], loaded["1"]) == (3, 4)
