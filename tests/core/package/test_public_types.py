"""What the signatures of ``Backend`` say, and whether a user can name it."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import contextlib
import inspect
import typing

import pytest

import d2ldev
from d2ldev import Backend
from d2ldev import typing as public_types

# What a parameter or a result may be is the framework's own there, or anything at all.
OPAQUE = {
    ("dtype", "return"): "the framework's own dtype object",
    ("learner", "model"): "a model of any class of the framework",
    ("load", "return"): "whatever was saved",
    ("load_into", "obj"): "a model, an optimizer, or any nesting; the result has it as ``value``",
    ("mlp", "return"): "the framework's own class of models",
    ("named_tensors", "obj"): "a model, an optimizer, or any nesting",
    ("placement", "obj"): "a model, an optimizer, or any nesting",
    ("save", "obj"): "a model, an optimizer, or any nesting",
    ("timeit", "args"): "whatever the function takes",
    ("timeit", "kwargs"): "whatever the function takes",
}


def signatures():
    for name, method in inspect.getmembers(Backend, inspect.isfunction):
        if not name.startswith("_"):
            for each in typing.get_overloads(method) or [method]:
                yield name, inspect.signature(each)


def annotations():
    for method, signature in signatures():
        for parameter in list(signature.parameters.values())[1:]:
            yield method, parameter.name, parameter.annotation
        yield method, "return", signature.return_annotation


def test_every_opaque_annotation_has_its_reason():
    opaque = {(method, name) for method, name, text in annotations() if text in {"Any", "object"}}
    assert opaque == OPAQUE.keys()


def test_every_type_in_a_signature_is_exported():
    libraries = (builtins, typing, collections.abc, contextlib)
    standard = {name for each in libraries for name in dir(each)} - {"T"}
    exported = {*d2ldev.__all__, *public_types.__all__}
    found = {
        node.id
        for _, _, text in annotations()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name)
    }
    modules = {"npt"}
    assert found - standard - exported == {"T", *modules}


def test_a_backend_is_generic_in_its_tensors_and_its_devices():
    assert Backend.__parameters__ == (public_types.TensorT, public_types.NativeDeviceT)


def test_every_exported_type_is_there():
    assert [name for name in public_types.__all__ if not hasattr(public_types, name)] == []


@pytest.mark.parametrize("name", ["framework", "known_framework"])
def test_a_backend_shows_a_user_no_framework_of_its_author(reference, name):
    for owner in (Backend, reference, d2ldev.backend):
        assert name not in dir(owner)
        assert not hasattr(owner, name)
