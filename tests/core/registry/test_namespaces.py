"""Frameworks without ``__init__.py`` in their folder, and folders that only have such a name."""

import pytest
from processes import MINE, make_backend, make_distribution, make_package, run_python

# As a namespace package of a framework: mlx has no ``__init__.py``, and mlx.core is a module.
USING = (
    "import engine.core\n"
    + MINE
    + """
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.tensors.types = (engine.core.Array,)
"""
)
FINDS = """
    import d2ldev
    show(d2ldev.available_backends().count("mine"))
    import engine.core
    show(d2ldev.backend_of(engine.core.Array()).name)
"""
# As setuptools makes one: Python asks this finder after the folders of ``sys.path``.
EDITABLE = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, {file!r}) if name == {name!r} else None

sys.meta_path.append(Finder)
"""


def read_refusal(path, **options):
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("mine")
            show("it is used")
        except d2ldev.BackendNotInstalledError as error:
            show(str(error))
    """
    (message,) = run_python(code, path=[path], **options)
    return message


@pytest.fixture
def engine(tmp_path):
    """Install a framework whose package has no ``__init__.py``; the folder."""
    make_package(tmp_path / "engine", "core", "class Array: pass")
    make_distribution(tmp_path, "engine-cpu", {})
    (record,) = tmp_path.glob("engine*/METADATA")
    (record.parent / "RECORD").write_text("engine/core/__init__.py,,\n", "utf-8")
    return tmp_path


@pytest.mark.parametrize("requires", ["engine", "engine.core"])
def test_a_backend_of_a_namespace_package_is_found(engine, requires):
    make_backend(engine, requires=[requires], source=USING)
    assert run_python(FINDS, path=[engine]) == [1, "mine"]


def test_a_folder_of_the_user_beside_a_namespace_package_hides_nothing(engine, tmp_path):
    make_backend(engine, requires=["engine"], source=USING)
    (tmp_path / "work" / "engine").mkdir(parents=True)
    assert run_python(FINDS, path=[engine], folder=tmp_path / "work") == [1, "mine"]


def test_a_class_of_another_part_of_a_namespace_is_no_backend_s(engine):
    make_backend(engine, requires=["engine.core"], source=USING)
    make_package(engine / "engine", "other", "class Array: pass")
    code = """
        import d2ldev, engine.core, engine.other
        try:
            d2ldev.backend_of(engine.other.Array())
        except d2ldev.UnsupportedValueError as error:
            show(error.problem.split(";")[0])
        import sys
        show("mine_backend.wiring" in sys.modules)
    """
    told = "it is not a tensor of an imported framework"
    assert run_python(code, path=[engine]) == [told, False]


@pytest.mark.parametrize("requires", ["engine", "engine.core"])
def test_a_folder_with_the_name_of_a_framework_is_no_framework(tmp_path, requires):
    make_backend(tmp_path, requires=[requires])
    (tmp_path / "engine").mkdir()
    message = read_refusal(tmp_path)
    assert f"{requires} is not installed; known: " in message
    assert "fix: install engine, which mine_backend.wiring:MyFramework needs" in message


@pytest.mark.parametrize("package", ["engine", "mine_backend"])
def test_a_folder_that_hides_an_editable_package_is_named(tmp_path, package):
    make_backend(tmp_path / "installed", requires=["engine"])
    make_package(tmp_path / "editable", package)
    file = tmp_path / "editable" / package / "__init__.py"
    finder = EDITABLE.format(name=package, file=str(file))
    (tmp_path / "installed" / "sitecustomize.py").write_text(finder, "utf-8")
    if package == "mine_backend":
        (tmp_path / "installed" / package).rename(tmp_path / "editable" / "theirs")
    work = tmp_path / "work"
    (work / package).mkdir(parents=True)
    message = read_refusal(tmp_path / "installed", folder=work)
    assert f"a folder {package} in the working directory hides the package {package}" in message
    assert "fix: start Python elsewhere, or rename the folder" in message


def test_a_package_of_a_backend_without_its_file_is_refused_with_the_file(tmp_path):
    make_backend(tmp_path)
    file = tmp_path / "mine_backend" / "__init__.py"
    file.unlink()
    message = read_refusal(tmp_path)
    assert f"the folder mine_backend in {tmp_path} has no __init__.py" in message
    assert f"fix: touch {file}" in message
