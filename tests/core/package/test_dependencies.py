"""d2ldev alone brings NumPy alone: what is missing is named by the call that needs it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from installs import find_extras
from processes import FRAMEWORKS, make_package, run_python

import d2ldev
from d2ldev import PackageNotInstalledError
from d2ldev.files.format.container import numpy_dtype, storage_of
from d2ldev.framework import import_optional

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MODULES = {
    "cli": ("rich", "typer"),
    "cuda": ("pynvml",),
    "files": ("ml_dtypes", "safetensors", "xxhash"),
    "memory": ("psutil",),
    "plots": ("matplotlib",),
    "reference": ("array_api_strict",),
    "test": ("hypothesis", "pytest", "xdist"),
}
"""The modules that each extra brings, beside those of other extras."""
OPTIONAL = tuple(module for modules in MODULES.values() for module in modules)


def without(*modules, frameworks=FRAMEWORKS):
    """Return what ``run_python`` hides: modules, and the frameworks."""
    return {"hide": (*frameworks, *modules)}


def packages_of(extra):
    """Return the names of the distributions of an extra, also those of the extras in it."""
    names = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name, among = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if name == "d2ldev":
            names = names.union(*map(packages_of, among.split(",")))
        else:
            names.add(name)
    return names


def test_numpy_is_all_that_is_required():
    assert [re.match(r"[\w-]+", each)[0] for each in PROJECT["dependencies"]] == ["numpy"]


def test_the_extra_all_is_every_extra_without_a_framework():
    named = {name: packages_of(name) for name in MODULES}
    assert packages_of("all") == set().union(*named.values())
    assert packages_of("all").isdisjoint({"torch", "jax", "flax", "keras", "mxnet"})


def test_the_command_is_the_one_that_checks_its_packages():
    assert PROJECT["scripts"] == {"d2ldev": "d2ldev.cli:run_command"}


def test_every_public_name_is_there_without_any_of_them():
    code = """
        import d2ldev
        for name in d2ldev.__all__:
            getattr(d2ldev, name)
        show(d2ldev.available_backends())
    """
    assert run_python(code, **without(*OPTIONAL)) == [[]]


def test_the_core_computes_with_a_framework_and_without_any_of_them():
    """The reference backend stands for a framework."""
    code = """
        import numpy as np
        from d2ldev import Trainer, backend
        data = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))] * 2
        history = Trainer(1, num_gpus=2).fit(backend.mlp([2, 1]), data)
        show(len(history["loss"]))
    """
    others = [module for module in OPTIONAL if module != "array_api_strict"]
    found = run_python(code, environment={"D2LDEV_BACKEND": "reference"}, **without(*others))
    assert found == [1]


ASKING = """
import d2ldev
from d2ldev import backend
try:
    {call}
except d2ldev.D2LDevError as error:
    show([type(error).__name__, str(error)])
"""


@pytest.mark.parametrize(
    "call", ["backend.num_gpus()", "repr(backend)", "backend.ones(2)", "d2ldev.Trainer(1)"]
)
def test_without_framework_and_reference_backend_the_error_has_the_install_line(call):
    ((name, text),) = run_python(ASKING.format(call=call), **without("array_api_strict"))
    assert name == "BackendNotInstalledError"
    assert "none of torch, jax, tensorflow, mxnet is installed" in text
    assert "the reference backend lacks array_api_strict" in text
    assert find_extras(text) == ["torch", "reference"]
    assert text.endswith(" computes without one")


@pytest.mark.parametrize(
    "call", ["d2ldev.get_backend('reference')", "d2ldev.set_backend('reference')"]
)
def test_the_reference_backend_names_its_extra(call):
    ((name, text),) = run_python(ASKING.format(call=call), **without("array_api_strict"))
    assert name == "BackendNotInstalledError"
    assert find_extras(text) == ["reference"]


FILES = """
import os
import numpy as np
import d2ldev
from d2ldev import Trainer, backend

data = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))] * 2
net, x = backend.mlp([2, 1]), {{"x": backend.ones(2)}}

def numbers():
    return [backend.to_numpy(each).tolist() for each in backend.named_tensors(net).values()]

before = numbers()
try:
    {call}
except d2ldev.PackageNotInstalledError as error:
    show([error.attempted, error.problem, error.fix])
show([os.path.exists("new.safetensors"), before == numbers()])
"""


@pytest.mark.parametrize(
    ("call", "attempted"),
    [
        ("backend.save(x, 'new.safetensors')", "save to new.safetensors"),
        ("backend.load('any.safetensors')", "load any.safetensors"),
        ("backend.load_into(x, 'any.safetensors')", "load any.safetensors into dict"),
        (
            "Trainer(1).fit(net, data, checkpoint='new.safetensors')",
            "save the state of a run",
        ),
    ],
)
@pytest.mark.parametrize("module", ["xxhash", "safetensors"])
def test_files_name_their_extra_before_anything_is_done(tmp_path, call, attempted, module):
    found = run_python(
        FILES.format(call=call),
        environment={"D2LDEV_BACKEND": "reference"},
        folder=tmp_path,
        **without(module),
    )
    (told, problem, fix), state = found
    assert (told, state) == (attempted, [False, True])
    assert problem == f"{module} cannot be imported: No module named '{module}'"
    assert find_extras(fix) == ["files"]


@pytest.mark.parametrize(
    "ask", [lambda: numpy_dtype("bfloat16"), lambda: storage_of("float8_e3m4")], ids=range(2)
)
def test_dtypes_that_numpy_lacks_name_the_extra(monkeypatch, ask):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(PackageNotInstalledError, match="in NumPy: ml_dtypes cannot") as caught:
        ask()
    assert find_extras(caught.value.fix) == ["files"]


@pytest.mark.parametrize("module", ["typer", "rich"])
@pytest.mark.parametrize("arguments", [["doctor"], ["--version"], ["launch", "program.py"], []])
def test_the_command_names_its_extra_in_one_line(module, arguments):
    hide = f"import sys; sys.modules[{module!r}] = None; "
    code = f"{hide}from d2ldev.cli import run_command; run_command()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: cannot run the command d2ldev: {module} cannot be imported")
    assert find_extras(line) == ["cli"]


def test_progress_is_shown_in_lines_without_rich(reference, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    net, x = reference.mlp([2, 1]), reference.ones((4, 2))
    trainer = d2ldev.Trainer(2, backend=reference, enable_progress_bar=True)
    trainer.fit(net, [(x, reference.ones((4, 1)))])
    assert "epoch 2/2: loss" in capsys.readouterr().out


def test_a_package_that_fails_to_import_is_named_with_its_own_error(tmp_path, monkeypatch):
    make_package(tmp_path, "a_broken_package", "raise ImportError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PackageNotInstalledError) as caught:
        import_optional("a_broken_package", "do this", extra="files")
    problem, fix = str(caught.value).splitlines()
    assert problem == "cannot do this: a_broken_package cannot be imported: no library"
    assert find_extras(fix) == ["files"]
    assert isinstance(caught.value, ImportError)


INSTALLED = {
    "from a folder": (
        {"url": "file:///home/me/my%20d2ldev", "dir_info": {}},
        "pip install '/home/me/my d2ldev[files]'",
    ),
    "editable": (
        {"url": "file:///home/me/d2ldev", "dir_info": {"editable": True}},
        "pip install -e '/home/me/d2ldev[files]'",
    ),
    "from a wheel": (
        {"url": "file:///tmp/d2ldev-0.1.0-py3-none-any.whl", "archive_info": {}},
        "pip install 'd2ldev[files] @ file:///tmp/d2ldev-0.1.0-py3-none-any.whl'",
    ),
    "from a repository": (
        {"url": "https://host/d2ldev", "vcs_info": {"vcs": "git", "commit_id": "a1b2"}},
        "pip install 'd2ldev[files] @ git+https://host/d2ldev@a1b2'",
    ),
    "from a folder of a repository": (
        {
            "url": "https://host/all",
            "vcs_info": {"vcs": "git", "commit_id": "a1b2"},
            "subdirectory": "python/d2ldev",
        },
        "pip install 'd2ldev[files] @ git+https://host/all@a1b2#subdirectory=python/d2ldev'",
    ),
    "from an index": (None, "pip install 'd2ldev[files]'"),
}


@pytest.mark.parametrize(("record", "line"), INSTALLED.values(), ids=INSTALLED.keys())
def test_the_install_line_names_where_d2ldev_came_from(monkeypatch, record, line):
    files = {"direct_url.json": record and json.dumps(record)}
    found = {"d2ldev": SimpleNamespace(read_text=files.get)}
    monkeypatch.setattr("importlib.metadata.distribution", found.__getitem__)
    with pytest.raises(PackageNotInstalledError) as caught:
        import_optional("no_such_package", "do this", extra="files")
    assert caught.value.fix == line


def test_the_extras_that_errors_name_are_there():
    sources = "".join(
        path.read_text("utf-8")
        for folder in ("d2ldev", "backends")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    # It names where d2ldev came from, with write_install.
    assert re.findall(r"pip install ['\"]?d2ldev\b.*", sources) == []
    named = {*re.findall(r'extra="([\w-]+)"', sources)}
    named |= {*re.findall(r"write_install\(['\"]([\w-]+)", sources)}
    assert {"cli", "cuda", "files", "memory", "test"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()
