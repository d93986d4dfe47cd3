"""What the public signatures say, and whether a user can name their types."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import contextlib
import inspect
import os
import sys
import types
import typing

import numpy.typing
import pytest

import d2ldev
from d2ldev import Backend, results
from d2ldev import typing as public_types
from d2ldev.distributed import launcher

NESTING = "a model, an optimizer, or any nesting"
MODEL = "a model of any class of the framework"
OVERRIDE = "an override names the type of its own program"

OPAQUE = {
    ("Backend.learner", "model"): MODEL,
    ("Backend.load_into", "obj"): f"{NESTING}; the result has it as ``value``",
    ("Backend.named_tensors", "obj"): NESTING,
    ("Backend.placement", "obj"): NESTING,
    ("Backend.save", "obj"): NESTING,
    ("Backend.summarize", "obj"): NESTING,
    ("Backend.timeit", "args"): "whatever the function takes",
    ("Backend.timeit", "kwargs"): "whatever the function takes",
    ("Group.gather", "value"): "what JSON can hold",
    ("Trainer.fit", "model"): MODEL,
    ("Trainer.on_step_end", "loss"): OVERRIDE,
    ("Trainer.predict", "model"): MODEL,
    ("Trainer.prepare_batch", "batch"): OVERRIDE,
    ("Trainer.prepare_data", "data"): OVERRIDE,
    ("Trainer.prepare_model", "model"): OVERRIDE,
    ("Trainer.validate", "model"): MODEL,
}
OPAQUE_RESULTS = {
    "Backend.dtype": "the framework's own dtype object",
    "Backend.load": "whatever was saved",
    "Backend.mlp": "the framework's own class of models",
    "Device.native": "the active backend's device object",
    "Learner.predict": "what the model returns",
    "Trainer.model": MODEL,
    "Trainer.prepare_batch": OVERRIDE,
    "Trainer.prepare_model": OVERRIDE,
}
# Users get these classes, and do not call them.
WITHOUT_CALLS = {"Backend", *results.__all__} - {"History"}


def methods_of(cls):
    """Yield the name and each signature's function of the public methods and properties."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        is_special = name == "__iter__" or (
            name == "__init__" and cls.__name__ not in WITHOUT_CALLS
        )
        if name.startswith("_") and not is_special:
            continue
        if isinstance(member, property):
            yield name, member.fget
        elif isinstance(member, (types.FunctionType, classmethod, staticmethod)):
            function = inspect.unwrap(getattr(cls, name))
            if function.__module__.startswith("d2ldev"):  # not what Python's own classes have
                for each in typing.get_overloads(function) or [function]:
                    yield name, each


def functions():
    """Yield each public function, and each function of a public class, with its name."""
    modules = (d2ldev, results)
    public = {name: getattr(each, name) for each in modules for name in each.__all__}
    public |= {"launch": launcher.launch, "Launch": launcher.Launch}
    for name, value in public.items():
        if inspect.isclass(value):
            yield from ((f"{name}.{method}", each) for method, each in methods_of(value))
        elif inspect.isfunction(value):
            yield name, value


def annotations():
    """Yield the function, the parameter or "return", and the text of each annotation."""
    for name, function in functions():
        parameters = list(inspect.signature(function).parameters.values())
        is_bound = parameters and parameters[0].name in ("self", "cls")
        for parameter in parameters[bool(is_bound and "." in name) :]:
            yield name, parameter.name, parameter.annotation, function
        yield name, "return", inspect.signature(function).return_annotation, function


def is_opaque(text, function):
    """Tell whether an annotation, or the type that it is a name of, says nothing."""
    named = getattr(sys.modules[function.__module__], text, None)
    return text in {"Any", "object"} or named in (typing.Any, object)


def find_opaque():
    return {
        (name, part) for name, part, text, function in annotations() if is_opaque(text, function)
    }


def test_every_opaque_annotation_has_its_reason():
    assert find_opaque() == {*OPAQUE, *((name, "return") for name in OPAQUE_RESULTS)}


def test_few_parameters_are_opaque():
    assert len(OPAQUE) <= 17


def test_every_parameter_and_every_result_has_a_type():
    empty = inspect.Parameter.empty
    assert [(name, part) for name, part, text, _ in annotations() if text is empty] == []


def test_every_type_in_a_signature_is_exported():
    libraries = (builtins, typing, collections.abc, contextlib, os, numpy.typing)
    standard = {name for each in libraries for name in dir(each)} - {"T"}
    # Authors of backends write a ``Signature``: ``d2ldev.framework`` exports it.
    exported = {*d2ldev.__all__, *results.__all__, *public_types.__all__, "Launch", "Signature"}
    found = {
        node.id
        for _, _, text, _ in annotations()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name)
    }
    modules = {"np", "npt", "os"}
    of_matplotlib = {"Axes"}
    assert found - standard - exported - modules - of_matplotlib == {"T"}


def test_a_backend_is_generic_in_its_tensors_and_its_devices():
    assert Backend.__parameters__ == (public_types.TensorT, public_types.NativeDeviceT)


def test_every_exported_type_is_there():
    assert [name for name in public_types.__all__ if not hasattr(public_types, name)] == []


@pytest.mark.parametrize("name", ["framework", "known_framework"])
def test_a_backend_shows_a_user_no_framework_of_its_author(reference, name):
    for owner in (Backend, reference, d2ldev.backend):
        assert name not in dir(owner)
        assert not hasattr(owner, name)
