"""The pages of the reference have every variable, command, option and error."""

import ast
import re
import typing
from pathlib import Path

import pytest
import typer

import d2ldev
import d2ldev.typing
from d2ldev import settings
from d2ldev.cli.main import app

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("d2ldev", "backends", "conformance")
VARIABLES = (ROOT / "docs" / "api" / "variables.md").read_text(encoding="utf-8")
TYPES = (ROOT / "docs" / "api" / "typing.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "api" / "errors.md").read_text(encoding="utf-8")


def find_texts(path):
    """Return the texts in a file's program, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0].value.value = ""
    return {
        each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def test_the_page_of_variables_has_each_variable_of_d2ldev():
    texts = {
        text
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not path.name.startswith("test_")  # some read how often to try
        for text in find_texts(path)
    }
    used = {name for text in texts for name in re.findall(r"\bD2LDEV_[A-Z_]+\b", text)}
    assert used == {*settings.VARIABLES}
    rows = re.findall(r"^\| `(D2LDEV_\w+)` \|", VARIABLES, re.MULTILINE)
    assert sorted(rows) == sorted(settings.VARIABLES)


def test_the_page_of_variables_has_each_variable_of_a_launch():
    source = ast.parse((ROOT / "d2ldev" / "settings.py").read_text(encoding="utf-8"))
    (function,) = [
        each for each in source.body if isinstance(each, ast.FunctionDef) and each.name == "peers"
    ]
    del function.body[0]  # the docstring
    read = {
        each.value
        for each in ast.walk(function)
        if isinstance(each, ast.Constant) and re.fullmatch(r"[A-Z_]{4,}", str(each.value))
    }
    assert read <= {*re.findall(r"`([A-Z_]+)`", VARIABLES.split("## Variables of a launch")[1])}


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_commands_has_a_chapter_with_the_options_and_an_output_of_each(name):
    (chapter,) = re.findall(rf"^## {name}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert f"<!-- options-{name} -->\n| option | meaning |\n" in chapter
    assert "```text\n" in chapter
    assert f"| [`d2ldev {name}`](#{name}) |" in PAGE
    for option in COMMANDS[name].params:
        assert (option.opts[0] if option.opts[0].startswith("-") else option.metavar) in chapter


TYPE_ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", TYPES, re.MULTILINE))
LITERALS = [
    name
    for name in d2ldev.typing.__all__
    if typing.get_origin(getattr(d2ldev.typing, name)) is typing.Literal
]


def test_the_page_of_types_has_each_type():
    assert sorted(TYPE_ROWS) == sorted(d2ldev.typing.__all__)


@pytest.mark.parametrize("name", LITERALS)
def test_the_page_of_types_has_the_values_of_each_option(name):
    values = typing.get_args(getattr(d2ldev.typing, name))
    assert re.findall(r"`('[\w-]+'|\d+)`", TYPE_ROWS[name]) == list(map(repr, values))


ERROR_CLASSES = [
    name
    for name in d2ldev.__all__
    if isinstance(getattr(d2ldev, name), type) and issubclass(getattr(d2ldev, name), Exception)
]


@pytest.mark.parametrize("name", ERROR_CLASSES)
def test_each_error_says_why_it_is_raised_and_how_to_mend_it(name):
    first, *rest = (getattr(d2ldev, name).__doc__ or "").split("\n\n")
    assert first.strip()
    assert rest
    assert f".. autoexception:: {name}\n" in ERRORS
