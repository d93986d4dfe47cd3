"""``Device``: one object for each device, in every spelling, thread, process and task."""

import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python

from d2ldev import Device, InvalidDeviceError, cpu, gpu

devices = st.one_of(st.just(cpu()), st.builds(gpu, st.integers(0, 10**30)))


# -- one object for each ----------------------------------------------------------------------


def test_threads_that_make_a_device_at_once_get_the_same_object():
    index, count = 987_654, 16
    start, made = threading.Barrier(count), []

    def make():
        start.wait()
        made.append(Device("gpu", index))

    threads = [threading.Thread(target=make) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [made[0]] * count


def test_a_subclass_does_not_get_between_a_device_and_its_name():
    class Other(Device):
        pass

    Other("gpu", 123_456)
    assert type(Device("gpu", 123_456)) is Device


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("device", [cpu(), gpu(3)], ids=str)
def test_a_copy_is_the_same_object(device, copied):
    assert copied(device) is device


def test_pickling_comes_back_to_the_one_object_in_another_process():
    text = pickle.dumps([cpu(), gpu(3)]).hex()
    assert run_python(f"""
        import pickle, d2ldev
        first, second = pickle.loads(bytes.fromhex({text!r}))
        show(first is d2ldev.cpu() and second is d2ldev.gpu(3))
    """) == [True]


# -- what is not a device ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tpu", "cuda", "CPU", "", "gpu:1", None, 1, b"gpu"])
def test_there_are_two_kinds(kind):
    with pytest.raises(InvalidDeviceError, match="a device is a 'cpu' or a 'gpu'"):
        Device(kind)


def test_a_negative_index_of_the_cpu_is_refused_too():
    with pytest.raises(InvalidDeviceError, match=r"cpu\(-1\)"):
        Device("cpu", -1)


def test_the_index_of_a_device_is_python_s_own_integer():
    assert type(gpu(np.int64(654_321)).index) is int


# -- spelling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", cpu()),
        ("cpu:0", cpu()),
        ("cpu:3", cpu()),
        ("gpu", gpu(0)),
        ("gpu:0", gpu(0)),
        ("gpu:1", gpu(1)),
        ("gpu:01", gpu(1)),
        ("gpu:10", gpu(10)),
        ("cuda", gpu(0)),
        ("cuda:1", gpu(1)),
        ("rocm:1", gpu(1)),
        ("xpu:1", gpu(1)),
        ("mps", gpu(0)),
        ("GPU:1", gpu(1)),
        ("Cuda:1", gpu(1)),
        (" gpu:1\n", gpu(1)),
    ],
)
def test_parse_reads(text, device):
    assert Device.parse(text) is device


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ":", ":1", "gpu:", "gpu:x", "gpu:-1", "gpu:+1", "gpu:1.0", "gpu:1_0"),
        *("gpu: 1", "gpu :1", "gpu:1:0", "gpu1", "gpu 1", "gpu:0x1", "tpu", "tpu:0", "g pu"),
        *("gpu:\u0661", "gpu:\u00b2", "gpu:\uff11", "\uff47pu", "gpu\x00", "/GPU:0", "meta"),
        "gpu:" + "1" * 5000,
    ],
)
def test_parse_refuses(text):
    with pytest.raises(InvalidDeviceError, match="as a device"):
        Device.parse(text)


@pytest.mark.parametrize("spec", [None, 1, b"gpu", ["gpu"], np.int64(1)])
def test_parse_refuses_values_that_are_not_strings(spec):
    with pytest.raises(InvalidDeviceError, match="as a device"):
        Device.parse(spec)


@given(devices)
def test_parse_reads_what_str_writes(device):
    assert Device.parse(str(device)) is device


@given(st.from_regex(r"\s*([cg]pu|cuda|mps)?:?.{0,3}\s*", fullmatch=True))
def test_parse_reads_a_text_or_refuses_it(text):
    try:
        device = Device.parse(text)
    except InvalidDeviceError as error:
        device = error
    assert isinstance(device, (Device, InvalidDeviceError))


def test_str_of_the_cpu_has_no_index():
    assert str(Device("cpu")) == "cpu"


def test_str_of_a_gpu_has_its_index():
    assert str(Device("gpu", 1)) == "gpu:1"


@given(devices)
def test_repr_evaluates_to_the_device(device):
    assert eval(repr(device), {"Device": Device}) is device


# -- a value ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kind", "index", "other"])
def test_no_attribute_can_be_set(name):
    with pytest.raises(AttributeError, match="a Device is immutable"):
        setattr(gpu(1), name, 2)


@pytest.mark.parametrize("name", ["kind", "index"])
def test_no_attribute_can_be_deleted(name):
    with pytest.raises(AttributeError, match="a Device is immutable"):
        delattr(gpu(1), name)


def test_a_device_has_its_kind_and_index():
    assert (gpu(1).kind, gpu(1).index) == ("gpu", 1)


@given(devices, devices)
def test_the_order_is_that_of_kind_and_index(left, right):
    keys = (left.kind, left.index), (right.kind, right.index)
    assert (left < right, left <= right, left > right, left >= right) == (
        keys[0] < keys[1],
        keys[0] <= keys[1],
        keys[0] > keys[1],
        keys[0] >= keys[1],
    )


@pytest.mark.parametrize("method", ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"])
def test_comparing_with_a_foreign_type_is_not_implemented(method):
    assert getattr(gpu(0), method)("gpu:0") is NotImplemented


def test_a_foreign_type_may_know_how_to_compare():
    class Knowing:
        def __eq__(self, other):
            return True

        __hash__ = None

    assert gpu(0) == Knowing()


def test_devices_are_keys():
    assert {gpu(0): "first", gpu(1): "second"}[Device.parse("cuda:1")] == "second"
