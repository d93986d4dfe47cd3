"""The examples in the core's docstrings that need PyTorch are true."""

import doctest
import inspect
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import pytest
from leaky_libraries import import_library

import d2ldev
import d2ldev.results

# The examples name the lines.
LIBRARY = (
    "import torch"
    + "\n" * 9
    + """
def f(x):
    shift = torch.ones(3)
    return x + shift


def g(x):
    return x * torch.ones(3)
"""
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with import_library(tmp_path_factory.mktemp("library"), "library", LIBRARY) as module:
        yield module


@pytest.mark.parametrize("name", ["results.Leaks", "ScopeError", "find_leaks"])
def test_the_examples_of_a_docstring_are_true(name, virtual, library):
    names = {"backend": virtual, "d2ldev": d2ldev, "find_leaks": d2ldev.find_leaks}
    names["ThreadPoolExecutor"] = ThreadPoolExecutor
    text = inspect.getdoc(attrgetter(name)(d2ldev))
    found = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    for example in found.examples:  # the core's tests, which have no PyTorch, skip them
        example.options.pop(doctest.SKIP, None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    with d2ldev.use_backend(virtual):
        result = doctest.DocTestRunner(optionflags=flags).run(found)
    with virtual.on("cpu"):  # the default device again, which the example of ScopeError leaves
        pass
    assert result.attempted
    assert result.failed == 0
