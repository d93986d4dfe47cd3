"""The book's five functions, on any backend."""

import pytest
from processes import FRAMEWORKS, make_backend, run_python

import d2ldev
from d2ldev.native import NativeDevices
from d2ldev.native import reference as d2l


def test_the_functions_return_the_framework_s_own_devices(reference):
    assert [d2l.cpu(), d2l.gpu(), d2l.gpu(1)] == [
        reference.native(device) for device in ("cpu", "gpu:0", "gpu:1")
    ]


def test_a_gpu_that_is_there_is_tried_with_success(reference):
    assert d2l.try_gpu(1) == reference.native("gpu:1")


def test_a_gpu_that_is_not_there_is_the_cpu_when_it_is_tried(reference):
    assert d2l.try_gpu(10) == reference.native("cpu")


def test_all_gpus_are_a_list(reference):
    assert d2l.try_all_gpus() == [reference.native("gpu:0"), reference.native("gpu:1")]


def test_without_gpus_the_list_is_the_cpu(reference):
    none = NativeDevices(d2ldev.Backend(type(reference.framework)(virtual_gpus=0)))
    assert (none.num_gpus(), none.try_all_gpus()) == (0, [reference.native("cpu")])


def test_a_gpu_that_is_not_there_and_has_no_object_is_an_error():
    with pytest.raises(d2ldev.DeviceUnavailableError, match="gpu:2"):
        d2l.gpu(2)


def test_a_gpu_that_is_not_there_has_the_object_that_the_framework_has_for_it(
    reference, monkeypatch
):
    monkeypatch.setattr(reference.framework.devices, "missing", lambda device: f"its own {device}")
    assert d2l.gpu(2) == "its own gpu:2"


@pytest.mark.parametrize("function", [d2l.gpu, d2l.try_gpu])
def test_a_negative_index_is_no_device(function):
    with pytest.raises(d2ldev.InvalidDeviceError):
        function(-1)


def test_a_function_is_added_to_a_class_as_in_the_book():
    class Model:
        pass

    @d2l.add_to_class(Model)
    def doubled(self, x):
        return 2 * x

    assert doubled(None, 1) == 2
    assert Model().doubled(3) == 6


def test_the_functions_name_their_backend():
    assert repr(d2l) == "<the native devices of reference>"


def test_importing_the_module_imports_no_framework():
    code = f"""
        import sys, d2ldev.native
        show(sorted(set({FRAMEWORKS}) & set(sys.modules)))
    """
    assert run_python(code, hide=()) == [[]]


def test_a_third_party_s_backend_is_had_by_name(tmp_path):
    code = "from d2ldev.native import mine as d2l; show([d2l.num_gpus(), repr(d2l.try_gpu(1))])"
    (shown,) = run_python(code, path=[make_backend(tmp_path)])
    assert shown == [2, "array_api_strict.Device('device2')"]


@pytest.mark.parametrize("name", ["torhc", "pytroch", "tensorlfow", "jx", "mxnt", "referense"])
def test_a_misspelt_name_lists_the_choices(name):
    with pytest.raises(d2ldev.UnknownBackendError, match="known: torch, jax, tensorflow, mxnet"):
        exec(f"from d2ldev.native import {name}")


@pytest.mark.parametrize("name", ["__path__", "expit", "max", "try_gpu"])
def test_a_name_that_is_like_no_backend_s_is_an_attribute_error(name):
    # pickle asks every module for the function that it is about to write.
    with pytest.raises(AttributeError, match=f"{name}'; known: torch, jax, tensorflow, mxnet"):
        getattr(d2ldev.native, name)


def test_a_framework_that_is_missing_is_named_with_what_installs_it():
    code = """
        import d2ldev
        try:
            from d2ldev.native import pytorch as d2l
        except d2ldev.BackendNotInstalledError as error:
            show(error.fix)
    """
    assert run_python(code) == ["pip install 'd2ldev[torch]'"]
