"""The tool that draws the README's picture records what a terminal shows."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "terminal.py"))


def test_one_shell_runs_the_commands_and_its_lines_have_an_end(tool):
    lines = tool["record"](
        ("export WORD=abc", "for i in 1 2; do\n  echo $i\ndone", f"echo {'x' * 50}")
    )
    assert lines == [
        "$ export WORD=abc",
        *("$ for i in 1 2; do", ">   echo $i", "> done", "1", "2"),
        *(f"$ echo {'x' * 50}", "x" * 48, "x" * 2),
    ]
    assert tool["record"](("export WORD=abc", "echo $WORD"))[-1] == "abc"


def test_the_picture_holds_the_program_and_its_commands(tool):
    shown = tool["read"](tool["PICTURE"].read_text(encoding="utf-8"))
    program = [line for line in tool["PROGRAM"].splitlines() if line]
    assert shown[: len(program) + 1] == ["$ cat add.py", *program]
    typed = [line[2:] for line in shown if line[:2] in ("$ ", "> ")]
    assert typed == [line for command in tool["COMMANDS"] for line in command.splitlines()]


def test_the_program_of_the_picture_runs_on_the_reference_backend(tool):
    variables = "D2LDEV_VIRTUAL_GPUS=2 D2LDEV_BACKEND=reference"
    lines = tool["record"](
        (f"{variables} python add.py 2>errors", "grep -c DeviceMismatchError errors")
    )
    assert lines[1:2] == ["reference Array gpu:1"]
    assert lines[-1] == "1"


def test_the_picture_is_xml_and_keeps_every_line_inside_its_frame(tool):
    picture = tool["draw"](["$ echo '<&>'", "x" * tool["COLUMNS"]])
    assert tool["read"](picture) == ["$ echo '<&>'", "x" * tool["COLUMNS"]]
    assert "&lt;&amp;&gt;" in picture
    width = float(picture.split('width="')[1].split('"')[0])
    assert tool["MARGIN"] + tool["COLUMNS"] * tool["CHARACTER"] < width
