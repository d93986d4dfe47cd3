"""Find the method that an author has not begun with, in the error that ended a test."""

from __future__ import annotations

from collections.abc import Iterator

from d2ldev.framework import Framework, NotBegunError, Strict
from d2ldev.framework.testing import MODULES

GUIDE = "docs/write-a-backend.md"
"""The guide for authors, which has a section for each module."""
SETUP = "docs/set-up-of-the-suite.md"
"""The page about the functions of ``provision``."""
_MODULES_OF_CLASSES = {"Learner": "training", **{module.title(): module for module in MODULES}}


def find_unbegun_method(error: BaseException, package: str) -> str:
    """Return the method whose absence an error reports; empty for any other error.

    Args:
        error: the error that ended a test, or one of ``list_causes``.
        package: the package of the backend. A ``NotImplementedError`` counts only from there, and
            without a text. With a text it reports operands that the backend does not support.

    Returns:
        The name in the interface, ``'Models.mlp'``, or the name of the author's own function.
    """
    for each in list_causes(error):
        if isinstance(each, NotBegunError):
            return each.method
        is_bare = type(each) is NotImplementedError and not each.args
        if is_bare and (name := _find_function(each, package)):
            return name
    return ""


def find_unbegun_default(framework: Framework, module: str) -> str:
    """Return the method without which the tests of a module fail; empty if its author has it.

    The defaults of the other modules raise a ``NotBegunError``. A framework without mixed operands
    needs no more than the default of ``Strict``.

    Args:
        framework: the framework of the backend.
        module: the module of a test that failed.
    """
    is_default = type(framework.strict).refuse_mixing is Strict.refuse_mixing
    return "Strict.refuse_mixing" if module == "strict" and is_default else ""


def page_of(method: str, module: str) -> str:
    """Return the page about a method, with its section.

    Args:
        method: its name in the interface, ``'Models.mlp'``, or a function of ``provision``.
        module: the module whose section to return for the name of a function outside of both.

    >>> page_of("Models.mlp", "training")
    'docs/write-a-backend.md#models'
    """
    cls = method.partition(".")[0]
    if cls == "provision":
        return SETUP
    return f"{GUIDE}#{_MODULES_OF_CLASSES.get(cls, module)}"


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors before it.

    ``pytest.raises`` hides the error that it does not expect; it is among them.
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _find_function(error: BaseException, package: str) -> str:
    """Return the function that raised an error; empty if it is outside of a package."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    is_there = module == package or module.startswith(f"{package}.")
    return traceback.tb_frame.f_code.co_qualname if is_there else ""
