"""Every public name says what it takes, returns and raises, and shows an example that runs."""

import inspect
import re

import pytest

import d2ldev

# The module of a public name that only a launch, or the Trainer, makes. An author of a backend
# implements its methods: their examples are programs of the guide "Write a backend".
FOR_AUTHORS = ("d2ldev.contract", "d2ldev.distributed")
# Callbacks and errors.
OURS = (
    *(d2ldev.CSVLogger, d2ldev.EarlyStopping, d2ldev.Schedule, d2ldev.TensorBoardLogger),
    d2ldev.D2LDevError,
)
# An example that needs one of these cannot run in the environment of the core.
ELSEWHERE = re.compile(r"import torch|PackageNotInstalledError|d2ldev launch")


def list_public():
    """Yield the name, the object and the class of each public callable and each method."""
    for name in d2ldev.__all__:
        value = getattr(d2ldev, name)
        if not inspect.isclass(value) and not inspect.isroutine(value):
            continue  # data, such as ``backend`` and the types
        yield name, value, None
        if inspect.isclass(value):
            for key in sorted(dir(value)):
                member = inspect.getattr_static(value, key)
                owner = next(cls for cls in value.__mro__ if key in vars(cls))
                if key.startswith("_") or not owner.__module__.startswith("d2ldev"):
                    continue
                if isinstance(member, property):
                    yield f"{name}.{key}", member.fget, value
                elif inspect.isroutine(getattr(value, key)):
                    yield f"{name}.{key}", getattr(value, key), value


PUBLIC = {name: (value, cls) for name, value, cls in list_public()}


def parameters_of(name):
    """Return the parameters that a caller gives; of an error they are the base class's."""
    value, cls = PUBLIC[name]
    if inspect.isclass(value) and not {"__init__", "__new__"} & {*vars(value)}:
        return []
    function = inspect.unwrap(value)
    is_static = cls is not None and isinstance(
        inspect.getattr_static(cls, name.rpartition(".")[2]), staticmethod
    )
    found = list(inspect.signature(function).parameters)
    return found[1:] if cls is not None and not is_static else found


def section(name, title):
    """Return the text below a title of a docstring, such as ``Args``."""
    doc = inspect.getdoc(PUBLIC[name][0]) or ""
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n?)*)", doc, re.MULTILINE)
    return found[1] if found else ""


def is_property(name):
    _, cls = PUBLIC[name]
    return cls is not None and isinstance(
        inspect.getattr_static(cls, name.rpartition(".")[2]), property
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_each_parameter_is_explained(name):
    lines = re.findall(r"^    ([\w, ]+):", section(name, "Args"), re.MULTILINE)
    explained = {each for line in lines for each in line.split(", ")}
    explained |= {f"_{each}" for each in explained}  # a hook that ignores its argument
    assert [each for each in parameters_of(name) if each not in explained] == []


def returns_a_value(name):
    value = inspect.unwrap(PUBLIC[name][0])
    if inspect.isclass(value) or is_property(name):  # the docstring of a property is a noun
        return False
    return value.__annotations__.get("return", "None") != "None"


@pytest.mark.parametrize("name", [*filter(returns_a_value, PUBLIC)])
def test_the_result_is_explained(name):
    begins = (inspect.getdoc(PUBLIC[name][0]) or "").startswith(("Return ", "Yield "))
    assert begins or section(name, "Returns") or section(name, "Yields")


def has_example(name):
    """Return whether a docstring, or that of its class, shows a call that doctest runs."""
    value, cls = PUBLIC[name]
    doc = inspect.getdoc(value) or ""
    lines = re.findall(r"^(?:>>>|\.\.\.) .*", doc, re.MULTILINE)
    if cls is not None and not lines:
        key = name.rpartition(".")[2]
        of_class = re.findall(r"^(?:>>>|\.\.\.) .*", inspect.getdoc(cls) or "", re.MULTILINE)
        lines = [line for line in of_class if f".{key}(" in line]
    is_run = any("+SKIP" not in line for line in lines)
    return is_run or bool(lines and ELSEWHERE.search(doc + (inspect.getdoc(cls) or "")))


def needs_example(name):
    value, cls = PUBLIC[name]
    is_for_authors = (cls or value).__module__.startswith(FOR_AUTHORS)
    # The Trainer calls the methods of a callback, and d2ldev shows the warnings.
    is_ours = cls is not None and issubclass(cls, OURS)
    is_warning = inspect.isclass(value) and issubclass(value, Warning)
    return not (is_property(name) or is_for_authors or is_ours or is_warning)


@pytest.mark.parametrize("name", [*filter(needs_example, PUBLIC)])
def test_an_example_shows_the_call(name):
    assert has_example(name)
