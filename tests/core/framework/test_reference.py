"""What the reference backend adds to array-api-strict, and what it leaves alone."""

import array_api_strict as xp
import numpy as np
import pytest
from sequences import assert_the_loss_is_the_mean_over_all_labels

import d2ldev
from d2ldev import CheckpointError, UnsupportedValueError, cpu, gpu

DEVICES = ["cpu", "gpu:0", "gpu:1"]
FLOATS = {
    "zeros": lambda b, **kw: b.zeros((2,), **kw),
    "ones": lambda b, **kw: b.ones((2,), **kw),
    "full": lambda b, **kw: b.full((2,), 0.5, **kw),
    "arange": lambda b, **kw: b.arange(0.0, 2.0, **kw),
    "rand": lambda b, **kw: b.rand((2,), **kw),
    "randn": lambda b, **kw: b.randn((2,), **kw),
    "asarray of a number": lambda b, **kw: b.asarray(0.5, **kw),
    "asarray of a list": lambda b, **kw: b.asarray([0.5], **kw),
}


# -- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "native"), [(cpu(), "CPU_DEVICE"), (gpu(0), "device1"), (gpu(1), "device2")]
)
def test_its_devices_are_array_api_strict_s_own(reference, device, native):
    assert reference.native(device) == xp.Device(native)
    assert reference.device(xp.Device(native)) is device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS.keys())
def test_a_tensor_is_made_on_the_device(reference, make, device):
    assert str(reference.device_of(make(reference, device=device))) == device


def test_tensors_of_two_devices_do_not_mix(reference):
    with pytest.raises(ValueError, match=r"device1.*device2|device2.*device1"):
        reference.ones(2, device="gpu:0") + reference.ones(2, device="gpu:1")


def test_the_default_device_is_array_api_strict_s(reference):
    with gpu(1):
        assert reference.default_device() is cpu()


# -- dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS.keys())
def test_the_default_float_is_float32_on_every_device(reference, make, device):
    assert reference.dtype_of(make(reference, device=device)) == "float32"


@pytest.mark.parametrize("device", DEVICES)
def test_numpy_s_dtype_is_kept(reference, device):
    x = reference.asarray(np.ones(2, "int16"), device=device)
    assert reference.dtype_of(x) == "int16"


def test_numpy_s_float64_is_kept(reference):
    assert reference.dtype_of(reference.asarray(np.ones(2))) == "float64"


@pytest.mark.parametrize("name", d2ldev.get_backend("reference").dtype_names)
def test_every_dtype_can_be_made_moved_and_brought_back(reference, name):
    x = reference.to(reference.ones((2,), dtype=name, device="gpu:0"), "gpu:1")
    array = reference.to_numpy(x)
    assert (reference.dtype_of(x), array.dtype.name, array.tolist()) == (name, name, [1, 1])


@pytest.mark.parametrize("name", d2ldev.get_backend("reference").dtype_names)
def test_a_dtype_may_be_a_name_its_own_or_numpy_s(reference, name):
    own = getattr(xp, name)
    assert [reference.dtype(spec) for spec in (name, own, np.dtype(name))] == [own] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "object", "", None, 1, np.dtype("U3")])
def test_what_is_no_dtype_is_refused(reference, dtype):
    with pytest.raises(UnsupportedValueError, match="reference has no such dtype"):
        reference.dtype(dtype)


# -- memory -----------------------------------------------------------------------------------


def test_from_dlpack_shares_memory_with_numpy(reference):
    array = np.zeros(3)
    x = reference.from_dlpack(array)
    array[0] = 7
    assert reference.to_numpy(x).tolist() == [7, 0, 0]


def test_asarray_does_not_share_memory_with_numpy(reference):
    array = np.zeros(3)
    x = reference.asarray(array)
    array[0] = 7
    assert reference.to_numpy(x).tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_to_numpy_gives_an_array_of_its_own(reference, device):
    x = reference.zeros(3, device=device)
    reference.to_numpy(x)[0] = 7
    assert reference.to_numpy(x).tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_has_memory_of_its_own(reference, device):
    x = reference.zeros(3)
    y = reference.copy(x, device)
    y[0] = 7.0
    assert reference.to_numpy(x).tolist() == [0, 0, 0]


# -- random numbers ---------------------------------------------------------------------------


@pytest.fixture
def numpy_state():
    """NumPy's random state, which is as it was afterwards."""
    state = np.random.get_state()
    yield lambda: np.random.get_state()[1:3]
    np.random.set_state(state)


@pytest.mark.parametrize("method", ["rand", "randn"])
def test_with_a_seed_numpy_s_random_state_is_not_changed(reference, numpy_state, method):
    keys, position = numpy_state()
    getattr(reference, method)((5,), seed=1)
    assert (numpy_state()[0] == keys).all()
    assert numpy_state()[1] == position


@pytest.mark.parametrize("method", ["rand", "randn"])
def test_with_a_seed_numpy_s_random_state_is_not_read(reference, numpy_state, method):
    np.random.seed(1)
    first = reference.to_numpy(getattr(reference, method)((5,), seed=3))
    np.random.seed(2)
    second = reference.to_numpy(getattr(reference, method)((5,), seed=3))
    assert (first == second).all()


@pytest.mark.parametrize("method", ["rand", "randn"])
def test_without_a_seed_numpy_s_random_state_is_used(reference, numpy_state, method):
    np.random.seed(1)
    first = reference.to_numpy(getattr(reference, method)((5,)))
    np.random.seed(1)
    second = reference.to_numpy(getattr(reference, method)((5,)))
    third = reference.to_numpy(getattr(reference, method)((5,)))
    assert (first == second).all()
    assert (second != third).all()


def test_the_initial_parameters_of_a_model_leave_numpy_s_random_state_alone(reference, numpy_state):
    keys, position = numpy_state()
    reference.mlp([3, 4, 1], seed=1)
    assert (numpy_state()[0] == keys).all()
    assert numpy_state()[1] == position


# -- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_runs_where_it_was_made(reference, device):
    net = reference.mlp([3, 4, 2], device=device)
    y = net(reference.ones((5, 3), device=device))
    assert (y.shape, str(reference.device_of(y))) == ((5, 2), device)


def test_a_model_that_is_placed_runs_there_and_the_old_one_stays(reference):
    net = reference.mlp([3, 4, 2])
    placed = reference.place(net, "gpu:1")
    assert set(reference.placement(placed).values()) == {gpu(1)}
    assert set(reference.placement(net).values()) == {cpu()}


def test_a_model_computes_the_same_on_every_device(reference):
    net = reference.mlp([3, 4, 2])
    data = np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3)
    expected = reference.to_numpy(net(reference.asarray(data)))
    placed = reference.place(net, "gpu:1")
    y = placed(reference.asarray(data, device="gpu:1"))
    assert (reference.to_numpy(y) == expected).all()


# -- the machine ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_there_is_nothing_to_wait_for(reference, device):
    reference.synchronize(device)
    assert reference.is_idle(device)


@pytest.mark.parametrize("device", DEVICES)
def test_it_cannot_say_how_much_memory_there_is(reference, device):
    assert reference.memory(device) == (None, None, None)


def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(reference):
    net = reference.mlp([2, 3])
    assert_the_loss_is_the_mean_over_all_labels(reference, net)


def trained(reference, sizes=(2, 1)):
    learner = reference.learner(reference.mlp([*sizes]), optimizer="adam", lr=0.1)
    learner.step((reference.ones((4, 2)),), reference.ones((4, sizes[-1])))
    return learner


def test_a_learner_goes_on_from_a_state(reference):
    first, second = (
        trained(reference),
        reference.learner(reference.mlp([2, 1]), optimizer="adam", lr=0.1),
    )
    second.restore(first.state())
    batch = (reference.ones((4, 2)),), reference.ones((4, 1))
    assert float(second.step(*batch)[0]) == float(first.step(*batch)[0])


BROKEN = {
    "none": (lambda state: None, "NoneType, is none of a learner of reference"),
    "of another framework's learner": (
        lambda state: {"model": {}, "optimizer": {}, "random": {}},
        "none of a learner of reference",
    ),
    "layers that are none": (lambda state: {**state, "layers": 3}, "its layers: int"),
    "of a deeper model": (
        lambda state: {**state, "layers": state["layers"] * 2},
        r"its layers: .*float32 \(1, 2\)",
    ),
    "without an optimizer": (lambda state: {**state, "optimizer": {}}, "its optimizer: {}"),
    "of a step that is none": (
        lambda state: {**state, "optimizer": {**state["optimizer"], "steps": None}},
        "'steps': 'NoneType'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_state_of_a_learner_is_refused_and_changes_nothing(reference, case):
    break_it, words = BROKEN[case]
    learner = trained(reference)
    before = learner.state()
    with pytest.raises(CheckpointError, match=words):
        learner.restore(break_it(trained(reference).state()))
    after = learner.state()
    assert after["layers"] is before["layers"]
    assert after["optimizer"] is before["optimizer"]


def test_the_state_of_a_learner_of_another_model_is_refused(reference):
    with pytest.raises(CheckpointError, match="resume with the model that the run began with"):
        trained(reference).restore(trained(reference, (2, 3)).state())
