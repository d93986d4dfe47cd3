"""What the creating, asking and copying calls refuse, and how: as d2ldev errors, all of it."""

import copy
import pickle
import sys

import array_api_strict as xp
import numpy as np
import pytest

import d2ldev
from d2ldev import DeviceUnavailableError, InvalidDeviceError, Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev.operations.arguments import as_shape, flag, is_iterable, length_of


class Shy:
    """Fails at whatever is asked of it."""

    def __repr__(self):
        raise RuntimeError("do not look")

    def __hash__(self):
        raise RuntimeError("do not count")


class Unreadable:
    """Raises another error than Python expects where it is asked for a number."""

    def __index__(self):
        raise AttributeError("no number")


@pytest.mark.parametrize(
    "shape", [range(10**15), range(2**64), [1] * 255], ids=["long", "longer", "ones"]
)
def test_more_sizes_than_any_framework_takes_are_refused_at_once(shape):
    with pytest.raises(UnsupportedValueError, match="at most 254 axes"):
        as_shape(shape)


def test_more_layers_than_anyone_wants_are_refused_at_once(reference):
    with pytest.raises(UnsupportedValueError, match="at most 10000 sizes"):
        reference.mlp(range(1, 10**15))


class OfLength(list):
    """A list that is as long as it says."""

    def __init__(self, length):
        super().__init__([1.0])
        self.length = length

    def __len__(self):
        return self.length


def test_data_may_be_longer_than_python_counts():
    assert length_of(range(2**64), 0) == sys.maxsize


def test_data_of_a_negative_length_is_refused():
    with pytest.raises(UnsupportedValueError, match="its length is invalid"):
        length_of(OfLength(-1), 0)


@pytest.mark.parametrize("length", [-1, "1", 2**62])
def test_load_into_refuses_a_list_with_an_invalid_length(reference, tmp_path, length):
    reference.save([1.0], tmp_path / "file.safetensors")
    with pytest.raises(
        UnsupportedValueError, match="the OfLength at the top cannot be taken apart"
    ):
        reference.load_into(OfLength(length), tmp_path / "file.safetensors")


NO_BATCHES = {
    "text": "ab",
    "bytes": b"ab",
    "bytearray": bytearray(b"ab"),
    "memoryview": memoryview(b"ab"),
    "a scalar": np.float64(0.5),
    "an array without axes": np.zeros(()),
    "an array of the standard": xp.ones((2, 2)),
}


@pytest.mark.parametrize("data", NO_BATCHES.values(), ids=NO_BATCHES)
def test_no_batches_are_drawn_from_texts_and_scalars(reference, data):
    assert not is_iterable(data)
    with pytest.raises(UnsupportedValueError, match="is not an iterable of batches"):
        reference.prefetch(data, "cpu")
    with pytest.raises(UnsupportedValueError, match="is not an iterable of batches"):
        Trainer(1, backend=reference).fit(reference.mlp([2, 1]), data)


def test_a_weight_that_no_float_holds_is_refused(reference):
    with pytest.raises(UnsupportedValueError):
        d2ldev.DeviceLog(reference).add(10**5000, loss=1.0)


@pytest.mark.parametrize("index", [Shy(), Unreadable()], ids=["shy", "unreadable"])
def test_an_unreadable_index_is_refused(index):
    with pytest.raises(InvalidDeviceError, match="an index is an integer"):
        d2ldev.gpu(index)


@pytest.mark.parametrize("value", [None, "no", 1, 0.0, [], Shy()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "name", ["copy", "gradients", "strict", "is_trained", "enable_progress_bar"]
)
def test_a_value_that_is_not_true_or_false_is_not_a_flag(reference, tmp_path, name, value):
    net, path = reference.mlp([2, 1]), tmp_path / "net.safetensors"
    reference.save(net, path)
    calls = {
        # None is its default: copy where it has to.
        "copy": lambda: reference.asarray([1.0], copy="" if value is None else value),
        "gradients": lambda: reference.named_tensors(net, gradients=value),
        "strict": lambda: reference.load_into(net, path, strict=value),
        "is_trained": lambda: reference.learner(net, is_trained=value),
        "enable_progress_bar": lambda: Trainer(1, backend=reference, enable_progress_bar=value),
    }
    with pytest.raises(UnsupportedValueError, match=f"{name}=.* must be True or False"):
        calls[name]()


@pytest.mark.parametrize("value", [True, np.True_])
def test_a_flag_of_numpy_s_is_one_of_python_s(reference, value):
    assert flag("load parameters", "strict", value) is True
    assert reference.asarray(np.ones(2), copy=value).shape == (2,)


UNREADABLE = {
    "a set": {1, 2},
    "a generator": (i for i in range(3)),
    "numbers as texts": ["1", "2"],
    "an array of objects": np.array([1, 2], object),
    "an array of texts": np.array(["1", "2"]),
}


@pytest.mark.parametrize("obj", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_the_fix_for_data_without_numbers_makes_a_tensor(reference, obj):
    with pytest.raises(UnsupportedValueError) as caught:
        reference.asarray(obj)
    x = eval(caught.value.fix, {"backend": reference, "np": np, "obj": obj})
    assert x.shape == (len(reference.to_numpy(x)),)


@pytest.mark.parametrize(
    "call",
    [
        lambda b, device: b.ones(1, device=device),
        lambda b, device: b.to(b.ones(1), device),
        lambda b, device: b.native(device),
        lambda b, device: b.gpu(device),
        lambda b, device: b.is_idle(device),
    ],
    ids=["ones", "to", "native", "gpu", "is_idle"],
)
def test_a_device_that_cannot_be_shown_nor_hashed_is_refused(reference, call):
    with pytest.raises(InvalidDeviceError, match="Shy"):
        call(reference, Shy())


@pytest.mark.parametrize("arguments", [("a",), (0, "b"), ([1],), (np.zeros(2),)])
def test_a_range_with_invalid_numbers_is_refused(reference, arguments):
    with pytest.raises(UnsupportedValueError, match="make the range from"):
        reference.arange(*arguments)


def test_asking_a_missing_device_for_work_is_an_error(reference):
    with pytest.raises(DeviceUnavailableError, match="gpu:7"):
        reference.is_idle("gpu:7")


@pytest.mark.parametrize(
    ("error", "expected"),
    [(MemoryError, d2ldev.OutOfDeviceMemoryError), (TypeError, UnsupportedValueError)],
)
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("full", lambda b, x: b.zeros(1)),
        ("astype", lambda b, x: b.asarray(x, dtype="int32")),
        ("to_numpy", lambda b, x: b.to_numpy(x)),
        ("transfer", lambda b, x: b.copy(x)),
    ],
)
def test_errors_of_the_framework_are_translated(
    reference, monkeypatch, method, call, error, expected
):
    def fails(*_, **__):
        raise error("not today")

    x = reference.ones(1)
    monkeypatch.setattr(framework_of(reference).tensors, method, fails)
    with pytest.raises(expected, match="not today") as caught:
        call(reference, x)
    assert type(caught.value.__cause__) is error
    assert caught.value.devices == ("cpu",)


@pytest.mark.parametrize(("method", "call"), [("to_numpy", "to_numpy"), ("transfer", "copy")])
def test_errors_of_earlier_work_are_left_alone(reference, monkeypatch, method, call):
    def fails(*_, **__):
        raise RuntimeError("an earlier kernel failed")

    x = reference.ones(1)
    monkeypatch.setattr(framework_of(reference).tensors, method, fails)
    with pytest.raises(RuntimeError, match="an earlier kernel") as caught:
        getattr(reference, call)(x)
    assert not isinstance(caught.value, d2ldev.D2LDevError)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))]
)
def test_a_backend_is_found_again_by_its_name(reference, again):
    assert again(reference) is reference
    assert again({"backend": reference})["backend"] is reference


def test_like_takes_a_tensor_and_nothing_else(reference):
    with pytest.raises(UnsupportedValueError, match="dtype"):
        reference.asarray(xp.zeros(1), like=np.zeros(1))


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda backend: backend.zeros((2, 3), dtype="int32", like="x"), "backend.asarray(x)"),
        (lambda backend: backend.rand(2, dtype="int32"), "backend.rand("),
        (lambda backend: backend.rand(2, seed="x"), "backend.rand("),
        (lambda backend: backend.asarray([1.0], copy=False), "backend.asarray(obj)"),
        (lambda backend: backend.asarray(np.ones(1), copy=False), "backend.from_dlpack(x)"),
        (lambda backend: backend.zeros("ab"), "shape=(2, 3)"),
        (lambda backend: backend.zeros(2, dtype="flaot32"), "dtype='float32'"),
        (lambda backend: backend.to_numpy([1, 2]), "backend.asarray(x)"),
        (lambda backend: backend.from_dlpack([1, 2]), "backend.asarray(x)"),
        (lambda backend: backend.place(print, "gpu:0"), "a model of reference"),
        (lambda _: d2ldev.virtual_gpus(-4), "d2ldev.virtual_gpus(2)"),
        (lambda _: d2ldev.get_backend("nosuch"), "d2ldev.set_backend('"),
    ],
    ids=[
        "like",
        "dtype",
        "seed",
        "list",
        "array",
        "shape",
        "misspelt",
        "to_numpy",
        "from_dlpack",
        "model",
        "virtual_gpus",
        "backend",
    ],
)
def test_the_fix_is_in_terms_of_the_call(reference, make, call):
    with pytest.raises(d2ldev.D2LDevError) as caught:
        make(reference)
    assert call in caught.value.fix


def test_the_error_of_a_missing_device_names_the_object_for_it(reference):
    with pytest.raises(DeviceUnavailableError, match="cannot put a tensor on gpu:7"):
        reference.to(reference.ones(2), "gpu:7")
    with pytest.raises(DeviceUnavailableError, match="cannot compute on gpu:7"):
        reference.native("gpu:7")
