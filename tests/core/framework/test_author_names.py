"""``d2ldev.framework``: all that a backend imports is there, and each name says what it is."""

import ast
import importlib.util
import pydoc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import d2ldev
from d2ldev import framework, typing
from d2ldev.framework import testing

PUBLIC = {
    "d2ldev": d2ldev,
    "d2ldev.framework": framework,
    "d2ldev.framework.testing": testing,
    "d2ldev.typing": typing,
}


def imports_of(folder):
    """Return ``(module, name)`` of each import from d2ldev in the sources below a folder."""
    found = set()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "d2ldev":
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                found |= {(name, "") for name in names if name.partition(".")[0] == "d2ldev"}
    return found


def is_documented(module, name):
    """Return whether a public name has a docstring, in the module that defines it."""
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            source = import_module(node.module)
            if getattr(source, name, None) is not None and source is not module:
                return _has_docstring(source, name) or is_documented(source, name)
    return False


def _has_docstring(module, name):
    nested = getattr(module, name)
    if type(nested) is type(module):  # a module
        return bool(nested.__doc__)
    body = ast.parse(Path(module.__file__).read_text("utf-8")).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return ast.get_docstring(node) is not None
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))
            ) if found == name:
                return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False


BACKENDS = {
    **{
        name: Path(importlib.util.find_spec(f"d2ldev_{name}").origin).parent
        for name in ("torch", "jax", "tensorflow", "mxnet", "reference")
    },
    "tinygrad": Path(__file__).parents[3] / "examples" / "d2ldev-tinygrad",
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_imports_only_public_names(name):
    imported = imports_of(BACKENDS[name])
    assert ("d2ldev.framework", "Framework") in imported
    public = {(module, name) for module, each in PUBLIC.items() for name in each.__all__}
    assert sorted(imported - public) == []


@pytest.mark.parametrize("name", framework.__all__)
def test_each_public_name_has_a_docstring(name):
    assert is_documented(framework, name)


@pytest.mark.parametrize("name", testing.__all__)
def test_each_public_name_of_the_set_up_has_a_docstring(name):
    assert _has_docstring(testing, name)


def test_a_fresh_module_lists_all_public_names():
    """A process of its own: in this one a test may have imported the rare names."""
    program = "from d2ldev import framework; print(*set(framework.__all__) - set(dir(framework)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [])


@pytest.mark.parametrize("name", ["read_signature", "Objective", "shard_batch", "Group", "Watch"])
def test_help_shows_the_names_that_are_imported_at_their_first_use(name):
    text = pydoc.render_doc(framework, renderer=pydoc.plaintext)
    assert f" {name}(" in text
