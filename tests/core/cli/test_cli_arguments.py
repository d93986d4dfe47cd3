"""Hostile arguments and variables: the command ends with a status and in words of its own.

``D2LDEV_TEST_EXAMPLES`` is how many are tried; 300 if it is unset.
"""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from d2ldev import settings as variables
from d2ldev.bench.results import Result
from d2ldev.cli.main import app
from d2ldev.registry import selection

EXAMPLES = int(os.environ.get("D2LDEV_TEST_EXAMPLES", "300"))

NUMBERS = st.one_of(
    st.integers().map(str),
    st.sampled_from(["9" * 5000, "-1", "1e3", "0x2", "nan", "٣", "²", " 2 ", "1_0", "+1"]),
)
NOTHING = {"name": "", "versions": {}, "notes": [], "error": None, "results": []}
TEXTS = st.one_of(
    st.text(max_size=20),
    # What an argument that is no UTF-8 looks like in Python.
    st.text(st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), min_size=1, max_size=4),
    st.sampled_from(
        ["", "--", "-", "-x", "x" * 300, "../x", "a/b", "[red]", "%s", "{0}", "\x1b[31m"]
    ),
    NUMBERS,
)
NAMES = st.one_of(TEXTS, st.sampled_from(["reference", "torch", "tf", "refrence", "REFERENCE "]))
OPTIONS = ["--json", "--all", "--help", "--virtual-gpus", "--require-gpus", "--profile"]
OPTIONS += ["--backend", "--size", "--small", "--matmul-precision", "--notebook"]
WORDS = st.one_of(
    st.sampled_from(["doctor", "tour", "bench", "conformance", "--version", "--report", *OPTIONS]),
    NAMES,
)
COMMANDS = st.sampled_from(
    [
        [],
        ["doctor"],
        ["tour"],
        ["bench"],
        ["bench", "log"],
        ["conformance"],
        ["conformance", "reference"],
    ]
)
VARIABLES = st.dictionaries(
    st.sampled_from([*variables.VARIABLES, "D2LDEV_", "D2LDEV_X"]),
    # The system takes no other value of a variable.
    NAMES.map(lambda text: text.replace("\0", "")),
    max_size=2,
)


@pytest.fixture
def _without_work(monkeypatch, tmp_path):
    """What the commands start is left out: arguments are what is tried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("d2ldev.cli.conformance._status_of", lambda request, suite: 0)
    monkeypatch.setattr("d2ldev.cli.tour.read_cells", lambda text: [])
    empty = Result("log", "reference", "", "")
    monkeypatch.setattr(
        "d2ldev.cli.bench.Exercise.run", lambda self, backend, size, precision: empty
    )
    monkeypatch.setattr("d2ldev.cli.bench._measure_elsewhere", lambda request, name: (NOTHING, 0))
    monkeypatch.setattr("d2ldev.cli.examination.try_elsewhere", lambda report, notes: None)


@pytest.mark.usefixtures("_without_work")
@settings(max_examples=EXAMPLES)
@given(command=COMMANDS, words=st.lists(WORDS, max_size=5), environment=VARIABLES)
def test_no_argument_and_no_variable_is_more_than_the_command_can_take(command, words, environment):
    before, chosen = selection.get_selection(), variables.choose_virtual_gpus(None)
    selection.set_selection(selection.Selection(None, ""))
    started = time.monotonic()
    try:
        done = CliRunner().invoke(app, [*command, *words], env=environment)
    finally:
        selection.set_selection(before)
        variables.choose_virtual_gpus(chosen)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1, 2)
    assert "Traceback" not in done.output
    assert time.monotonic() - started < 60
