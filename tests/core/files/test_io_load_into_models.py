"""A file is read into models and optimizers: in place, by names, with kernels that are turned."""

import numpy as np
import pytest
from d2ldev_reference import ReferenceFramework
from d2ldev_reference.files import ReferenceFiles
from hostile_files import DATA, entry, file_of, row, told
from safetensors.numpy import save_file
from saved_files import values

from d2ldev import Backend, CheckpointError
from d2ldev.framework import Layer, Models, Part
from d2ldev.framework.files import turned


class Cell:
    """A model that keeps its tensors, in which they are filled in place, or replaced."""

    def __init__(self, **tensors):
        self.tensors = tensors


class Optimizer:
    def __init__(self, steps, moment):
        self.steps, self.moment = steps, moment


class CellModels(Models):
    """Models whose tensors are filled in place, or not."""

    types = (Cell, Optimizer)

    def __init__(self):
        self.refilled, self.finished = True, []

    def parts(self, obj):
        for name, x in getattr(obj, "tensors", {}).items():
            yield Part(name, x, lambda new, name=name: obj.tensors.__setitem__(name, new))

    def is_refilled(self, x):
        return self.refilled

    def refill(self, x, new):
        x._array[...] = new._array

    def finish(self, obj):
        self.finished.append(obj)


class CellFiles(ReferenceFiles):
    """Layers that a test makes known, and states of optimizers."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.known = {}

    def layers(self, model):
        return self.known.get(id(model))

    def state(self, optimizer):
        if isinstance(optimizer, Optimizer):
            return {"steps": optimizer.steps, "moment": [optimizer.moment]}
        return None

    def checked_state(self, optimizer, state):
        if state["moment"][0].shape != optimizer.moment.shape:
            raise ValueError("its moment has another shape")
        return lambda: vars(optimizer).update(steps=state["steps"], moment=state["moment"][0])


class CellFramework(ReferenceFramework):
    name = "framework"

    def __init__(self):
        super().__init__()
        self.models, self.files = CellModels(), CellFiles(self.tensors)


@pytest.fixture
def backend():
    """A backend with models that it fills in place, optimizers, and known layers."""
    return Backend(CellFramework())


def test_a_tensor_that_is_filled_in_place_stays_the_same_object(backend, path):
    backend.save(Cell(w=backend.ones(2)), path)
    cell = Cell(w=backend.zeros(2))
    before = cell.tensors["w"]
    assert backend.load_into(cell, path) is cell
    assert cell.tensors["w"] is before
    assert values(backend, before) == [1, 1]


def test_a_model_is_told_that_it_was_read_into(backend, path):
    backend.save([Cell(w=backend.ones(2))], path)
    cell = Cell(w=backend.zeros(2))
    backend.load_into([cell], path)
    assert backend.framework.models.finished == [cell]


def test_a_state_of_a_dtype_that_the_framework_lacks_is_refused(backend, path):
    header = told(
        root={"at": 1},
        containers=[
            row("list", [{"tensor": 0}]),
            row("state", [1, {"at": 0}], ["steps", "moment"]),
        ],
        tensors=[["x", "bfloat16", None]],
    )
    header["x"] = entry("BF16", (2,))
    path.write_bytes(file_of(header, DATA))
    optimizer = Optimizer(0, backend.zeros(2))
    with pytest.raises(CheckpointError, match="'x' is of bfloat16, which framework has not"):
        backend.load_into(optimizer, path)
    assert optimizer.steps == 0


def test_a_layout_that_lies_about_its_tensor_is_refused(backend, path):
    layout = ["0.weight", [2, 3], [1, 0], [3, 2]]
    model = row("model", [{"tensor": 0}], ["x"], layouts={"x": layout})
    path.write_bytes(file_of(told(root={"at": 0}, containers=[model]), DATA))
    net = Cell(w=backend.zeros((3, 2)))
    backend.framework.files.known[id(net)] = [Layer(net.tensors["w"], None)]
    with pytest.raises(CheckpointError, match=r"w is float32 \(3, 2\), and the file has float32"):
        backend.load_into(net, path)


def test_a_tensor_that_is_not_is_put_into_the_model(backend, path):
    backend.framework.models.refilled = False
    backend.save({"net": Cell(w=backend.ones(2))}, path)
    cell = Cell(w=backend.zeros(2))
    loaded = backend.load_into({"net": cell}, path)
    assert loaded["net"] is cell
    assert values(backend, cell.tensors["w"]) == [1, 1]


def test_an_optimizer_takes_over_its_state(backend, path):
    backend.save((Cell(w=backend.ones(2)), Optimizer(5, backend.ones(3))), path)
    cell, optimizer = Cell(w=backend.zeros(2)), Optimizer(0, backend.zeros(3))
    backend.load_into((cell, optimizer), path)
    assert optimizer.steps == 5
    assert values(backend, optimizer.moment) == [1, 1, 1]
    assert values(backend, cell.tensors["w"]) == [1, 1]


def test_an_optimizer_that_refuses_its_state_leaves_the_model_alone(backend, path):
    backend.save((Cell(w=backend.ones(2)), Optimizer(5, backend.ones(3))), path)
    cell, optimizer = Cell(w=backend.zeros(2)), Optimizer(0, backend.zeros(4))
    with pytest.raises(CheckpointError, match="its moment has another shape"):
        backend.load_into((cell, optimizer), path)
    assert values(backend, cell.tensors["w"]) == [0, 0]
    assert optimizer.steps == 0


def test_a_damaged_tensor_leaves_the_others_alone(backend, path):
    backend.save(Cell(a=backend.ones(2), b=backend.ones(2)), path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    cell = Cell(a=backend.zeros(2), b=backend.zeros(2))
    with pytest.raises(CheckpointError, match="damaged"):
        backend.load_into(cell, path)
    assert values(backend, cell.tensors["a"]) == [0, 0]


def test_a_model_lists_its_names(backend, path):
    backend.save({"net": Cell(a=backend.ones(2), b=backend.ones(2))}, path)
    with pytest.raises(CheckpointError, match=r"it lacks net\.c; it has unexpected net\.b;"):
        backend.load_into({"net": Cell(a=backend.ones(2), c=backend.ones(2))}, path)


def test_a_foreign_file_is_read_into_a_model_by_its_names(backend, path):
    save_file({"w": np.ones(2, "float32"), "b": np.ones(1, "float32")}, path)
    cell = Cell(b=backend.zeros(1), w=backend.zeros(2))
    backend.load_into(cell, path)
    assert values(backend, cell.tensors["w"]) == [1, 1]


@pytest.fixture
def turned_file(backend, path):
    """A dense layer of a framework that has its kernel the other way round."""
    kernel = backend.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    net = Cell(kernel=kernel, extra=backend.ones(2))
    layer = Layer(kernel, net.tensors["extra"], turned)
    backend.framework.files.known[id(net)] = [layer]
    backend.save(net, path)
    return path


def test_a_kernel_is_turned_where_the_layouts_of_both_are_known(backend, turned_file):
    net = Cell(weight=backend.zeros((2, 3)), bias=backend.zeros(2))
    backend.framework.files.known[id(net)] = [Layer(net.tensors["weight"], net.tensors["bias"])]
    backend.load_into(net, turned_file)
    assert values(backend, net.tensors["weight"]) == [[1, 3, 5], [2, 4, 6]]
    assert values(backend, net.tensors["bias"]) == [1, 1]


def test_a_kernel_of_another_layer_size_is_refused(backend, turned_file):
    net = Cell(weight=backend.zeros((3, 2)), bias=backend.zeros(2))
    backend.framework.files.known[id(net)] = [Layer(net.tensors["weight"], net.tensors["bias"])]
    with pytest.raises(CheckpointError, match=r"weight is float32 \(3, 2\)"):
        backend.load_into(net, turned_file)


def test_without_known_layouts_the_names_have_to_be_the_same(backend, turned_file):
    net = Cell(weight=backend.zeros((2, 3)), bias=backend.zeros(2))
    with pytest.raises(CheckpointError, match="it lacks weight, bias; it has unexpected"):
        backend.load_into(net, turned_file)
