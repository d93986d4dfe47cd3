"""What an author writes: seven modules, what may be left out, and what is declared as missing."""

import gc
import importlib.util
import weakref

import pytest
from reference_backend import ReferenceDevices, ReferenceFramework, ReferenceTensors

from d2ldev import Backend, UnsupportedValueError
from d2ldev.errors import NotBegunError
from d2ldev.framework import Files, Framework
from d2ldev.framework.testing import framework_of
from d2ldev.nesting.kinds import PLAIN

BUILT_IN = ("torch", "jax", "tensorflow", "mxnet", "reference")
MODULES = ("devices", "tensors", "models", "files", "training", "strict", "parallel", "provision")


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_backend_has_the_same_modules(name, module):
    assert importlib.util.find_spec(f"d2ldev_{name}.{module}") is not None


def test_a_framework_that_is_dropped_is_freed():
    framework = ReferenceFramework()
    assert framework.state.kinds[int] is PLAIN
    kept = weakref.ref(framework)
    del framework
    gc.collect()
    assert kept() is None


# -- what it says that it cannot do -----------------------------------------------------------


class Unable(ReferenceFramework):
    cannot = {
        "mlp": "it has no dense layers",
        "dlpack": "its memory is compressed",
        "train": "it has no gradients",
    }


CALLS = {
    "mlp": ("mlp", lambda b: b.mlp([2, 1])),
    "from_dlpack": ("dlpack", lambda b: b.from_dlpack(b.ones(1))),
    "learner": ("train", lambda b: b.learner(object())),
    "accuracy": ("train", lambda b: b.accuracy(b.ones((2, 3)), b.zeros(2, dtype="int32"))),
}


@pytest.mark.parametrize(("ability", "call"), CALLS.values(), ids=CALLS.keys())
def test_a_missing_ability_is_an_error_with_its_reason(ability, call):
    with pytest.raises(UnsupportedValueError) as caught:
        call(Backend(Unable()))
    reason = Unable.cannot[ability]
    assert caught.value.problem == f"the reference backend cannot {ability}: {reason}"
    assert caught.value.fix == "use another backend for it: D2LDEV_BACKEND=torch"


def test_abilities_that_cannot_does_not_name_are_available():
    backend = Backend(Unable())
    assert backend.device_of(backend.to(backend.ones(1), "gpu:1")) == backend.gpu(1)


# -- what it leaves out -----------------------------------------------------------------------


class Small(Framework):
    """Devices and tensors: what has to be written."""

    name = "small"
    distributions = ()

    def __init__(self):
        super().__init__()
        self.devices, self.tensors = ReferenceDevices(2), ReferenceTensors()
        self.files = Files(self.tensors)


@pytest.fixture
def small():
    return Backend(Small())


def test_with_two_modules_tensors_are_made_moved_and_saved(small, path):
    x = small.to({"x": small.full(2, 3.0)}, "gpu:1")
    small.save(x, path)
    assert small.to_numpy(small.load(path)["x"]).tolist() == [3, 3]
    assert small.placement(small.place(x, "gpu:0")) == {"x": small.gpu(0)}


def test_with_two_modules_a_block_and_strict_are_there(small):
    with small.on("gpu:1"), small.strict():
        assert small.device_of(small.ones(1)) is small.gpu(1)


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda b: b.mlp([2, 1]), "Models.mlp"),
        (lambda b: b.learner(object()), "Training.learner"),
        (
            lambda b: b.accuracy(b.ones((2, 3)), b.zeros(2, dtype="int32")),
            "Training.accuracy",
        ),
    ],
    ids=["mlp", "learner", "accuracy"],
)
def test_a_missing_area_is_an_error_that_names_the_method_to_write(small, call, method):
    with pytest.raises(NotBegunError, match="use another backend") as caught:
        call(small)
    assert caught.value.method == method
    assert caught.value.problem == f"the backend has no {method} yet"


def test_an_optimizer_that_takes_no_state_says_so(small):
    with pytest.raises(UnsupportedValueError, match="a dict takes no state"):
        framework_of(small).files.prepare_state({}, {})


def test_an_author_of_a_backend_has_seven_methods_of_files_to_know():
    methods = [x for name, x in vars(Files).items() if callable(x) and not name.startswith("_")]
    assert len(methods) == 7


def test_a_framework_has_what_its_author_writes_and_the_state_of_the_core():
    names = {
        "interface",
        "name",
        "distributions",
        "max_virtual_gpus",
        "virtual_gpus",
        "as_cuda",
        "cannot",
        "state",
    }
    areas = {each for each in MODULES if each != "provision"}
    found = {*dir(Small()), *Framework.__annotations__}
    assert {name for name in found if not name.startswith("_")} == names | areas
    documented = Framework.__doc__.partition("Attributes:")[2].partition("Raises:")[0]
    assert {name for name in names | areas if name not in documented} == set()
