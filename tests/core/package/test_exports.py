"""What ``d2ldev`` has at the top; what few programs need is imported when it is asked for."""

import importlib.util
import os

import pytest
from processes import run_interpreter, run_python

import d2ldev


@pytest.mark.parametrize("name", d2ldev.__all__)
def test_every_name_is_there(name):
    assert getattr(d2ldev, name) is not None


def test_the_public_names_alone_are_listed_before_and_after_their_import():
    code = """
        import d2ldev
        show(dir(d2ldev) == sorted(d2ldev.__all__))
        import d2ldev.training.trainer, d2ldev.typing, d2ldev.framework, d2ldev.native
        for module in (d2ldev, d2ldev.framework):
            show(dir(module) == sorted(module.__all__))
        show(dir(d2ldev.native) == ["NativeDevices"])
    """
    assert run_python(code) == [True] * 4


def test_a_program_without_a_backend_imports_only_its_needs():
    code = """
        import sys, d2ldev
        show(sorted(module for module in sys.modules if module.startswith("d2ldev")))
    """
    assert run_python(code) == [
        [
            "d2ldev",
            "d2ldev.errors",
            "d2ldev.locks",
            "d2ldev.registry",
            "d2ldev.registry.discovery",
        ]
    ]


@pytest.mark.parametrize("module", ["enum", "importlib.metadata", "inspect", "re", "typing"])
def test_slow_modules_of_the_standard_library_are_not_imported(module):
    name = repr(module)
    code = f"import sys; sys.modules.pop({name}, None); import d2ldev; print({name} in sys.modules)"
    environment = {**os.environ, "D2LDEV_VIRTUAL_GPUS": ""}
    assert run_interpreter("-c", code, env=environment).stdout == "False\n"


def test_with_virtual_gpus_the_import_alone_sets_what_frameworks_read_and_imports_none():
    code = """
        import sys, d2ldev
        heavy = ("numpy", "torch", "jax", "tensorflow", "mxnet", "array_api_strict", "typer")
        show([name for name in heavy if name in sys.modules])
        show("d2ldev.active" in sys.modules)
    """
    assert run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": "2"}) == [[], True]
    assert run_python(code, environment={"D2LDEV_VIRTUAL_GPUS": ""}) == [[], False]


def test_an_invalid_number_of_virtual_gpus_is_no_error_of_the_import():
    variables = {"D2LDEV_VIRTUAL_GPUS": "two"}
    assert run_python("import d2ldev; show(1)", environment=variables) == [1]


def test_a_device_finds_the_active_backend_at_first_use():
    code = """
        from d2ldev.device import gpu
        with gpu(1):
            from d2ldev import backend
            show(str(backend.device_of(backend.ones(1))))
    """
    assert run_python(code, environment={"D2LDEV_BACKEND": "reference"}) == ["gpu:1"]


def test_a_module_of_the_core_is_an_attribute_before_its_import():
    assert run_python("import d2ldev; show(d2ldev.settings.BACKEND)") == ["D2LDEV_BACKEND"]


@pytest.mark.parametrize("name", d2ldev.__all__)
def test_no_name_is_that_of_a_module_which_would_take_its_place_when_it_is_imported(name):
    assert importlib.util.find_spec(f"d2ldev.{name}") is None


def test_a_module_replaced_before_the_first_use_stays_replaced():
    code = """
        import d2ldev
        d2ldev.get_backend = "mine"
        d2ldev.reference.num_gpus()
        show(d2ldev.get_backend)
    """
    assert run_python(code) == ["mine"]


def test_threads_that_ask_while_the_names_are_imported_wait_for_them():
    code = """
        import sys, threading, time, d2ldev
        class Slow:
            def find_spec(self, name, *_):
                if name == "d2ldev.operations":
                    time.sleep(0.5)
        sys.meta_path.insert(0, Slow())
        barrier, found = threading.Barrier(16), []
        names = ["backend", "reference", "gpu", "settings"]
        def ask(name):
            barrier.wait()
            found.append(hasattr(d2ldev, name))
        threads = [threading.Thread(target=ask, args=(name,)) for name in names * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        show([len(found), all(found)])
    """
    assert run_python(code) == [[16, True]]


@pytest.mark.parametrize("name", ["ArrayLoader", "DeviceLog", "Schedule", "Trainer"])
def test_training_is_imported_at_its_first_use(name):
    code = f"""
        import sys, d2ldev
        modules = {{"callbacks", "data", "log", "trainer"}}
        def loaded():
            return sorted(m for m in modules if f"d2ldev.training.{{m}}" in sys.modules)
        show(loaded())
        show(d2ldev.{name}.__name__)
        show(d2ldev.{name} is d2ldev.{name})
    """
    assert run_python(code) == [[], name, True]


def test_modules_for_a_launch_are_not_imported():
    code = """
        import sys, d2ldev
        rare = {"d2ldev.distributed", "selectors", "socket"}
        show(sorted(rare & set(sys.modules)))
    """
    assert run_python(code) == [[]]


def test_a_program_that_is_not_launched_imports_no_group_of_processes():
    code = """
        import sys
        from d2ldev import backend
        from d2ldev import Trainer
        backend.to(backend.ones(2), "cpu")
        show("d2ldev.distributed.group" in sys.modules)
    """
    assert run_python(code, environment={"D2LDEV_BACKEND": "reference"}) == [False]


def test_operations_that_few_programs_need_are_imported_at_their_first_use():
    code = """
        import sys
        from d2ldev import backend, use_backend
        rare = {"dlpack", "mlp", "parallel", "prefetching", "steps", "timing"}
        def loaded():
            return sorted(m for m in rare if f"d2ldev.operations.{m}" in sys.modules)
        before = loaded()
        with use_backend("reference") as b:
            b.mlp([2, 2])
            list(b.prefetch([b.ones(2)], "cpu"))
            b.split(b.ones(2), ["cpu"])
            b.timeit(lambda: None, seconds=0.001)
        show([before, [m for m in loaded() if m != "steps"]])
    """
    assert run_python(code) == [[[], ["dlpack", "mlp", "parallel", "prefetching", "timing"]]]


@pytest.mark.parametrize("name", ["Traineer", "", "training.data", "a name", "_nothing"])
def test_a_missing_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"no attribute {name!r}"):
        getattr(d2ldev, name)
