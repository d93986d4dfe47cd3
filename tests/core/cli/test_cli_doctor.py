"""``d2ldev doctor``: what it finds, what it shows, and its exit status."""

import io
import json
import warnings

import pytest
from command_line import run_command
from installs import find_extras
from processes import MINE, make_backend, make_distribution, make_package, run_python
from rich.console import Console

from d2ldev.cli.doctor import format_bytes, show
from d2ldev.cli.examination import (
    BackendReport,
    Examination,
    add_devices,
    check_device,
    examine_device,
    try_elsewhere,
)
from d2ldev.cli.screen import collect_warnings
from d2ldev.framework import nvml
from d2ldev.framework.testing import framework_of
from d2ldev.registry import loading


def examine(*arguments, **options):
    """Return the document of ``d2ldev doctor --json``."""
    return json.loads(run_command("doctor", "--json", *arguments, **options).stdout)


@pytest.fixture(scope="module")
def doctor():
    """``d2ldev doctor`` on a machine without a framework."""
    return run_command("doctor")


@pytest.fixture(scope="module")
def document():
    """The document of that machine."""
    return examine()


def backend_in(document, name):
    return next(entry for entry in document["backends"] if entry["name"] == name)


def make_sick_backend(folder, module, method):
    """Install into ``folder`` a backend ``mine``, one of whose modules does one thing wrong."""
    return make_backend(
        folder,
        source=f"""
        from d2ldev_reference import ReferenceFramework

        class MyFramework(ReferenceFramework):
            name = "mine"

            def __init__(self, virtual_gpus=None):
                super().__init__(virtual_gpus)

                class Sick(type(self.{module})):
                    {method}

                self.{module}.__class__ = Sick
        """,
    )


# -- the active backend -----------------------------------------------------------------------


def test_the_active_backend_and_its_reason_come_first(doctor):
    first = doctor.stdout.splitlines()[0]
    assert first == "The active backend is reference: D2LDEV_BACKEND=reference."


def test_a_healthy_machine_has_exit_status_0(doctor):
    assert doctor.returncode == 0


@pytest.mark.parametrize("columns", [100, 60])
def test_no_line_is_wider_than_the_terminal(columns):
    lines = run_command("doctor", columns=columns, D2LDEV_VIRTUAL_GPUS="2").stdout.splitlines()
    assert max(map(len, lines)) <= columns


def test_the_variables_that_are_set_are_listed():
    done = examine(D2LDEV_VIRTUAL_GPUS="1")
    assert done["environment"] == {"D2LDEV_BACKEND": "reference", "D2LDEV_VIRTUAL_GPUS": "1"}


def test_versions_are_those_of_the_distributions(document):
    assert document["versions"].keys() == {"d2ldev", "python", "platform", "numpy"}
    versions = backend_in(document, "reference")["versions"]
    assert versions.keys() == {"array-api-strict", "numpy"}
    assert None not in versions.values()


def test_without_a_framework_the_fallback_is_a_note_and_no_warning():
    done = run_command("doctor", D2LDEV_BACKEND=None)
    assert "note: none of torch, jax, tensorflow, mxnet is installed" in done.stdout
    assert done.stderr == ""


def test_a_variable_that_d2ldev_does_not_have_is_remarked_on():
    done = run_command("doctor", D2LDEV_VIRTUAL_GPU="2")
    assert "note: D2LDEV_VIRTUAL_GPU has no effect" in done.stdout
    assert "D2LDEV_VIRTUAL_GPUS" in done.stdout


def test_the_variables_that_d2ldev_has_are_not_remarked_on():
    done = run_command("doctor", "--json", D2LDEV_STRICT="0", D2LDEV_VIRTUAL_GPUS="1")
    assert json.loads(done.stdout)["notes"] == []


def test_doctor_shows_that_the_fallback_trains_only_its_own_mlp():
    done = run_command("doctor", D2LDEV_BACKEND=None)
    assert "trains nothing but its own MLP" in " ".join(done.stdout.split())


# -- the document -----------------------------------------------------------------------------


def test_the_keys_of_the_document_are_stable(document):
    assert list(document) == [
        *("healthy", "active", "reason", "versions", "environment", "backends", "notes")
    ]
    assert list(document["backends"][0]) == [
        *("name", "status", "missing", "versions", "error", "devices", "real_gpus")
    ]
    memory = document["backends"][0]["devices"][0].pop("memory")
    assert list(memory) == ["used", "peak", "total"]
    assert 0 < memory["used"] <= memory["peak"] < memory["total"]
    assert document["backends"][0]["devices"][0] == {
        "device": "cpu",
        "platform": "cpu",
        "utilisation": None,
        "probe": "ok",
        "error": None,
    }


def test_nothing_but_the_document_is_on_the_output(tmp_path):
    noise = "import os\nprint('noise')\nos.write(1, b'more noise')\n"
    make_backend(tmp_path, source=noise + MINE)
    done = run_command("doctor", "--json", path=[tmp_path], D2LDEV_BACKEND="mine")
    assert json.loads(done.stdout)["active"] == "mine"
    assert "more noise" in done.stderr


def test_a_misspelt_backend_is_an_error_in_the_document_too():
    done = run_command("doctor", "--json", D2LDEV_BACKEND="refrence")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert (document["healthy"], document["active"]) == (False, None)
    assert "did you mean 'reference'?" in document["error"]


# -- what is misspelt or broken ---------------------------------------------------------------


def test_a_misspelt_backend_is_explained_and_has_exit_status_2():
    done = run_command("doctor", D2LDEV_BACKEND="refrence")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot use the backend 'refrence' (from D2LDEV_BACKEND")
    assert "did you mean 'reference'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_number_of_virtual_gpus_is_explained_and_has_exit_status_2():
    done = run_command("doctor", D2LDEV_VIRTUAL_GPUS="two")
    assert done.returncode == 2
    assert "error: cannot make 'two' virtual GPUs (from D2LDEV_VIRTUAL_GPUS)" in done.stderr


def test_an_invalid_number_of_virtual_gpus_is_not_a_backends_error():
    document = examine(D2LDEV_VIRTUAL_GPUS="two")
    assert {entry["error"] for entry in document["backends"]} == {None}


def test_a_missing_framework_is_named_with_the_line_that_installs_it(doctor):
    assert "torch missing: pip install" in doctor.stdout


def test_choosing_a_backend_that_is_missing_has_exit_status_1():
    done = run_command("doctor", D2LDEV_BACKEND="torch")
    assert done.returncode == 1
    assert find_extras(done.stderr) == ["torch"]


def test_a_broken_entry_point_is_shown_with_its_reason_and_breaks_nothing(tmp_path):
    make_package(tmp_path, "broken_backend", "requires = 3")
    make_distribution(tmp_path, "broken-backend", {"broken": "broken_backend.backend:Backend"})
    done = run_command("doctor", "--json", path=[tmp_path])
    entry = backend_in(json.loads(done.stdout), "broken")
    assert done.returncode == 0
    assert (entry["status"], entry["error"]) == (
        "broken",
        "TypeError: 'requires' in broken_backend is not written as a tuple of strings",
    )


def test_choosing_a_broken_backend_has_exit_status_1(tmp_path):
    make_backend(tmp_path, source="raise RuntimeError('a library is too old')")
    done = run_command("doctor", "--json", path=[tmp_path], D2LDEV_BACKEND="mine")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert "a library is too old" in document["error"]
    assert backend_in(document, "mine")["status"] == "broken"


# -- the other backends -----------------------------------------------------------------------


def test_an_unused_framework_is_not_imported(tmp_path):
    make_package(tmp_path, "torch", f"open({str(tmp_path / 'imported')!r}, 'w')")
    entry = backend_in(examine(path=[tmp_path], hide=False), "torch")
    assert (entry["status"], entry["devices"]) == ("installed", None)
    assert not (tmp_path / "imported").exists()


def test_all_tries_the_other_backends_as_well(tmp_path):
    make_backend(tmp_path)
    entry = backend_in(examine("--all", path=[tmp_path]), "mine")
    assert [device["probe"] for device in entry["devices"]] == ["ok", "ok", "ok"]


def test_a_backend_that_takes_its_process_with_it_does_not_end_the_doctor(tmp_path):
    make_backend(tmp_path, source="import os\nos._exit(7)")
    done = run_command("doctor", "--json", "--all", path=[tmp_path])
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert "status 7" in backend_in(document, "mine")["error"]
    assert backend_in(document, "reference")["devices"][0]["probe"] == "ok"


@pytest.mark.parametrize(
    "source", ["import time\ntime.sleep(1000)", "raise SystemExit", "raise BaseException"]
)
def test_the_doctor_runs_nothing_of_a_third_party_that_was_not_chosen(tmp_path, source):
    for name in ("harmful", "harmful_too"):
        make_package(tmp_path, f"{name}_package", source)
        make_distribution(tmp_path, name, {name: f"{name}_package.backend:MyFramework"})
    assert examine(path=[tmp_path], D2LDEV_BACKEND=None)["healthy"]


def test_all_does_not_wait_for_ever_for_a_backend(monkeypatch):
    report = BackendReport("mine", "installed")
    monkeypatch.setattr("d2ldev.cli.examination._PATIENCE", 0.001)
    try_elsewhere(report, [])
    assert report.error == "trying it took longer than 0.001 s"


def test_a_built_in_name_that_another_distribution_announces_is_broken_with_both_named(tmp_path):
    make_package(tmp_path, "impostor", "raise SystemExit")
    make_distribution(tmp_path, "impostor-of-it", {"torch": "impostor.backend:MyFramework"})
    entry = backend_in(examine(path=[tmp_path]), "torch")
    assert entry["status"] == "broken"
    assert {"impostor-of-it", "d2ldev"} <= set(entry["error"].replace(",", "").split())


# -- devices ----------------------------------------------------------------------------------


def test_every_device_is_tried(document):
    devices = backend_in(document, "reference")["devices"]
    assert [(device["device"], device["probe"]) for device in devices] == [
        *(("cpu", "ok"), ("gpu:0", "ok"), ("gpu:1", "ok"))
    ]


@pytest.mark.parametrize(
    ("module", "method", "words"),
    [
        (
            "tensors",
            "def transfer(self, xs, native, copy): raise OSError('the bus is gone')",
            "OSError: the bus is gone",
        ),
        (
            "tensors",
            "def to_numpy(self, x): return super().to_numpy(x) + 1",
            "4096 values that are not 64",
        ),
        ("devices", "def synchronize(self, device): raise OSError('stuck')", "OSError: stuck"),
        (
            "devices",
            "def platform(self, device): raise OSError('no such file')",
            "OSError: no such file",
        ),
    ],
)
def test_a_device_that_fails_is_shown_in_its_errors_words(tmp_path, module, method, words):
    make_sick_backend(tmp_path, module, method)
    done = run_command("doctor", path=[tmp_path], D2LDEV_BACKEND="mine")
    assert done.returncode == 1
    assert words in done.stdout


def test_gpus_that_cannot_be_counted_are_a_note_with_the_reason(tmp_path):
    make_sick_backend(tmp_path, "devices", "def count(self): raise OSError('no driver')")
    done = run_command("doctor", path=[tmp_path], columns=200, D2LDEV_BACKEND="mine")
    assert "mine found GPUs and cannot use them: no driver" in done.stdout + done.stderr


def test_a_build_for_cuda_without_a_driver_is_a_note_and_a_healthy_cpu(tmp_path):
    count = (
        "def count(self): from d2ldev.operations import nvml; nvml.has_driver = lambda: False; "
        "nvml.warn_without_driver('mine'); return 0"
    )
    make_sick_backend(tmp_path, "devices", count)
    done = run_command("doctor", path=[tmp_path], columns=200, D2LDEV_BACKEND="mine")
    assert done.returncode == 0
    text = done.stdout + done.stderr
    assert text.count("no NVIDIA driver here (libcuda.so.1)") == 1
    assert "note: mine is built for CUDA, and there is no NVIDIA driver here" in done.stdout


def test_a_tensor_on_another_device_than_requested_is_an_error(reference, monkeypatch):
    monkeypatch.setattr(type(reference), "device_of", lambda self, x: self.cpu())
    with pytest.raises(RuntimeError, match="the tensor of ones is on cpu, not on gpu:0"):
        check_device(reference, reference.gpu(0))


def test_a_report_of_a_device_without_an_error_has_none(reference):
    assert examine_device(reference, reference.gpu(1))["error"] is None


def test_it_says_how_busy_a_card_of_nvidias_is(reference, monkeypatch):
    monkeypatch.setattr(framework_of(reference).devices, "platform", lambda device: "cuda")
    monkeypatch.setattr(nvml, "utilisation_of", {0: 37, 1: None}.get)
    report = BackendReport("reference", "installed")
    add_devices(report, reference)
    console = Console(file=io.StringIO(), width=200)
    show(console, Examination(active="reference", reason="said so", backends=[report]))
    lines = console.file.getvalue().splitlines()
    (heading,) = (line for line in lines if "memory in use" in line)
    busy = [line[heading.index("busy") :].strip() for line in lines if "gpu:" in line]
    assert busy[:2] == ["37 %", ""]


def test_virtual_gpus_are_shown_as_virtual(doctor):
    assert "note: gpu:0, gpu:1 of reference: virtual." in doctor.stdout


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "reference finds no real GPU here."),
        (1, "they replace the 1 real GPU of the machine"),
        (3, "they replace the 3 real GPUs of the machine"),
    ],
)
def test_it_says_which_real_gpus_virtual_ones_replace(reference, monkeypatch, count, words):
    monkeypatch.setattr(loading, "count_real_gpus", lambda name: count)
    report = BackendReport("reference", "installed")
    add_devices(report, reference)
    console = Console(file=io.StringIO(), width=200)
    show(console, Examination(active="reference", reason="said so", backends=[report]))
    assert words in console.file.getvalue()


def test_without_virtual_gpus_nothing_mentions_them():
    assert ": virtual." not in run_command("doctor", D2LDEV_VIRTUAL_GPUS="0").stdout


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_a_number_of_bytes_is_readable(size, text):
    assert format_bytes(size) == text


def test_other_warnings_are_shown_as_ever(recwarn):
    with collect_warnings() as texts:
        warnings.warn("someone else's", UserWarning, stacklevel=1)
    assert texts == []
    assert [str(warning.message) for warning in recwarn] == ["someone else's"]


# -- in a notebook ----------------------------------------------------------------------------


def test_the_module_runs_in_the_process_of_a_notebook_and_examines_it():
    # What IPython's "%run -m d2ldev doctor" does.
    code = """
        import contextlib, io, runpy, sys, d2ldev
        d2ldev.virtual_gpus(1)
        d2ldev.set_backend("reference")
        sys.argv = ["d2ldev", "doctor"]
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            runpy.run_module("d2ldev", run_name="__main__")
        show(shown.getvalue())
    """
    (text,) = run_python(code)
    assert text.startswith("The active backend is reference: set_backend.")
    assert "gpu:0 of reference: virtual." in text
    assert "gpu:1" not in text


def test_other_backends_have_the_virtual_gpus_of_the_process_that_examines():
    code = """
        import d2ldev
        from d2ldev.cli.examination import find_report, try_elsewhere
        d2ldev.virtual_gpus(1)
        report = find_report("reference")
        try_elsewhere(report, [])
        show([device["device"] for device in report.devices])
    """
    assert run_python(code) == [["cpu", "gpu:0"]]
