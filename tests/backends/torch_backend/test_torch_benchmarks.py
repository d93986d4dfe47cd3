"""The benchmarks of torch alone, and of small calls: each way does the same, from any folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
EPOCHS = """
import copy, json, sys
sys.path.insert(0, sys.argv[1])
import torch
import d2ldev
import epochs
from d2ldev import Trainer

backend = d2ldev.get_backend("torch")
case = epochs.Case("tiny", lambda: torch.nn.Linear(3, 10), (2, 3), 1.0)
batches = epochs.make_batches(backend, case, 5, is_pinned=False)
model = case.make_model()
twin = copy.deepcopy(model)
history = Trainer(1, backend=backend).fit(
    model, batches, loss="cross_entropy", optimizer=epochs.optimizer_of(model)
)
losses = [history["loss"][0], epochs.by_hand(twin, torch.device("cpu"))(batches)]
same = [torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters())]
epochs.CASES = (case,)
rows = list(epochs.results(backend, d2ldev.cpu(), 2, 2))
print(json.dumps([losses, same, rows]))
"""
SMALL_CALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import d2ldev
import small_calls

backend = d2ldev.get_backend("torch")
found = []
for work in small_calls.works(backend, d2ldev.cpu(), 3):
    seen = [eval(way, dict(work.names)) for way in work.ways.values() if "for _" not in way]
    found.append([x if isinstance(x, list) else getattr(x, "tolist", x.__str__)() for x in seen])
print(json.dumps(found))
"""


def run(program):
    command = [sys.executable, "-P", "-c", program, str(BENCHMARKS)]
    # With a GPU there were rows of pinned memory, too.
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    options = {"capture_output": True, "text": True, "env": variables}
    return json.loads(subprocess.run(command, check=True, **options).stdout)


def test_an_epoch_by_hand_learns_like_the_trainer():
    (ours, theirs), same, (row,) = run(EPOCHS)
    assert ours == pytest.approx(theirs)
    assert same == [True, True]
    assert (row["name"], row["pinned"], row["ratios"]["hand"]) == ("tiny", False, 1.0)
    assert row["ratios"]["d2ldev"] > 0


def test_each_way_of_a_small_call_gives_the_same():
    found = run(SMALL_CALLS)
    assert len(found) == 6
    for first, *others in found:
        assert others
        for other in others:
            assert other == pytest.approx(first) if isinstance(first, list) else other == first


@pytest.mark.parametrize("name", ["epochs", "small_calls"])
def test_it_runs_from_any_folder(name, tmp_path):
    command = [sys.executable, "-P", str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--device" in done.stdout
