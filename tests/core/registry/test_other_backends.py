"""Whose an object is that a backend does not know: by where its class comes from."""

import pytest
from processes import make_backend, make_package, run_python

PROGRAM = """
    import sys, d2ldev
    {imports}
    reference = d2ldev.get_backend("reference")
    try:
        reference.place({obj}, "cpu")
    except d2ldev.UnsupportedValueError as error:
        show([name in error.problem for name in ("of the mine backend", "of the other backend")])
    show([name for name in ("mine", "other") if f"{{name}}_backend.wiring" in sys.modules])
"""
# A class that a backend knows, of a library that two share.
KNOWS = """
from d2ldev_reference import ReferenceFramework
from layers import Layer

class MyFramework(ReferenceFramework):
    name = {name!r}

    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        self.models.types = (*self.models.types, Layer)
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("engine", "layers"):
        make_package(tmp_path, name, "class Layer: pass\ndef init(): pass\n")
    return tmp_path


def read_shown(folder, imports, obj):
    return run_python(PROGRAM.format(imports=imports, obj=obj), path=[folder])


@pytest.mark.parametrize("obj", ["engine.Layer()", "[engine.Layer()]", "engine.Layer"])
def test_a_class_of_a_required_module_belongs_to_the_backend(folder, obj):
    make_backend(folder, requires=["engine"])
    assert read_shown(folder, "import engine", obj) == [[True, False], []]


@pytest.mark.parametrize(
    "obj", ["layers.Layer()", "layers.init", "type('My', (layers.Layer,), {})()"]
)
def test_a_class_and_a_function_of_a_library_of_a_backend_alone_are_its_own(folder, obj):
    make_backend(folder, requires=["engine"], libraries=["layers"])
    assert read_shown(folder, "import engine, layers", obj) == [[True, False], []]


def test_a_library_belongs_to_no_backend_before_its_framework_is_imported(folder):
    make_backend(folder, requires=["engine"], libraries=["layers"])
    assert read_shown(folder, "import layers", "layers.Layer()") == [[False, False], []]


def test_backends_that_share_a_library_are_asked(folder):
    make_backend(folder, "mine", requires=["engine"], libraries=["layers"])
    make_backend(folder, "other", requires=["engine"], libraries=["layers"], source=KNOWS)
    found = read_shown(folder, "import engine, layers", "layers.Layer()")
    assert found == [[False, True], ["mine", "other"]]


def test_a_package_that_is_broken_has_no_objects(folder):
    make_backend(folder, requires=["engine"])
    (folder / "mine_backend" / "__init__.py").write_text("requires = [", "utf-8")
    assert read_shown(folder, "import engine", "engine.Layer()") == [[False, False], []]
