"""The benchmark of ``DeviceLog``: what it times runs, and trains alike on both sides."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import d2ldev
from device_log import rows

backend = d2ldev.get_backend("reference")
steps = []
learner = type(backend.learner(backend.mlp([1, 1])))
step = learner.step
learner.step = lambda self, inputs, y: steps.append(1) or step(self, inputs, y)
counts = []
for row in rows(backend, "gpu:0", 4, 4):
    for statement in (row.ours, row.theirs):
        steps.clear()
        exec(statement, dict(row.names))
        counts.append(len(steps))
print(json.dumps(counts))
"""


def test_both_sides_of_every_row_train_for_as_many_steps():
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [100] * 4


def test_the_results_that_are_kept_name_where_they_were_measured():
    kept = [json.loads(path.read_text()) for path in BENCHMARKS.glob("results/device-log-*.json")]
    assert len(kept) >= 4
    assert all(document["platform"] and document["machine"] for document in kept)
