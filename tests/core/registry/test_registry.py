"""Entry points: a third party's backend is found like a built-in one, and a broken one is told."""

from importlib.metadata import entry_points
from pathlib import Path

import processes
import pytest
from installs import find_extras
from processes import (
    BUILT_IN,
    GROUP,
    MINE,
    make_backend,
    make_distribution,
    make_package,
    run_python,
)

ERROR = """
    import d2ldev
    try:
        d2ldev.get_backend({name!r})
    except d2ldev.BackendNotInstalledError as error:
        show(str(error))
        show(type(error.__cause__).__name__)
    show(d2ldev.get_backend("reference").name)
"""


# -- a third party's backend ------------------------------------------------------------------


def test_the_built_in_backends_are_announced_by_the_same_entry_points():
    points = {point.name for point in entry_points(group=GROUP)}
    assert {*BUILT_IN} <= points


@pytest.mark.parametrize(
    "code",
    [
        "d2ldev.get_backend('mine')",
        "d2ldev.get_backend(' MINE ')",
        "d2ldev.set_backend('mine')",
        "d2ldev.use_backend('mine').__enter__()",
        "d2ldev.mine",
        "__import__('d2ldev', fromlist=['mine']).mine",
    ],
)
def test_a_third_party_s_backend_is_found_by_name(tmp_path, code):
    path = [make_backend(tmp_path)]
    assert run_python(f"import d2ldev; show({code}.name)", path=path) == ["mine"]


def test_a_third_party_s_backend_may_be_the_active_one_with_its_own_methods(tmp_path):
    code = "from d2ldev import backend; show(backend.name)"
    path = [make_backend(tmp_path)]
    assert run_python(code, path=path, environment={"D2LDEV_BACKEND": "mine"}) == ["mine"]


def test_a_third_party_s_name_is_read_without_regard_to_case(tmp_path):
    make_package(tmp_path, "shouting", MINE.replace("{name!r}", "'shouting'"))
    make_distribution(tmp_path, "shouting", {"SHOUTING": "shouting:MyFramework"})
    code = "import d2ldev; show(d2ldev.get_backend('shouting').name)"
    assert run_python(code, path=[tmp_path]) == ["shouting"]


def test_a_third_party_s_backend_gets_the_virtual_gpus_that_were_asked_for(tmp_path):
    code = "import d2ldev; show(d2ldev.get_backend('mine').num_gpus())"
    path = [make_backend(tmp_path)]
    assert run_python(code, path=path, environment={"D2LDEV_VIRTUAL_GPUS": "1"}) == [1]


def test_backend_of_finds_a_third_party_s_tensor_once_its_framework_is_imported(tmp_path):
    make_package(tmp_path, "my_framework", "class Tensor: pass")
    source = (
        MINE
        + """
    def __init__(self, virtual_gpus=None):
        from my_framework import Tensor

        super().__init__(virtual_gpus)
        self.tensors.types = (Tensor,)
"""
    )
    make_backend(tmp_path, requires=["my_framework"], source=source)
    code = """
        import my_framework, d2ldev
        show(d2ldev.backend_of(my_framework.Tensor()).name)
    """
    assert run_python(code, path=[tmp_path]) == ["mine"]


def test_a_backend_that_is_installed_after_the_start_is_found(tmp_path):
    code = f"""
        import os
        from pathlib import Path
        import d2ldev
        from processes import make_backend
        folder = Path({str(tmp_path)!r})
        show(d2ldev.available_backends())
        before = folder.stat()
        make_backend(folder)
        # As if it was installed in the same moment as something else before: the import system
        # tells by this time whether it has to look again.
        os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
        show(d2ldev.get_backend("mine").name)
        show(d2ldev.available_backends())
    """
    assert run_python(code, path=[tmp_path, Path(processes.__file__).parent]) == [
        ["reference"],
        "mine",
        ["mine", "reference"],
    ]


def test_a_framework_that_is_installed_after_the_start_is_found(tmp_path):
    make_backend(tmp_path, requires=["my_framework"])
    code = f"""
        from pathlib import Path
        import d2ldev
        show(d2ldev.available_backends())
        Path({str(tmp_path)!r}, "my_framework.py").touch()
        show(d2ldev.get_backend("mine").name)
    """
    assert run_python(code, path=[tmp_path]) == [["reference"], "mine"]


def test_threads_that_use_a_backend_first_get_one_object(tmp_path):
    make_backend(tmp_path)
    code = """
        import threading, d2ldev
        start, got = threading.Barrier(8), []
        def get():
            start.wait()
            got.append(id(d2ldev.get_backend("mine")))
        threads = [threading.Thread(target=get) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        show([len(got), len(set(got))])
    """
    assert run_python(code, path=[tmp_path]) == [[8, 1]]


def test_threads_that_use_the_handle_first_get_one_object():
    code = """
        import threading, d2ldev
        start, got = threading.Barrier(8), []
        def get():
            start.wait()
            got.append(id(d2ldev.active.active_backend()))
        threads = [threading.Thread(target=get) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        show([len(got), len(set(got))])
    """
    assert run_python(code, environment={"D2LDEV_BACKEND": "reference"}) == [[8, 1]]


# -- one that is broken -----------------------------------------------------------------------

MINE_FAILS = """
from d2ldev_reference import ReferenceFramework

class MyFramework(ReferenceFramework):
    name = "mine"

    def __init__(self, virtual_gpus=None):
        raise {error}
"""

LACKING = """
from d2ldev.contract import Framework, Tensors
from d2ldev_reference.devices import ReferenceDevices

class MyFramework(Framework):
    interface = 1
    name = "mine"
    distributions = ()

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.devices = ReferenceDevices(virtual_gpus)
"""

BROKEN = {
    "a module that fails to import": (
        {"source": "raise OSError('libcudart.so.12 is missing')"},
        "mine_backend.wiring:MyFramework fails to import: OSError: libcudart.so.12 is missing",
        "OSError",
    ),
    "a module that ends the process": (
        {"source": "raise SystemExit('no GPU, no fun')"},
        "mine_backend.wiring:MyFramework fails to import: SystemExit: no GPU, no fun",
        "SystemExit",
    ),
    "a backend that cannot be made": (
        {"source": MINE_FAILS.format(error="OSError('no driver')")},
        "mine_backend.wiring:MyFramework cannot be made: OSError: no driver",
        "OSError",
    ),
    "a backend whose making ends the process": (
        {"source": MINE_FAILS.format(error="SystemExit(1)")},
        "mine_backend.wiring:MyFramework cannot be made: SystemExit: 1",
        "SystemExit",
    ),
    "a module that is not there": (
        {"source": "import no_such_module"},
        "fails to import: ModuleNotFoundError: No module named 'no_such_module'",
        "ModuleNotFoundError",
    ),
    "a class that is not there": (
        {"source": ""},
        "fails to import: AttributeError: ",
        "AttributeError",
    ),
    "a class that is not a backend": (
        {"source": "class MyFramework: pass"},
        "mine_backend.wiring:MyFramework is not a subclass of d2ldev.framework.Framework",
        "NoneType",
    ),
    "an object that is not a class": (
        {"source": "MyFramework = 1"},
        "mine_backend.wiring:MyFramework is not a subclass of d2ldev.framework.Framework",
        "NoneType",
    ),
    "a framework that lacks modules": (
        {"source": LACKING},
        "mine_backend.wiring:MyFramework lacks the modules tensors",
        "NoneType",
    ),
    "a module that lacks methods": (
        {"source": LACKING.replace("self.devices = ReferenceDevices(virtual_gpus)", "Tensors()")},
        "mine_backend.wiring:MyFramework cannot be made: TypeError: Can't instantiate abstract",
        "TypeError",
    ),
    "a backend without its framework": (
        {"requires": ["no_such_module", "nor_this_one"]},
        "no_such_module and nor_this_one is not installed",
        "NoneType",
    ),
}


@pytest.mark.parametrize(("how", "problem", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_backend_is_reported_and_leaves_the_others_usable(tmp_path, how, problem, cause):
    make_backend(tmp_path, **how)
    message, chained, usable = run_python(ERROR.format(name="mine"), path=[tmp_path])
    assert "cannot use the mine backend: " in message
    assert problem in message
    assert "known: torch, " in message
    assert (chained, usable) == (cause, "reference")


INTERFACES = {
    "a newer one": (
        "interface = 99",
        "is written for interface 99, and d2ldev has interface 1",
        "a newer d2ldev: pip install",
    ),
    "an older one": (
        "interface = 0",
        "is written for interface 0, and d2ldev has interface 1",
        "pip install --upgrade mine-backend",
    ),
    "none": (
        "name = 'mine'",
        "states no version of the interface; that of d2ldev is 1",
        "interface = 1 in the class MyFramework",
    ),
}


@pytest.mark.parametrize(("line", "problem", "fix"), INTERFACES.values(), ids=INTERFACES.keys())
def test_a_backend_for_another_interface_is_refused_with_both_versions(
    tmp_path, line, problem, fix
):
    source = f"from d2ldev.framework import Framework\nclass MyFramework(Framework):\n    {line}"
    make_backend(tmp_path, source=source)
    message, _, usable = run_python(ERROR.format(name="mine"), path=[tmp_path])
    assert f"mine_backend.wiring:MyFramework {problem}" in message
    assert f"fix: {fix}" in message
    assert usable == "reference"


def test_an_entry_point_with_a_missing_module_is_reported(tmp_path):
    make_distribution(tmp_path, "gone", {"gone": "gone_package.backend:MyFramework"})
    message, chained, usable = run_python(ERROR.format(name="gone"), path=[tmp_path])
    assert "fails to import: ModuleNotFoundError: No module named 'gone_package'" in message
    assert (chained, usable) == ("ModuleNotFoundError", "reference")


def test_a_broken_backend_is_not_among_the_available(tmp_path):
    make_distribution(tmp_path, "gone", {"gone": "gone_package.backend:MyFramework"})
    code = "import d2ldev; show(d2ldev.available_backends())"
    assert run_python(code, path=[tmp_path]) == [["reference"]]


@pytest.mark.parametrize(
    "source", ["1 +", "requires = 3", "requires = needed()", "\0", "(" * 10_000]
)
def test_a_package_that_cannot_be_read_hinders_no_other(tmp_path, source):
    make_package(tmp_path, "bad_package", source)
    make_distribution(tmp_path, "bad", {"bad": "bad_package.backend:MyFramework"})
    code = """
        import d2ldev, array_api_strict
        x = array_api_strict.zeros(1)
        show([d2ldev.available_backends(), d2ldev.backend_of(x).name])
    """
    assert run_python(code, path=[tmp_path]) == [[["reference"], "reference"]]


def test_one_module_that_is_needed_may_be_given_without_a_tuple(tmp_path):
    make_package(tmp_path, "one_package", "requires = 'no_such_module'")
    make_distribution(tmp_path, "one", {"one": "one_package.backend:MyFramework"})
    message, *_ = run_python(ERROR.format(name="one"), path=[tmp_path])
    assert ": no_such_module is not installed" in message


def test_a_broken_backend_can_be_tried_again_after_its_repair(tmp_path):
    make_backend(tmp_path, requires=["my_framework"])
    code = f"""
        from pathlib import Path
        import d2ldev
        try:
            d2ldev.get_backend("mine")
        except d2ldev.BackendNotInstalledError:
            Path({str(tmp_path)!r}, "my_framework.py").touch()
        show(d2ldev.get_backend("mine").name)
    """
    assert run_python(code, path=[tmp_path]) == ["mine"]


@pytest.mark.parametrize("source", ["import no_such_module", "raise OSError"])
def test_a_built_in_backend_that_is_broken_names_its_extra(tmp_path, source):
    make_package(tmp_path, "torch")
    make_backend(tmp_path, "torch", requires=["torch"], source=source)
    message, *_ = run_python(ERROR.format(name="torch"), path=[tmp_path])
    assert "fix: reinstall it: pip install" in message
    assert find_extras(message) == ["torch"]


def test_a_framework_that_is_missing_names_its_extra():
    message, *_ = run_python(ERROR.format(name="torch"))
    assert "torch is not installed" in message
    assert find_extras(message) == ["torch"]


def test_the_error_of_a_third_party_s_backend_names_no_extra(tmp_path):
    make_backend(tmp_path, requires=["no_such_module"])
    message, *_ = run_python(ERROR.format(name="mine"), path=[tmp_path])
    assert message.endswith(
        "fix: install no_such_module, which mine_backend.wiring:MyFramework needs"
    )


def test_the_reference_backend_is_an_extra_of_d2ldev(tmp_path):
    make_backend(tmp_path, "reference", requires=["no_such_module"])
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("reference")
        except d2ldev.BackendNotInstalledError as error:
            show(error.fix)
    """
    (fix,) = run_python(code, path=[tmp_path])
    assert find_extras(fix) == ["reference"]


def test_a_folder_in_the_working_directory_is_not_a_framework(tmp_path):
    (tmp_path / "torch").mkdir()
    code = "import d2ldev; show('torch' in d2ldev.available_backends())"
    assert run_python(code, folder=tmp_path) == [False]


def test_a_folder_of_the_name_of_an_installed_framework_does_not_hide_it(tmp_path):
    make_package(tmp_path / "installed", "torch")
    (tmp_path / "working" / "torch").mkdir(parents=True)
    code = "import d2ldev; show('torch' in d2ldev.available_backends())"
    path = [tmp_path / "installed"]
    assert run_python(code, path=path, folder=tmp_path / "working") == [True]


def test_a_module_that_was_marked_as_missing_is_not_installed(tmp_path):
    make_package(tmp_path, "my_framework")
    make_backend(tmp_path, requires=["my_framework"])
    code = """
        import sys, d2ldev
        sys.modules["my_framework"] = None
        show(d2ldev.available_backends())
    """
    assert run_python(code, path=[tmp_path]) == [["reference"]]


def test_a_refused_number_of_virtual_gpus_is_not_a_missing_backend(tmp_path):
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("mine")
        except d2ldev.DeviceUnavailableError as error:
            show(error.attempted)
    """
    path = [make_backend(tmp_path)]
    environment = {"D2LDEV_VIRTUAL_GPUS": "3"}
    assert run_python(code, path=path, environment=environment) == ["make 3 virtual GPUs"]
