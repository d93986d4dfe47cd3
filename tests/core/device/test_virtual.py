"""How many virtual GPUs there are: the variable, the call, and what is refused."""

import re

import numpy as np
import pytest
from processes import make_backend, make_package, run_python

import d2ldev
import d2ldev.settings as settings
from d2ldev import UnsupportedValueError
from d2ldev.framework.testing import framework_of

COUNT = "import d2ldev; b = d2ldev.get_backend('reference'); show([str(d) for d in b.devices()])"
TWO = ["cpu", "gpu:0", "gpu:1"]


# -- the variable -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "devices"),
    [("0", ["cpu"]), ("1", ["cpu", "gpu:0"]), ("2", TWO), (" 2 ", TWO), ("02", TWO)],
)
def test_the_variable_is_how_many_gpus_the_reference_backend_has(text, devices):
    assert run_python(COUNT, environment={"D2LDEV_VIRTUAL_GPUS": text}) == [devices]


@pytest.mark.parametrize(
    "environment", [{}, {"D2LDEV_VIRTUAL_GPUS": ""}, {"D2LDEV_VIRTUAL_GPUS": " "}]
)
def test_unset_or_empty_the_reference_backend_has_two(environment):
    assert run_python(COUNT, environment=environment) == [TWO]


BAD = [
    "-1",
    "9",
    "1.5",
    "two",
    "2,3",
    "0x2",
    "1e0",
    "+2",
    "1_0",
    "\u0662",
    "\u00b2",
    "true",
    "1" * 5000,
]


@pytest.fixture(scope="module")
def refused():
    """The message for each bad value of the variable, of one process that asks for it each time."""
    code = f"""
        import os, d2ldev
        for text in {BAD!r}:
            os.environ["D2LDEV_VIRTUAL_GPUS"] = text
            try:
                d2ldev.get_backend("reference")
            except d2ldev.InvalidDeviceError as error:
                show(str(error))
    """
    return dict(zip(BAD, run_python(code), strict=True))


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:9])
def test_a_bad_variable_is_refused_by_name_and_value(refused, text):
    value = re.escape(repr(text)) if len(text) < 10 else "'1+"
    message = rf"make {value}.* virtual GPUs \(from D2LDEV_VIRTUAL_GPUS\): .*0 to 8"
    assert re.search(message, refused[text])


def test_a_bad_variable_says_so_at_the_first_use_of_a_backend():
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("reference")
        except d2ldev.InvalidDeviceError as error:
            show(str(error))
    """
    (message,) = run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "two"})
    assert "make 'two' virtual GPUs (from D2LDEV_VIRTUAL_GPUS)" in message
    assert "fix: D2LDEV_VIRTUAL_GPUS=2" in message


def test_more_gpus_than_the_backend_can_make_are_refused():
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("reference")
        except d2ldev.DeviceUnavailableError as error:
            show(str(error))
    """
    (message,) = run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "3"})
    assert "make 3 virtual GPUs: the reference backend can make 2" in message
    assert "D2LDEV_VIRTUAL_GPUS" in message


# -- the environment of a framework -----------------------------------------------------------

# A backend that says how its framework makes several devices of the CPU.
FLAG = ["ENGINE_FLAGS=--cpus={cpus}"]
IMPORTED = "import sys, os; from d2ldev import backend; show(os.environ.get('ENGINE_FLAGS'))"


def read_flags(folder, code=IMPORTED, **environment):
    """Return what a process has in ``ENGINE_FLAGS`` after it asked for virtual GPUs."""
    make_package(folder, "engine")
    make_backend(folder, requires=["engine"], environment=FLAG)
    return run_python(code, path=[folder], environment=environment)


@pytest.mark.parametrize(
    ("user", "flags"),
    [
        ("", "--cpus=3"),
        ("--fast", "--fast --cpus=3"),
        ("--cpus=2 --fast", "--cpus=2 --fast --cpus=3"),
        ("--cpus=3", "--cpus=3"),
        ("--cpus=8 --fast", "--cpus=8 --fast"),
        ("/home/me/flags", "/home/me/flags"),
    ],
)
def test_the_import_of_the_handle_adds_the_flag_and_keeps_the_user_s(tmp_path, user, flags):
    found = read_flags(tmp_path, D2LDEV_VIRTUAL_GPUS="2", ENGINE_FLAGS=user)
    assert found == [flags]


@pytest.mark.parametrize("number", ["", "0", "two"])
def test_without_virtual_gpus_the_environment_stays(tmp_path, number):
    assert read_flags(tmp_path, D2LDEV_VIRTUAL_GPUS=number) == [None]


def test_a_call_adds_the_flag(tmp_path):
    code = f"import d2ldev; d2ldev.virtual_gpus(2); {IMPORTED}"
    assert read_flags(tmp_path, code) == ["--cpus=3"]


def test_adding_the_flag_imports_no_framework_and_no_backend(tmp_path):
    code = f"{IMPORTED}; show([name for name in ('engine', 'mine_backend') if name in sys.modules])"
    assert read_flags(tmp_path, code, D2LDEV_VIRTUAL_GPUS="2") == ["--cpus=3", []]


def test_a_framework_that_is_missing_gets_no_flag(tmp_path):
    make_backend(tmp_path, requires=["engine"], environment=FLAG)
    environment = {"D2LDEV_VIRTUAL_GPUS": "2"}
    assert run_python(IMPORTED, path=[tmp_path], environment=environment) == [None]


# -- the call ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "devices"), [(0, ["cpu"]), (1, ["cpu", "gpu:0"]), (2, TWO)])
def test_a_call_before_the_first_use_decides(n, devices):
    assert run_python(f"import d2ldev; d2ldev.virtual_gpus({n}); {COUNT}") == [devices]


def test_a_call_overrules_the_variable():
    code = f"import d2ldev; d2ldev.virtual_gpus(1); {COUNT}"
    assert run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "2"}) == [["cpu", "gpu:0"]]


def test_the_last_of_several_calls_counts():
    code = f"import d2ldev; d2ldev.virtual_gpus(2); d2ldev.virtual_gpus(1); {COUNT}"
    assert run_python(code) == [["cpu", "gpu:0"]]


def test_a_call_imports_no_framework_and_no_backend():
    code = "import sys, d2ldev; d2ldev.virtual_gpus(2); show('array_api_strict' in sys.modules)"
    assert run_python(code) == [False]


@pytest.mark.parametrize("n", [-1, 9, 1.5, "2", None, True, np.float32(2)])
def test_an_invalid_number_is_refused(n):
    message = rf"make {re.escape(repr(n))} virtual GPUs: .*from 0 to 8"
    with pytest.raises(d2ldev.InvalidDeviceError, match=message):
        d2ldev.virtual_gpus(n)


def test_a_refused_number_changes_nothing():
    code = f"""
        import d2ldev
        d2ldev.virtual_gpus(1)
        try:
            d2ldev.virtual_gpus(9)
        except d2ldev.InvalidDeviceError:
            pass
        {COUNT}
    """
    assert run_python(code) == [["cpu", "gpu:0"]]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_another_number_after_the_first_use_is_refused(n):
    code = f"""
        import d2ldev
        d2ldev.get_backend("reference")
        try:
            d2ldev.virtual_gpus({n})
        except d2ldev.D2LDevError as error:
            show(str(error))
    """
    (message,) = run_python(code)
    assert f"make {n} virtual GPUs: the reference backend is in use already, with 2 GPUs" in message
    assert "devices: cpu, gpu:0, gpu:1" in message
    assert f"D2LDEV_VIRTUAL_GPUS={n}; in a notebook restart the kernel first" in message


def test_setting_the_same_number_again_is_not_an_error():
    assert run_python(f"{COUNT}; d2ldev.virtual_gpus(2); {COUNT}") == [TWO, TWO]


# -- what they are ----------------------------------------------------------------------------


def test_a_virtual_gpu_says_that_it_is_one(reference):
    assert [reference.platform(device) for device in TWO] == ["cpu", "virtual", "virtual"]


def test_a_virtual_gpu_that_is_not_there_is_unavailable(other):
    with pytest.raises(d2ldev.DeviceUnavailableError) as error:
        other.zeros(3, device="gpu:1")
    assert str(error.value) == (
        "cannot make a tensor on gpu:1: reference has 1 GPU here\n"
        "  devices: cpu, gpu:0\n"
        "  fix: use one that exists: backend.try_gpu(1) is cpu here"
    )


def test_without_virtual_gpus_all_gpus_are_the_cpu(reference):
    none = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=0))
    assert none.try_all_gpus() == [d2ldev.cpu()]


def test_without_any_gpu_the_fix_offers_virtual_ones(reference, monkeypatch):
    monkeypatch.delenv("D2LDEV_VIRTUAL_GPUS", raising=False)
    none = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=0))
    offer = "; or D2LDEV_VIRTUAL_GPUS=2 makes virtual GPUs"
    with pytest.raises(d2ldev.DeviceUnavailableError) as error:
        none.zeros(3, device="gpu:1")
    assert error.value.fix == f"use one that exists: backend.try_gpu(1) is cpu here{offer}"
    with pytest.raises(d2ldev.DeviceUnavailableError) as error:
        d2ldev.Trainer(1, num_gpus=2, backend=none)
    assert error.value.fix == f"num_gpus=0{offer}"
    with pytest.raises(d2ldev.DeviceUnavailableError) as error:
        none.zeros(3, device="gpu:7")  # more than the reference backend can make
    assert "virtual" not in error.value.fix
    monkeypatch.setenv("D2LDEV_VIRTUAL_GPUS", "0")  # no GPU is what the user wants
    with pytest.raises(d2ldev.DeviceUnavailableError) as error:
        none.zeros(3, device="gpu:1")
    assert "virtual" not in error.value.fix


def test_a_variable_that_is_changed_after_the_first_use_is_named_where_a_gpu_is_missing():
    code = """
        import os, d2ldev
        backend = d2ldev.get_backend("reference")
        os.environ["D2LDEV_VIRTUAL_GPUS"] = "2"
        for device in ("gpu:1", "gpu:2"):
            try:
                backend.ones(2, device=device)
            except d2ldev.DeviceUnavailableError as error:
                show(error.problem)
    """
    shown = run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "1"})
    late = ", and D2LDEV_VIRTUAL_GPUS=2 came after its first use: set it before"
    assert shown == [f"reference has 1 GPU here{late}", "reference has 1 GPU here"]


def test_a_variable_that_is_changed_to_nonsense_hides_no_error():
    code = """
        import os, d2ldev
        backend = d2ldev.get_backend("reference")
        os.environ["D2LDEV_VIRTUAL_GPUS"] = "many"
        try:
            backend.ones(2, device="gpu:1")
        except d2ldev.DeviceUnavailableError as error:
            show(error.problem)
    """
    shown = run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "1"})
    assert shown == ["reference has 1 GPU here"]


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("on", True), ("0", False), ("", False)]
)
def test_the_variable_of_cuda(monkeypatch, text, expected):
    monkeypatch.setenv("D2LDEV_VIRTUAL_CUDA", text)
    assert settings.virtual_cuda() is expected


def test_a_misspelt_variable_of_cuda_is_refused(monkeypatch):
    monkeypatch.setenv("D2LDEV_VIRTUAL_CUDA", "cuda")
    with pytest.raises(UnsupportedValueError, match="D2LDEV_VIRTUAL_CUDA") as error:
        settings.virtual_cuda()
    assert "D2LDEV_VIRTUAL_CUDA=1" in error.value.fix
