"""Each of the leaks that ``tests/conftest.py`` promises to catch, and nothing else."""

import json
import os
from pathlib import Path

import pytest
from d2ldev_conformance.leaks import LeakError, children_use, detect_leaks
from processes import extend_path, run_interpreter

import d2ldev
from d2ldev.framework.testing import framework_of

TESTS = Path(__file__).parent.parent
CONFTEST = (TESTS / "conftest.py").read_text(encoding="utf-8")


@pytest.fixture
def run_test(pytester, monkeypatch):
    """Runs the body of a test under the project's own conftest.py."""
    path = [str(TESTS / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def run(*lines, how=pytester.runpytest_inprocess):
        pytester.makeconftest(CONFTEST)
        body = "\n    ".join(lines)
        pytester.makepyfile(f"def test_it(tmp_path, monkeypatch):\n    {body}\n")
        return how("-p", "no:cacheprovider")

    return run


@pytest.mark.parametrize(("given", "found"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_what_the_tests_run_and_start_has_one_thread_unless_it_is_said(given, found):
    path = extend_path([TESTS, TESTS / "helpers"])
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = "import os, conftest; print(os.environ['OMP_NUM_THREADS'])"
    assert (
        run_interpreter("-c", code, env={**kept, "PYTHONPATH": path, **given}).stdout
        == f"{found}\n"
    )


def assert_leak(result, message):
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["E *LeakError: the test left something behind:", f"E  *{message}"])


REFERENCE = "d2ldev.registry.selection.get_framework('reference')"
ROOM = f"{REFERENCE}.devices"
ANOTHER = f"d2ldev.Backend(type({REFERENCE})(virtual_gpus=0))"
LEAKS = {
    "a variable that is set": (
        ["import os", "os.environ['LEFT'] = '1'"],
        "the environment variable LEFT: None became '1'",
    ),
    "a variable that is removed": (
        ["import os", "del os.environ['PATH']"],
        "the environment variable PATH: '*' became None",
    ),
    "a file in the working directory": (
        ["open('left.txt', 'w').close()"],
        "a file in the working directory: left.txt",
    ),
    "a file in the temporary directory": (
        ["import os, tempfile", "os.close(tempfile.mkstemp(suffix='.left')[0])"],
        "a file in the temporary directory: *.left. Name a file *provision.LASTING_FILES, *",
    ),
    "a file that another process leaves in the temporary directory": (
        [
            "import subprocess, sys",
            "code = 'import tempfile; tempfile.mkdtemp(suffix=\".left\")'",
            "subprocess.run([sys.executable, '-c', code], check=True)",
        ],
        "a file in the temporary directory: *.left. Name a file *provision.LASTING_FILES, *",
    ),
    "another working directory": (
        ["import os", "os.chdir(tmp_path)"],
        "the working directory was changed to *",
    ),
    "a patched function of os": (
        ["import os", "os.getpid = lambda: 1"],
        "os.getpid was replaced",
    ),
    "a patched builtin": (
        ["import builtins", "builtins.input = lambda *_: ''"],
        "builtins.input was replaced",
    ),
    "a patched function of NumPy": (
        ["import numpy", "numpy.asarray = numpy.array"],
        "numpy.asarray was replaced",
    ),
    "a patched function of d2ldev": (
        ["from d2ldev.registry import discovery", "discovery.rank = print"],
        "d2ldev.registry.discovery.rank was replaced",
    ),
    "a patched method of d2ldev": (
        ["import d2ldev", "d2ldev.Device.__str__ = repr"],
        "d2ldev.device.Device.__str__ was replaced",
    ),
    "a patched method of a module": (
        ["import d2ldev", f"type({ROOM}).count = print"],
        "d2ldev_reference.devices.ReferenceDevices.count was replaced",
    ),
    "a patched method that a module inherits": (
        ["import d2ldev", f"type({ROOM}).memory = print"],
        "d2ldev_reference.devices.ReferenceDevices.memory was replaced",
    ),
    "a patched method of one module": (
        ["import d2ldev", f"{ROOM}.count = lambda: 8"],
        "an object of ReferenceDevices.count was replaced",
    ),
    "another active backend": (
        ["import d2ldev", f"d2ldev.set_backend({ANOTHER})"],
        "the active backend: *",
    ),
    "a use_backend that was not left": (
        ["import d2ldev", "d2ldev.use_backend('reference').__enter__()"],
        "a scope that was not left, d2ldev_backends: *",
    ),
    "a device that was not left": (
        ["import d2ldev", "d2ldev.gpu(1).__enter__()"],
        "a scope that was not left, reference_scope: *",
    ),
    "another number of virtual GPUs": (
        ["from d2ldev import settings", "settings.choose_virtual_gpus(8)"],
        "virtual_gpus: * became 8",
    ),
}


@pytest.mark.parametrize(("body", "message"), LEAKS.values(), ids=LEAKS.keys())
def test_a_test_fails_that_leaks(run_test, body, message):
    assert_leak(run_test(*body), f"*{message}")


def test_a_test_fails_that_leaks_a_thread(run_test, pytester):
    result = run_test(
        "import threading",
        "stop = threading.Event()",
        "threading.Thread(target=stop.wait, name='left', daemon=True).start()",
        how=pytester.runpytest_subprocess,  # where the thread ends with its process
    )
    hint = "Name a thread that the framework ends with the process in provision.LASTING_THREADS, "
    hint += "with * for numbers"
    assert_leak(result, f"the thread 'left' is still running. {hint}")


def test_a_test_passes_that_leaks_nothing(run_test):
    result = run_test(
        "import os, tempfile, threading, d2ldev",
        "monkeypatch.setenv('LEFT', '1')",
        "monkeypatch.setattr(os, 'getpid', lambda: 1)",
        "monkeypatch.chdir(tmp_path)",
        "open('a file', 'w').close()",
        "tempfile.TemporaryDirectory().cleanup()",
        "thread = threading.Thread(target=print)",
        "thread.start()",
        "thread.join()",
        "with d2ldev.use_backend('reference'), d2ldev.gpu(1): pass",
    )
    result.assert_outcomes(passed=1)


def test_a_test_passes_whose_thread_is_one_that_the_framework_never_ends(run_test, pytester):
    result = run_test(
        "import threading",
        "from d2ldev_reference import provision",
        "provision.LASTING_THREADS = ['lasting', 'worker-* (pool)']",
        "for name in ('lasting', 'worker-7 (pool)'):",
        "    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()",
        how=pytester.runpytest_subprocess,  # where the thread ends with its process
    )
    result.assert_outcomes(passed=1)


def test_a_test_passes_whose_file_is_one_that_the_framework_keeps(run_test, pytester):
    result = run_test(
        "import pathlib, tempfile",
        "from d2ldev_reference import provision",
        "provision.LASTING_FILES = ['kernels*']",
        "folder = pathlib.Path(tempfile.gettempdir(), 'kernels-1')",
        "folder.mkdir()",
        "(folder / 'add.so').touch()",
        how=pytester.runpytest_subprocess,  # where what is declared ends with its process
    )
    result.assert_outcomes(passed=1)


def test_the_test_after_one_that_leaks_finds_an_empty_folder(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
        import os, shutil

        def test_leave():
            open("left.txt", "w").close()

        def test_remove():
            shutil.rmtree(os.getcwd())

        def test_find_nothing():
            assert os.listdir() == []
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=2)


def test_in_the_folder_of_a_run_a_test_changes_no_variable(tmp_path, monkeypatch):
    with children_use(tmp_path):
        for name in ("putenv", "unsetenv"):
            monkeypatch.setattr(os, name, lambda *change: pytest.fail(f"changed: {change}"))
        with detect_leaks(folder=tmp_path):
            pass
        monkeypatch.undo()


def test_a_file_from_before_a_test_is_not_its_own_and_stays(tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary" / "of-a-fixture").touch()
    with pytest.raises(LeakError) as raised, detect_leaks(folder=tmp_path):
        (tmp_path / "temporary" / "of-the-test").touch()
    (leak,) = raised.value.leaks
    assert leak.startswith("a file in the temporary directory: of-the-test. ")
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == ["of-a-fixture"]


@detect_leaks()
def leak_one_of_each():
    os.environ["KEPT"] = "after"
    os.getpid = lambda: 1
    os.chdir("/")
    d2ldev.set_backend(d2ldev.Backend(type(framework_of(d2ldev.get_backend("reference")))(0)))


def state():
    return os.environ["KEPT"], os.getpid, Path.cwd(), d2ldev.backend.num_gpus()


def test_changed_settings_are_restored(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    before = state()
    with pytest.raises(LeakError):
        leak_one_of_each()
    assert state() == before


def test_every_leak_is_in_one_message(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    with pytest.raises(LeakError) as error:
        leak_one_of_each()
    assert [leak.partition(":")[0] for leak in error.value.leaks] == [
        "os.getpid was replaced",
        "the active backend",
        "the environment variable KEPT",
        "the working directory was changed to /",
    ]


@detect_leaks()
def leak_and_fail():
    os.environ["LEFT"] = "1"
    raise ZeroDivisionError


def test_a_failing_block_keeps_its_own_exception_and_names_its_leaks():
    with pytest.raises(ZeroDivisionError) as error:
        leak_and_fail()
    assert "the environment variable LEFT" in error.value.__notes__[0]


@detect_leaks([json])
def patch_json():
    json.dumps = repr


def test_functions_of_further_modules_are_watched():
    dumps = json.dumps
    with pytest.raises(LeakError, match=r"json\.dumps was replaced"):
        patch_json()
    assert json.dumps is dumps


@detect_leaks()
def put_back(module):
    module.count = module.count  # as MonkeyPatch of pytest before 9.2 does it


def test_an_inherited_method_that_is_put_back_on_its_object_is_no_leak(reference):
    module = framework_of(reference).devices
    put_back(module)
    assert "count" not in vars(module)
