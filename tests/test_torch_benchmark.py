"""The rows of the benchmark: what they time runs, and gives the same on both sides."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from measure import Comparison
from rows import torch_rows

def seen(value):
    if isinstance(value, torch.nn.Module):
        return sorted(value.state_dict())
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if isinstance(value, list):
        return [seen(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else str(value)

# Those of ``strict()`` time one statement inside of a block and outside of it.
rows = [row for row in torch_rows() if isinstance(row, Comparison) and row.theirs != row.ours]
rows = [row for row in rows if row.theirs]
print(json.dumps([
    [f'{row.ours} | {row.theirs}', *(seen(eval(text, dict(row.names)))
    for text in (row.ours, row.theirs))]
    for row in rows
]))
"""


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_there_are_rows_for_the_handle_and_for_the_backend(results):
    assert {name.partition(".")[0] for name, _, _ in results} == {"backend", "d2l"}


def test_both_sides_of_every_row_give_the_same(results):
    differing = [name for name, ours, theirs in results if ours != theirs]
    assert differing == []


def test_the_results_that_are_kept_name_what_they_were_measured_on():
    kept = json.loads((BENCHMARKS / "results" / "overhead-torch-cpu.json").read_text())
    assert kept["versions"]["torch"]
    assert all(row["value"] > 0 for row in kept["results"])
