"""The check of the English finds each kind of problem, and reads prose alone."""

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parent.parent.parent / "tools" / "check_english.py"))
LONG = "This sentence goes on and on " + "and on " * 8 + "until it ends."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LONG, "words"),
        ("That name is none.", "is none"),
        ("A folder is no file.", "is no file"),
        ("There are two models, of which one is lazy.", "of which"),
        ("What the tests use is a fixture.", "What the tests use is"),
        ("Who reads this knows.", "Who"),
        ("These tests run at night.", "at night"),
    ],
)
def test_a_problem_is_found(text, problem):
    (found,) = TOOL["check_paragraph"](text)
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        "There is no GPU here.",
        "It is no longer there.",
        "What is a device?",
        "Give `backend.to(one, two, three, four, five, six, seven, eight, nine, ten)` one device.",
        "Two sentences count apart, and each of them is short. The second one is as short.",
    ],
)
def test_good_prose_passes(text):
    assert list(TOOL["check_paragraph"](text)) == []


def test_a_document_is_read_without_code_tables_and_headings():
    text = (
        "# What it is\n\nProse.\n\n```py\ncode\n```\n\n| a | table |\n\n- item one\n- item\n  two\n"
    )
    assert list(TOOL["read_markdown"](text)) == [(3, "Prose."), (11, "item one"), (12, "item\ntwo")]


def test_a_module_is_read_by_docstrings_comments_and_errors():
    text = (
        '"""Do it.\n\n>>> f()\n1\n"""\n# A\n# reason.\nx = 1  # noqa\nraise Error(f"{x} fails")\n'
    )
    assert [paragraph for _, paragraph in TOOL["read_python"](text)] == [
        "Do it.",
        "CODE fails",
        "A\nreason.",
    ]


def test_help_texts_are_read():
    text = 'add("--all", help="Try it.")\nadd(help=f"One of {names}.")\n'
    assert [paragraph for _, paragraph in TOOL["read_python"](text)] == ["Try it.", "One of CODE."]


def test_a_comment_beside_code_is_a_paragraph_of_its_own():
    text = "# A\n# reason.\nx = 1  # beside\n# Another\n# reason.\n"
    found = [paragraph for _, paragraph in TOOL["read_python"](text)]
    assert found == ["A\nreason.", "beside", "Another\nreason."]


def test_a_table_between_markers_is_not_read():
    text = "Prose.\n\n<!-- small-calls -->\n- a row\n<!-- end of small-calls -->\n"
    assert list(TOOL["read_markdown"](text)) == [(1, "Prose.")]


def test_a_sentence_may_begin_with_the_name_of_torch():
    text = "PyTorch keeps one device type. torch renames it."
    assert TOOL["split_sentences"](text) == ["PyTorch keeps one device type.", "torch renames it."]


def test_a_docstring_is_read_without_the_names_of_arguments():
    text = 'def f(x):\n    """Do it.\n\n    Args:\n        x: a number.\n        y: one.\n    """\n'
    assert [paragraph for _, paragraph in TOOL["read_python"](text)] == [
        "Do it.",
        "a number.",
        "one.",
    ]


def test_a_problem_gives_exit_status_1(tmp_path, capsys):
    (tmp_path / "bad.md").write_text("All of it is none.\n")
    assert TOOL["main"]([str(tmp_path)]) == 1
    assert "bad.md:1:" in capsys.readouterr().out
    (tmp_path / "bad.md").write_text("All of it is invalid.\n")
    assert TOOL["main"]([str(tmp_path)]) == 0
