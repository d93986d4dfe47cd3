"""What a backend has around the import of its framework is entered for the user's import, too."""

import zipfile

import pytest
from processes import make_distribution, make_package, run_python

# In place of MXNet's own, which needs MXNet.
SEEN = """
import sys, types
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
import d2ldev, d2ldev_mxnet

seen = []

@contextmanager
def importing():
    seen.append("before")
    yield
    seen.append("after")

module = types.ModuleType("d2ldev_mxnet.importing")
module.__spec__ = ModuleSpec(module.__name__, None)
module.importing = importing
sys.modules[module.__name__] = module
"""


@pytest.fixture
def mxnet(tmp_path):
    """The folder of a package ``mxnet`` with a part."""
    make_package(tmp_path, "mxnet", "import sys\nsys.modules['__main__'].seen.append('mxnet')")
    make_package(tmp_path / "mxnet", "part")
    return tmp_path


@pytest.mark.parametrize("statement", ["import mxnet", "from mxnet import part"])
def test_it_is_entered_around_an_import_of_the_user_s(mxnet, statement):
    code = f"{SEEN}{statement}\nimport mxnet.part\nshow(seen)"
    assert run_python(code, path=[mxnet]) == [["before", "mxnet", "after"]]


def test_it_is_left_when_the_import_fails(mxnet):
    (mxnet / "mxnet" / "__init__.py").write_text("raise OSError('no library')")
    code = f"""{SEEN}
try:
    import mxnet
except OSError as error:
    show([str(error), seen, "mxnet" in sys.modules])
"""
    # It has seen the error, and has passed it on.
    assert run_python(code, path=[mxnet]) == [["no library", ["before"], False]]


def test_what_was_imported_has_its_own_loader(mxnet):
    code = f"""{SEEN}
import mxnet
show([type(mxnet.__loader__).__name__, sorted(vars(mxnet.__loader__))])
"""
    assert run_python(code, path=[mxnet]) == [["SourceFileLoader", ["name", "path"]]]


def test_a_framework_whose_backend_has_nothing_around_it_is_imported_as_it_is(tmp_path):
    make_package(
        tmp_path, "torch", "import sys\nseen = [m for m in sys.modules if m.startswith('d2ldev_')]"
    )
    code = """
        import d2ldev, torch
        show([torch.seen, type(torch.__loader__).__name__])
    """
    assert run_python(code, path=[tmp_path]) == [[[], "SourceFileLoader"]]


def test_nobody_comes_between_whose_distribution_announces_the_name_of_another(mxnet):
    make_package(mxnet, "harmful_package", "raise SystemExit('harm')")
    make_distribution(mxnet, "harmful", {"mxnet": "harmful_package.backend:MyFramework"})
    code = f"{SEEN}import mxnet\nshow(seen)"
    assert run_python(code, path=[mxnet]) == [["mxnet"]]


def test_to_look_whether_a_framework_is_there_enters_nothing(mxnet):
    code = f"{SEEN}show(['mxnet' in d2ldev.available_backends(), seen])"
    assert run_python(code, path=[mxnet]) == [[True, []]]


def test_d2ldev_imported_again_enters_it_once(mxnet):
    code = f"""{SEEN}
import importlib
importlib.reload(d2ldev)
import mxnet
show(seen)
"""
    assert run_python(code, path=[mxnet]) == [["before", "mxnet", "after"]]


def test_two_who_ask_all_others_end(mxnet):
    code = f"""{SEEN}
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "mxnet":
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(name, path, target)):
                    return spec

sys.meta_path.insert(1, Finder())
import mxnet
show(seen)
"""
    assert run_python(code, path=[mxnet]) == [["before", "mxnet", "after"]]


def test_a_finder_of_before_python_3_4_is_passed_over(mxnet):
    code = f"""{SEEN}
class Finder:
    def find_module(self, name, path=None):
        return None

sys.meta_path.insert(0, Finder())
import mxnet
show(seen)
"""
    assert run_python(code, path=[mxnet]) == [["before", "mxnet", "after"]]


def test_a_framework_that_was_looked_for_before_is_imported_out_of_an_archive(mxnet):
    with zipfile.ZipFile(mxnet / "archive.zip", "w") as archive:
        archive.write(mxnet / "mxnet" / "__init__.py", "mxnet/__init__.py")
    code = f"""{SEEN}
import importlib.util
importlib.util.find_spec("mxnet")
import mxnet
show([seen, type(mxnet.__loader__).__name__])
"""
    found = run_python(code, path=[mxnet / "archive.zip"])
    assert found == [[["before", "mxnet", "after"], "zipimporter"]]


def test_what_is_found_can_be_pickled_and_read(mxnet):
    code = f"""{SEEN}
import importlib.util, pickle
spec = pickle.loads(pickle.dumps(importlib.util.find_spec("mxnet")))
show([spec.name, "append" in spec.loader.get_source("mxnet"), seen])
"""
    assert run_python(code, path=[mxnet]) == [["mxnet", True, []]]
