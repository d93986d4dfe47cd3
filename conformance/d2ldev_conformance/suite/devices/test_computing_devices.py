"""D2L 6.7.1, "Computing Devices": naming devices, counting them, falling back to the CPU."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import d2ldev
from d2ldev import Device, DeviceUnavailableError, InvalidDeviceError
from d2ldev._backend import framework_of
from d2ldev.native import NativeDevices
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.1"


@requirement("devices.cpu-is-one", section=SECTION)
def test_there_is_one_cpu(backend):
    assert backend.cpu() is Device("cpu")
    assert backend.device("cpu:3") is backend.cpu()


@requirement("devices.gpu-is-gpu-zero", section=SECTION)
def test_gpu_without_an_index_is_the_first(backend):
    assert backend.gpu() is backend.gpu(0)
    assert str(backend.gpu()) == "gpu:0"


@requirement("devices.gpu-need-not-exist", section=SECTION)
def test_naming_a_gpu_does_not_check_that_it_exists(backend):
    assert str(backend.gpu(99)) == "gpu:99"


@requirement("devices.index-is-not-negative", section=SECTION)
def test_a_negative_index_is_refused(backend):
    with pytest.raises(InvalidDeviceError, match=r"gpu\(-1\)"):
        backend.gpu(-1)


@requirement("devices.index-is-an-integer", section=SECTION)
@pytest.mark.parametrize("index", [1.5, 1.0, "1", None, [0]])
def test_an_index_that_is_not_an_integer_is_refused(backend, index):
    with pytest.raises(InvalidDeviceError):
        backend.gpu(index)


@requirement("devices.index-is-no-bool", section=SECTION)
def test_true_is_not_an_index(backend):
    with pytest.raises(InvalidDeviceError, match="True"):
        backend.gpu(True)


@requirement("devices.index-from-numpy", section=SECTION)
def test_an_integer_of_numpy_is_an_index(backend):
    assert backend.gpu(np.int64(1)) is backend.gpu(1)


@requirement("devices.try-gpu-checks-index", section=SECTION)
@pytest.mark.parametrize("index", [-1, 1.5, True])
def test_try_gpu_refuses_what_gpu_refuses(backend, index):
    with pytest.raises(InvalidDeviceError):
        backend.try_gpu(index)


@requirement("devices.count-is-not-negative", section=SECTION)
def test_the_number_of_gpus_is_an_integer_from_zero(backend):
    count = backend.num_gpus()
    assert type(count) is int
    assert count >= 0


@requirement("devices.counted-gpus-exist", section=SECTION)
@pytest.mark.needs_gpus(1)
def test_every_gpu_that_is_counted_takes_a_tensor(backend):
    gpus = [backend.gpu(i) for i in range(backend.num_gpus())]
    assert [backend.device_of(backend.ones(1, device=gpu)) for gpu in gpus] == gpus


@requirement("devices.gpus-are-distinct", section=SECTION)
@pytest.mark.needs_gpus(2)
def test_two_gpus_are_two_places(backend):
    tensors = [backend.ones(1, device=gpu) for gpu in ("gpu:0", "gpu:1")]
    assert [str(backend.device_of(x)) for x in tensors] == ["gpu:0", "gpu:1"]
    assert backend.native("gpu:0") != backend.native("gpu:1")


@requirement("devices.try-gpu-that-exists", section=SECTION)
@pytest.mark.needs_gpus(1)
def test_try_gpu_is_the_gpu_that_exists(backend):
    assert backend.try_gpu() is backend.gpu(0)
    last = backend.num_gpus() - 1
    assert backend.try_gpu(last) is backend.gpu(last)


@requirement("devices.try-gpu-that-is-missing", section=SECTION)
def test_try_gpu_of_a_missing_gpu_is_the_cpu(backend, missing):
    assert backend.try_gpu(missing.index) is backend.cpu()
    assert backend.try_gpu(10**6) is backend.cpu()


@requirement("devices.all-gpus-is-never-empty", section=SECTION)
def test_try_all_gpus_is_all_of_them_or_the_cpu(backend):
    gpus = [backend.gpu(i) for i in range(backend.num_gpus())]
    assert backend.try_all_gpus() == (gpus or [backend.cpu()])


@requirement("devices.list-starts-with-the-cpu", section=SECTION)
def test_the_devices_are_the_cpu_and_the_gpus_in_order(backend):
    devices = backend.devices()
    assert devices[0] is backend.cpu()
    assert devices == sorted(devices)
    assert len(devices) == len(set(devices)) == 1 + backend.num_gpus()


@requirement("devices.spellings", section=SECTION)
@pytest.mark.parametrize("text", ["gpu:1", "cuda:1", " GPU:1 ", "Cuda:1"])
def test_a_device_has_several_spellings(backend, text):
    assert backend.device(text) is backend.gpu(1)


@requirement("devices.bad-spellings", section=SECTION)
@pytest.mark.parametrize("text", ["", "gpu:x", "gpu:-1", "gpu:1.5", "gpu:", "tpu", "cuda1", ":0"])
def test_a_string_that_is_not_a_device_is_refused(backend, text):
    with pytest.raises(InvalidDeviceError) as caught:
        backend.ones(1, device=text)
    assert repr(text) in str(caught.value)


@requirement("devices.foreign-objects", section=SECTION)
@pytest.mark.parametrize("value", [0, 1.0, object(), ["cpu"], {}, np.float32])
def test_an_object_that_is_not_a_device_is_refused(backend, value):
    with pytest.raises(InvalidDeviceError):
        backend.ones(1, device=value)
    with pytest.raises(InvalidDeviceError):
        backend.to(backend.ones(1), value)


@requirement("devices.native-comes-back", section=SECTION)
def test_the_native_object_of_a_device_stands_for_it(backend, place):
    assert backend.device(backend.native(place)) is place


@requirement("devices.native-is-taken", section=SECTION)
def test_a_native_object_is_taken_as_a_device(backend, place):
    x = backend.ones(1, device=backend.native(place))
    assert backend.device_of(x) is place
    assert backend.to(x, backend.native(place)) is x


@requirement("devices.text-is-a-spelling", section=SECTION)
def test_the_text_of_a_native_device_is_a_spelling_of_it(backend, place):
    x = backend.ones(1, device=place)
    for text in {str(backend.native(place)), str(getattr(x, "device", place))}:
        assert backend.device(text) is place
        assert backend.device_of(backend.ones(1, device=text)) is place
        assert backend.to(x, text) is x


@requirement("devices.native-of-the-active-backend", section=SECTION)
def test_a_device_knows_its_native_object(backend, place):
    with d2ldev.use_backend(backend):
        assert backend.device(place.native) is place


@requirement("devices.native-must-exist", section=SECTION)
def test_a_device_that_is_missing_has_no_native_object(backend, missing):
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        backend.native(missing)


@requirement("devices.native-of-a-missing-gpu", section=SECTION)
def test_a_native_object_of_a_missing_gpu_stands_for_no_other_device(backend, missing):
    native = framework_of(backend).devices.native_of_missing(missing)
    assert native is None or backend.device(native) is missing


@requirement("devices.native-functions", section=SECTION)
def test_the_book_s_functions_return_native_devices(backend):
    native = NativeDevices(backend)
    returned = [native.cpu(), native.try_gpu(), native.try_gpu(10**6), *native.try_all_gpus()]
    expected = [backend.cpu(), backend.try_gpu(), backend.cpu(), *backend.try_all_gpus()]
    assert returned == [backend.native(device) for device in expected]
    assert native.num_gpus() == backend.num_gpus()


@requirement("devices.platform-of-the-cpu", section=SECTION)
def test_the_platform_of_the_cpu_is_cpu(backend):
    assert backend.platform("cpu") == "cpu"


@requirement("devices.platform-of-a-gpu", section=SECTION)
@pytest.mark.needs_gpus(1)
def test_the_platform_of_a_gpu_is_a_known_one(backend):
    assert backend.platform("gpu") in {"cuda", "rocm", "xpu", "mps", "metal", "tpu", "virtual"}


@requirement("devices.platform-must-exist", section=SECTION)
def test_a_device_that_is_missing_has_no_platform(backend, missing):
    with pytest.raises(DeviceUnavailableError):
        backend.platform(missing)


@requirement("devices.pickle", section=SECTION)
def test_a_device_of_a_tensor_survives_pickling(backend, place):
    device = backend.device_of(backend.ones(1, device=place))
    assert pickle.loads(pickle.dumps(device)) is device  # noqa: S301
