"""D2L 6.7.1, "Computing Devices": naming devices, counting them, falling back to the CPU.

Each framework names its devices in its own way. One spelling for all of them makes a program
portable.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import d2ldev
from d2ldev import Device, DeviceUnavailableError, InvalidDeviceError
from d2ldev.framework.testing import framework_of
from d2ldev.native import NativeDevices
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.1"
SOURCE = "contract"


@requirement("devices.cpu-is-one", section=SECTION)
def test_there_is_one_cpu(backend):
    """Return the same object for the CPU, with any index.

    A host has one memory, however many cores it has.
    """
    assert backend.cpu() is Device("cpu")
    assert backend.device("cpu:3") is backend.cpu()


@requirement("devices.gpu-is-gpu-zero", section=SECTION, source="D2L")
def test_gpu_without_an_index_is_the_first(backend):
    """Return the first GPU from ``gpu()`` without an index."""
    assert backend.gpu() is backend.gpu(0)
    assert str(backend.gpu()) == "gpu:0"


@requirement("devices.gpu-need-not-exist", section=SECTION)
def test_naming_a_gpu_does_not_check_that_it_exists(backend):
    """Name a GPU that does not exist without an error.

    A program can hold names of devices of another machine.
    """
    assert str(backend.gpu(99)) == "gpu:99"


@requirement("devices.index-is-not-negative", section=SECTION)
def test_a_negative_index_is_refused(backend):
    """Refuse a negative index of a GPU.

    In Python -1 would mean the last one, and a computed index hides a bug.
    """
    with pytest.raises(InvalidDeviceError, match=r"gpu\(-1\)"):
        backend.gpu(-1)


@requirement("devices.index-is-an-integer", section=SECTION)
@pytest.mark.parametrize("index", [1.5, 1.0, "1", None, [0]])
def test_an_index_that_is_not_an_integer_is_refused(backend, index):
    """Refuse an index that is not an integer, including a float and a text.

    A truncated 1.5 would name a device that nobody chose.
    """
    with pytest.raises(InvalidDeviceError):
        backend.gpu(index)


@requirement("devices.index-is-no-bool", section=SECTION)
def test_true_is_not_an_index(backend):
    """Refuse ``True`` as the index of a GPU.

    ``True`` equals 1 in Python, so a flag in the wrong place would select the second GPU.
    """
    with pytest.raises(InvalidDeviceError, match="True"):
        backend.gpu(True)


@requirement("devices.index-from-numpy", section=SECTION)
def test_an_integer_of_numpy_is_an_index(backend):
    """Accept an integer of NumPy as the index of a GPU.

    Indices often come out of an array of ranks.
    """
    assert backend.gpu(np.int64(1)) is backend.gpu(1)


@requirement("devices.try-gpu-checks-index", section=SECTION)
@pytest.mark.parametrize("index", [-1, 1.5, True])
def test_try_gpu_refuses_what_gpu_refuses(backend, index):
    """Refuse in ``try_gpu`` each index that ``gpu`` refuses.

    The fallback to the CPU is for missing hardware, and not for typing errors.
    """
    with pytest.raises(InvalidDeviceError):
        backend.try_gpu(index)


@requirement("devices.count-is-not-negative", section=SECTION, source="D2L")
def test_the_number_of_gpus_is_an_integer_from_zero(backend):
    """Return the number of GPUs as a Python ``int`` that is at least 0.

    Loops and comparisons take the count as it is.
    """
    count = backend.num_gpus()
    assert type(count) is int
    assert count >= 0


@requirement("devices.counted-gpus-exist", section=SECTION, source="D2L")
@pytest.mark.needs_gpus(1)
def test_every_gpu_that_is_counted_takes_a_tensor(backend):
    """Make a tensor on each of the GPUs that ``num_gpus`` counts.

    A count that is too high sends a program to a device that fails.
    """
    gpus = [backend.gpu(i) for i in range(backend.num_gpus())]
    assert [backend.device_of(backend.ones(1, device=gpu)) for gpu in gpus] == gpus


@requirement("devices.gpus-are-distinct", section=SECTION, source="D2L")
@pytest.mark.needs_gpus(2)
def test_two_gpus_are_two_places(backend):
    """Keep two GPUs apart, as two places with two native devices.

    A program for two GPUs would have the memory of one.
    """
    tensors = [backend.ones(1, device=gpu) for gpu in ("gpu:0", "gpu:1")]
    assert [str(backend.device_of(x)) for x in tensors] == ["gpu:0", "gpu:1"]
    assert backend.native("gpu:0") != backend.native("gpu:1")


@requirement("devices.try-gpu-that-exists", section=SECTION, source="D2L")
@pytest.mark.needs_gpus(1)
def test_try_gpu_is_the_gpu_that_exists(backend):
    """Return from ``try_gpu(i)`` the GPU with this index if it exists."""
    assert backend.try_gpu() is backend.gpu(0)
    last = backend.num_gpus() - 1
    assert backend.try_gpu(last) is backend.gpu(last)


@requirement("devices.try-gpu-that-is-missing", section=SECTION, source="D2L")
def test_try_gpu_of_a_missing_gpu_is_the_cpu(backend, missing):
    """Return the CPU from ``try_gpu(i)`` if the GPU does not exist.

    The book's programs run unchanged on machines without a GPU.
    """
    assert backend.try_gpu(missing.index) is backend.cpu()
    assert backend.try_gpu(10**6) is backend.cpu()


@requirement("devices.all-gpus-is-never-empty", section=SECTION, source="D2L")
def test_try_all_gpus_is_all_of_them_or_the_cpu(backend):
    """Return all GPUs from ``try_all_gpus``, or a list with the CPU.

    A loop over the result runs at least once.
    """
    gpus = [backend.gpu(i) for i in range(backend.num_gpus())]
    assert backend.try_all_gpus() == (gpus or [backend.cpu()])


@requirement("devices.list-starts-with-the-cpu", section=SECTION)
def test_the_devices_are_the_cpu_and_the_gpus_in_order(backend):
    """List the CPU first in ``devices``, and then each GPU once in order.

    Reports and loops rely on one order.
    """
    devices = backend.devices()
    assert devices[0] is backend.cpu()
    assert devices == sorted(devices)
    assert len(devices) == len(set(devices)) == 1 + backend.num_gpus()


@requirement("devices.spellings", section=SECTION)
@pytest.mark.parametrize("text", ["gpu:1", "cuda:1", " GPU:1 ", "Cuda:1"])
def test_a_device_has_several_spellings(backend, text):
    """Parse ``'gpu:1'`` and ``'cuda:1'`` in any case, and with spaces around them.

    Names come from command lines and from the frameworks' own messages.
    """
    assert backend.device(text) is backend.gpu(1)


@requirement("devices.bad-spellings", section=SECTION)
@pytest.mark.parametrize("text", ["", "gpu:x", "gpu:-1", "gpu:1.5", "gpu:", "tpu", "cuda1", ":0"])
def test_a_string_that_is_not_a_device_is_refused(backend, text):
    """Refuse a text that does not name a device, and quote it.

    The CPU instead of a misspelt GPU would only be noticed by the time it takes.
    """
    with pytest.raises(InvalidDeviceError) as caught:
        backend.ones(1, device=text)
    assert repr(text) in str(caught.value)


@requirement("devices.foreign-objects", section=SECTION)
@pytest.mark.parametrize("value", [0, 1.0, object(), ["cpu"], {}, np.float32])
def test_an_object_that_is_not_a_device_is_refused(backend, value):
    """Refuse an object that is not a device, in creation and in ``to``.

    A number or a list in the place of a device is a swapped argument.
    """
    with pytest.raises(InvalidDeviceError):
        backend.ones(1, device=value)
    with pytest.raises(InvalidDeviceError):
        backend.to(backend.ones(1), value)


@requirement("devices.native-comes-back", section=SECTION)
def test_the_native_object_of_a_device_stands_for_it(backend, place):
    """Turn a native device into the ``Device`` from which it was made.

    Programs mix d2ldev's calls with the framework's own.
    """
    assert backend.device(backend.native(place)) is place


@requirement("devices.native-is-taken", section=SECTION)
def test_a_native_object_is_taken_as_a_device(backend, place):
    """Accept a native device in creation and in ``to``.

    Code of the framework passes its own objects on.
    """
    x = backend.ones(1, device=backend.native(place))
    assert backend.device_of(x) is place
    assert backend.to(x, backend.native(place)) is x


@requirement("devices.text-is-a-spelling", section=SECTION)
def test_the_text_of_a_native_device_is_a_spelling_of_it(backend, place):
    """Accept ``str`` of a native device, and of the ``device`` of a tensor.

    Logs and configurations keep devices as text.
    """
    x = backend.ones(1, device=place)
    for text in {str(backend.native(place)), str(getattr(x, "device", place))}:
        assert backend.device(text) is place
        assert backend.device_of(backend.ones(1, device=text)) is place
        assert backend.to(x, text) is x


@requirement("devices.native-of-the-active-backend", section=SECTION)
def test_a_device_knows_its_native_object(backend, place):
    """Return the native object of the active backend from ``Device.native``.

    A ``Device`` belongs to no framework, so it asks the active one.
    """
    with d2ldev.use_backend(backend):
        assert backend.device(place.native) is place


@requirement("devices.native-must-exist", section=SECTION)
def test_a_device_that_is_missing_has_no_native_object(backend, missing):
    """Refuse to give a native object for a GPU that does not exist.

    Some frameworks make such objects, and fail much later.
    """
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        backend.native(missing)


@requirement("devices.native-of-a-missing-gpu", section=SECTION)
def test_a_native_object_of_a_missing_gpu_stands_for_no_other_device(backend, missing):
    """Read a native object of a missing GPU as that GPU, and as no other.

    Wrapping the index round would compute on the wrong card.
    """
    native = framework_of(backend).devices.native_of_missing(missing)
    assert native is None or backend.device(native) is missing


@requirement("devices.native-functions", section=SECTION, source="D2L")
def test_the_book_s_functions_return_native_devices(backend):
    """Return native devices from the book's ``cpu``, ``try_gpu`` and ``try_all_gpus``.

    The book's own code passes them to the framework.
    """
    native = NativeDevices(backend)
    returned = [native.cpu(), native.try_gpu(), native.try_gpu(10**6), *native.try_all_gpus()]
    expected = [backend.cpu(), backend.try_gpu(), backend.cpu(), *backend.try_all_gpus()]
    assert returned == [backend.native(device) for device in expected]
    assert native.num_gpus() == backend.num_gpus()


@requirement("devices.platform-of-the-cpu", section=SECTION)
def test_the_platform_of_the_cpu_is_cpu(backend):
    """Report ``'cpu'`` as the platform of the CPU.

    Programs and reports choose by this name.
    """
    assert backend.platform("cpu") == "cpu"


@requirement("devices.platform-of-a-gpu", section=SECTION)
@pytest.mark.needs_gpus(1)
def test_the_platform_of_a_gpu_is_a_known_one(backend):
    """Report a platform of a GPU that is one of the known names.

    A test that is for hardware alone has to tell CUDA from a virtual GPU.
    """
    assert backend.platform("gpu") in {"cuda", "rocm", "xpu", "mps", "metal", "tpu", "virtual"}


@requirement("devices.platform-must-exist", section=SECTION)
def test_a_device_that_is_missing_has_no_platform(backend, missing):
    """Refuse to name the platform of a device that does not exist.

    An answer would suggest that the device can be used.
    """
    with pytest.raises(DeviceUnavailableError):
        backend.platform(missing)


@requirement("devices.pickle", section=SECTION, source="Python, pickle")
def test_a_device_of_a_tensor_survives_pickling(backend, place):
    """Return the same device after pickling and unpickling it.

    Data loaders send devices to other processes.
    """
    device = backend.device_of(backend.ones(1, device=place))
    assert pickle.loads(pickle.dumps(device)) is device  # noqa: S301
