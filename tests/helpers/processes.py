"""Python processes of their own, for what happens once in a process, and made-up distributions.

No test of the core imports a framework. Where one has to be there, it is a folder with an empty
package; where none may be there, ``hide`` keeps the installed ones out of sight.
"""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import Distribution, distribution

from d2ldev.framework.testing import framework_of

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
BUILT_IN = (*FRAMEWORKS, "reference")
GROUP = "d2ldev.backends"
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Variables of a process that is to find none of the machine's GPUs."""

# The import system's own finder, which does not see the given names in the given folders.
_HIDING = """
import sys
from importlib.machinery import PathFinder

class HidingFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name.partition(".")[0] in {names!r}:
            path = [entry for entry in sys.path if "site-packages" not in entry]
        return super().find_spec(name, path, target)

sys.meta_path = [HidingFinder if finder is PathFinder else finder for finder in sys.meta_path]
"""


def send(backend, obj):
    """Return what another process gets of an object that a backend sends to it."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj):
            return framework_of(backend).parallel.reduce(obj)

    file = io.BytesIO()
    Pickler(file).dump(obj)
    return pickle.loads(file.getvalue())


def run_python(code, *, hide=FRAMEWORKS, path=(), environment=None, folder=None):
    """Run ``code`` in a new process; what it gives to ``show(...)``, as a list.

    Args:
        code: Python source; ``show(value)`` hands back what JSON can hold.
        hide: modules that are not installed there, whatever is installed here.
        path: folders to be searched for modules and distributions.
        environment: variables to set. Those that begin with ``D2LDEV_`` are not inherited, and
            neither are the flags of this process's virtual GPUs.
        folder: the working directory, which is searched for modules first.
    """
    variables = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    for name in ("PYTHONSAFEPATH", "XLA_FLAGS"):
        variables.pop(name, None)
    variables["PYTHONPATH"] = extend_path(path)
    variables |= environment or {}
    source = [
        _HIDING.format(names=set(hide)),
        "import json, warnings",
        "warnings.simplefilter('always')",
        "def show(value): print('shown:' + json.dumps(value))",
        textwrap.dedent(code),
    ]
    lines = run_interpreter("-c", "\n".join(source), env=variables, cwd=folder).stdout.splitlines()
    return [json.loads(line.removeprefix("shown:")) for line in lines if line.startswith("shown:")]


def run_interpreter(*arguments, timeout=120, **options):
    """Run Python with arguments, which has to end with status 0; what it has written.

    Args:
        arguments: of the interpreter.
        timeout: seconds after which it fails the test.
        options: of ``subprocess.run``.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done


def extend_path(path):
    """Return ``PYTHONPATH`` with more folders before those that are in it.

    They come first in a new process, but for the folder of what it runs.
    """
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, path), *filter(None, [given])])


def make_package(folder, name, source=""):
    """Make an importable package of one file."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(source), encoding="utf-8")


def make_distribution(folder, name, points, group=GROUP):
    """Make what installing a distribution leaves behind, with its entry points."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8"
    )
    lines = [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


MINE = """
from d2ldev_reference import ReferenceFramework

class MyFramework(ReferenceFramework):
    name = {name!r}
"""


def make_backend(folder, name="mine", *, requires=(), libraries=(), environment=(), source=MINE):
    """Install into ``folder`` a third party's backend, a copy of the reference framework.

    It is a package ``<name>_backend``, whose class is in a module of its own. For the name of a
    built-in backend it is a d2ldev that has this one in the place of its own.
    """
    told = {"requires": requires, "libraries": libraries, "environment": environment}
    source_of_package = "".join(f"{key} = {tuple(value)!r}\n" for key, value in told.items())
    make_package(folder, f"{name}_backend", source_of_package)
    module = folder / f"{name}_backend" / "wiring.py"
    module.write_text(textwrap.dedent(source).replace("{name!r}", repr(name)), encoding="utf-8")
    point = {name: f"{name}_backend.wiring:MyFramework"}
    if name not in BUILT_IN:
        make_distribution(folder, f"{name}-backend", point)
        return folder
    before = folder / "d2ldev-1.0.dist-info"
    points = Distribution.at(before) if before.exists() else distribution("d2ldev")
    points = {each.name: each.value for each in points.entry_points if each.group == GROUP}
    shutil.rmtree(before, ignore_errors=True)
    make_distribution(folder, "d2ldev", points | point)
    return folder


def conform(folder, name, *options):
    """Run the suite with a folder installed, in that folder; how that ended.

    Args:
        folder: what ``make_backend`` made.
        name: the backend's.
        options: of pytest.
    """
    variables = {key: value for key, value in os.environ.items() if "D2LDEV_" not in key}
    # An environment of tox has options of its own.
    variables.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "d2ldev", "conformance", name]
    return subprocess.run(
        [*command, "--", f"--basetemp={folder / 'run'}", *options],
        env=variables | {"PYTHONPATH": extend_path([folder])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
