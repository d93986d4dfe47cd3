"""Progress of a run: bars in a terminal, nothing in a pipe or a file.

``tests/docs/test_notebooks.py`` has the line in a notebook.
"""

import os
import pty
import re
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import time
import numpy as np
import d2ldev

class Slow(list):
    def __iter__(self):
        for batch in super().__iter__():
            time.sleep({pause})
            yield batch

sys.modules.update(dict.fromkeys({hide}))
batch = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
backend = d2ldev.get_backend("reference")
trainer = d2ldev.Trainer(2, backend=backend, enable_progress_bar=True)
{before}
trainer.fit(backend.mlp([2, 1]), Slow([batch] * 15))
"""
WITHOUT_RICH = ("rich",)


def start(output, *, hide=(), pause=0.0, before="", columns=200):
    program = PROGRAM.format(hide=hide, pause=pause, before=before)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def run_in_terminal(**options):
    """Return what a terminal gets from the program."""
    ours, theirs = pty.openpty()
    process = start(theirs, pause=0.04, **options)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux raises at the end
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_bars_that_move():
    shown = run_in_terminal()
    assert "2/2" in shown
    assert "15/15" in shown
    assert "loss" in shown
    assert "examples/s" in shown
    # Each update moves the cursor up to the first bar.
    assert shown.count("\x1b[1A") > 2


# A program with several numbers, and many examples in each second.
NUMBERS = """
from d2ldev.training.progress import Progress
begin, end = Progress.begin_epoch, Progress.end_epoch

def begin_epoch(self, batches):
    begin(self, batches)
    self._examples = 10**9

def end_epoch(self, done, numbers):
    end(self, done, numbers | {f"metric_{i}": 12345.0 for i in range(4)})

Progress.begin_epoch, Progress.end_epoch = begin_epoch, end_epoch
"""


def test_bars_in_a_narrow_terminal_keep_the_count_and_the_time():
    shown = run_in_terminal(columns=80, before=NUMBERS)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()
    assert all(len(line) <= 80 for line in lines)
    bars = [line.rstrip() for line in lines if line.startswith(("epoch ", "batch "))]
    assert re.fullmatch(r"epoch 2/2 .* 0:00:\d\d", bars[-2])
    assert re.fullmatch(r"batch 15/15 .* 0:00:\d\d", bars[-1])


def test_large_numbers_are_written_with_all_digits():
    shown = run_in_terminal(before=NUMBERS)
    assert "e+" not in shown
    assert re.search(r" [0-9,]{9,} examples/s", shown)


def test_a_line_in_a_narrow_terminal_stays_one_line():
    shown = run_in_terminal(columns=40, hide=WITHOUT_RICH)
    replaced = [line for line in shown.replace("\r\n", "\r").split("\r") if "batch" in line]
    assert replaced
    assert all(len(line) == 39 for line in replaced)


def test_a_terminal_without_rich_shows_a_line_for_each_epoch():
    shown = run_in_terminal(hide=WITHOUT_RICH)
    lines = [line for line in shown.split("\r\n") if line]
    # What is written over what stands there begins with a carriage return.
    last = [line.split("\r")[-1] for line in lines]
    assert [line.partition(":")[0] for line in last] == ["epoch 1/2", "epoch 2/2"]
    assert all("loss" in line and "examples/s" in line for line in last)
    assert all("batch 15/15" in line for line in lines)


@pytest.mark.parametrize(
    ("hide", "before"),
    [((), ""), (WITHOUT_RICH, ""), ((), "sys.stdout = None"), ((), "sys.stdout.close()")],
    ids=["rich", "no rich", "no output", "closed output"],
)
def test_a_pipe_gets_nothing(hide, before):
    process = start(subprocess.PIPE, hide=hide, before=before)
    out, error = process.communicate(timeout=60)
    assert (out, error, process.returncode) == (b"", b"", 0)


def test_a_file_gets_nothing(tmp_path):
    with open(tmp_path / "log", "w") as file:
        assert start(file).wait(60) == 0
    assert (tmp_path / "log").read_text() == ""
