"""Counting NVIDIA's GPUs, with a driver that stands in for the machine's."""

import sys
import warnings

import fake_nvml
import pytest
from fake_nvml import GIGABYTE, UUIDS, Driver
from installs import find_extras

from d2ldev import DeviceInitializationWarning, DeviceUnavailableError
from d2ldev.framework import nvml


@pytest.fixture
def install(monkeypatch):
    """Gives this machine a driver, and hides none of its GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(nvml, "has_driver", lambda: True)
    nvml.cards.cache_clear()

    def install_driver(driver):
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    yield install_driver
    nvml.cards.cache_clear()


@pytest.fixture
def asked_anew():
    """Forgets whether there is a driver, and who was told."""
    for function in (nvml.has_driver, nvml.warn_without_driver):
        function.cache_clear()
    yield
    for function in (nvml.has_driver, nvml.warn_without_driver):
        function.cache_clear()


def test_a_framework_for_cuda_without_a_driver_warns_once(asked_anew, monkeypatch):
    def refuse_import(name):
        raise OSError(name)

    monkeypatch.setattr(nvml.sys, "platform", "linux")
    monkeypatch.setattr(nvml.ctypes, "CDLL", refuse_import)
    with pytest.warns(DeviceInitializationWarning) as warned:
        _told = [nvml.warn_without_driver("mine"), nvml.warn_without_driver("mine")]
    (warning,) = warned
    assert "no NVIDIA driver here (libcuda.so.1)" in str(warning.message)


def test_a_framework_for_cuda_with_a_driver_gives_no_warning(asked_anew, monkeypatch):
    monkeypatch.setattr(nvml.sys, "platform", "linux")
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvml.warn_without_driver("mine")
    assert nvml.has_driver()


def test_without_a_driver_no_gpu_is_counted_and_nothing_asked(install, monkeypatch):
    driver = install(Driver())
    monkeypatch.setattr(nvml, "has_driver", lambda: False)
    assert nvml.visible_cards() == []
    assert nvml.memory_of(0) is None
    assert driver.calls == []


def test_a_driver_that_is_not_loaded_has_no_gpu(install):
    install(Driver(status=fake_nvml.NOT_LOADED))
    assert nvml.visible_cards() == []


@pytest.mark.parametrize(
    "driver", [None, Driver(status=fake_nvml.NO_LIBRARY)], ids=["no package", "no library"]
)
def test_where_nvml_cannot_be_asked_nothing_is_known(install, driver):
    install(driver)
    assert nvml.visible_cards() is None
    assert nvml.memory_of(0) is None
    assert nvml.utilisation_of(0) is None
    assert nvml.bandwidth_of(0) == (None, None)


def test_a_framework_that_initializes_cuda_to_count_warns_once():
    nvml.warn_of_context.cache_clear()
    with pytest.warns(DeviceInitializationWarning) as warned:
        _told = [nvml.warn_of_context("mine"), nvml.warn_of_context("mine")]
    nvml.warn_of_context.cache_clear()
    (warning,) = warned
    assert str(warning.message).startswith("mine initialises CUDA to count its GPUs")
    assert find_extras(str(warning.message)) == ["cuda"]


def test_counting_asks_nothing_that_makes_a_context(install):
    driver = install(Driver(uuids=UUIDS[:2]))
    nvml.visible_cards()
    of_each = [f"nvmlDeviceGet{question}" for question in ("HandleByIndex", "UUID", "MemoryInfo")]
    assert driver.calls == ["nvmlInit", "nvmlDeviceGetCount", *of_each * 2, "nvmlShutdown"]


def test_nvidia_s_package_has_all_that_is_asked():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = {name for name in dir(Driver()) if name.startswith(("nvml", "NVML"))}
    assert names <= {*dir(pynvml)}
    assert pynvml.NVML_CLOCK_MEM == Driver.NVML_CLOCK_MEM
    for code, name in fake_nvml.NAMES.items():
        assert type(pynvml.NVMLError(code)).__name__ == name
    assert {name for name, _ in pynvml.c_nvmlC2cModeInfo_v1_t._fields_} == {"isC2cEnabled"}
    assert "total" in {name for name, _ in pynvml.c_nvmlMemory_t._fields_}
    assert "gpu" in {name for name, _ in pynvml.c_nvmlUtilization_t._fields_}


@pytest.mark.parametrize("answers", [{"status": 18}, {"counting": 18}])
def test_a_driver_that_fails_is_an_error(install, answers):
    install(Driver(**answers))
    with pytest.raises(DeviceUnavailableError, match="error 18"):
        nvml.visible_cards()


@pytest.mark.parametrize("counting", [0, 18])
def test_the_library_is_left_closed(install, counting):
    driver = install(Driver(counting=counting))
    if counting:
        with pytest.raises(DeviceUnavailableError):
            nvml.visible_cards()
    else:
        nvml.visible_cards()
    assert driver.open == 0


def test_a_gpu_that_does_not_tell_its_memory_is_counted(install):
    install(Driver(sizes=(8, 8, None)))
    assert nvml.visible_cards()[2] == nvml.Card("GPU-bb33", None)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, UUIDS),
        ("", []),
        ("0", ["GPU-aa11"]),
        ("2,0", ["GPU-bb33", "GPU-aa11"]),
        (" 1 , 2 ", ["GPU-aa22", "GPU-bb33"]),
        # What follows the first name that is none is not visible.
        ("0,7,1", ["GPU-aa11"]),
        ("-1", []),
        ("0,-1,1", ["GPU-aa11"]),
        ("NoDevFiles", []),
        ("²", []),
        ("0,²,1", ["GPU-aa11"]),
        ("9" * 5000, []),
        # One that is named twice hides them all.
        ("0,0", []),
        ("0,1,0", []),
        ("0,GPU-aa11", []),
        # The beginning of a UUID suffices, if it is that of one GPU.
        ("GPU-bb", ["GPU-bb33"]),
        ("GPU-aa11,GPU-bb33", ["GPU-aa11", "GPU-bb33"]),
        ("GPU-aa", []),
        ("GPU-cc", []),
        # One MIG instance is visible, and nothing after it.
        ("MIG-12345", ["MIG-12345"]),
        ("MIG-1,MIG-2", ["MIG-1"]),
        ("MIG-1,0", ["MIG-1"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(install, monkeypatch, visible, uuids):
    install(Driver())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [card.uuid for card in nvml.visible_cards()] == list(uuids)


@pytest.mark.parametrize(
    ("sizes", "variables", "memory"),
    [
        ((8, 8, 8), {}, 8 * GIGABYTE),
        # CUDA may have another order.
        ((8, 16, 8), {}, None),
        ((8, 16, 8), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 16 * GIGABYTE),
        ((8, 16, 8), {"CUDA_VISIBLE_DEVICES": "0,2"}, 8 * GIGABYTE),
        ((8, 8, 8), {"CUDA_VISIBLE_DEVICES": "0"}, None),
        ((8, 8, 8), {"CUDA_VISIBLE_DEVICES": "0,MIG-1"}, None),
    ],
)
def test_the_memory_of_a_known_gpu_is_reported(install, monkeypatch, sizes, variables, memory):
    install(Driver(sizes=sizes))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert nvml.memory_of(1) == memory


@pytest.mark.parametrize(
    ("sizes", "variables", "names"),
    [
        ((8, 8, 8), {}, [0, 1, 2, None]),
        ((8, 16, 8), {}, [None] * 4),
        ((8, 16, 8), {"CUDA_VISIBLE_DEVICES": "1"}, [1, None, None, None]),
        ((8, 16, 8), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 1, 2, None]),
    ],
)
def test_the_name_of_a_known_gpu_is_reported(install, monkeypatch, sizes, variables, names):
    install(Driver(sizes=sizes))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    uuids = [card.uuid for card in nvml.cards()]
    expected = [None if number is None else uuids[number] for number in names]
    assert [nvml.uuid_of(index) for index in range(4)] == expected


def test_the_driver_is_asked_once(install, monkeypatch):
    install(Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(nvml.visible_cards()) == 1
    install(Driver(status=18))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert len(nvml.visible_cards()) == 2


def test_how_busy_a_visible_gpu_is(install, monkeypatch):
    driver = install(Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [nvml.utilisation_of(index) for index in range(3)] == [30, 10, None]
    assert driver.open == 0


def test_a_gpu_that_does_not_say_how_busy_it_is(install, monkeypatch):
    install(Driver(sizes=(None, 8, 8)))
    assert nvml.utilisation_of(1) is None  # CUDA may have another order
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [nvml.utilisation_of(index) for index in range(2)] == [None, 20]


# As NVML answers for an H200.
H200 = {
    "MaxClockInfo": 3201,
    "MemoryBusWidth": 6144,
    "GpuMaxPcieLinkGeneration": 5,
    "MaxPcieLinkWidth": 16,
    "C2cModeInfoV": None,
}


def test_a_copy_is_no_faster_than_the_memory_and_the_link(install):
    driver = install(Driver())
    driver.answer(**H200)
    assert nvml.bandwidth_of(0) == pytest.approx((4.917e12, 64e9), rel=1e-3)
    assert driver.open == 0


@pytest.mark.parametrize(
    ("answers", "memory", "link"),
    [
        ({"MaxClockInfo": None}, None, 64e9),
        ({"MemoryBusWidth": None}, None, 64e9),
        ({"MaxPcieLinkWidth": None}, 4.917e12, None),
        ({"GpuMaxPcieLinkGeneration": None}, 4.917e12, None),
        ({"GpuMaxPcieLinkGeneration": 9}, 4.917e12, None),
        ({"GpuMaxPcieLinkGeneration": 3, "MaxPcieLinkWidth": 8}, 4.917e12, 8e9),
        ({"C2cModeInfoV": 0}, 4.917e12, 64e9),
        ({"C2cModeInfoV": 1}, 4.917e12, None),
    ],
    ids=repr,
)
def test_a_missing_answer_of_the_driver_sets_no_limit(install, answers, memory, link):
    install(Driver()).answer(**H200 | answers)
    assert nvml.bandwidth_of(0) == (memory and pytest.approx(memory, rel=1e-3), link)


def test_an_older_driver_does_not_know_the_links_to_the_host(install):
    without = {name: number for name, number in H200.items() if name != "C2cModeInfoV"}
    install(Driver()).answer(**without)
    assert nvml.bandwidth_of(0).link is None


def test_a_card_that_is_not_known_has_no_limit(install, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    install(Driver()).answer(**H200)
    assert nvml.bandwidth_of(1) == (None, None)
