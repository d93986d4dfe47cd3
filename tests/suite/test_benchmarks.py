"""The benchmarks: both sides of a row do the same, and results are kept of every framework."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
DEVICE_LOG = """
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
FILES = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import d2ldev
from files import results
from safetensors.numpy import load_file

folder = Path(sys.argv[2])
found = results(d2ldev.get_backend("reference"), folder, 2)
mine, plain = (load_file(folder / f"{name}.safetensors") for name in ("mine", "plain"))
same = [mine[name].tobytes() == plain[name].tobytes() for name in sorted({**mine, **plain})]
print(json.dumps([same, [result.value > 0 for result in found]]))
"""


def run(program, *arguments):
    command = [sys.executable, "-c", program, str(BENCHMARKS), *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def kept(name):
    return [json.loads(path.read_text()) for path in BENCHMARKS.glob(f"results/{name}-*.json")]


def test_both_sides_of_every_row_train_for_as_many_steps():
    assert run(DEVICE_LOG) == [100] * 4


def test_both_sides_write_the_same_tensors(tmp_path):
    assert run(FILES, tmp_path) == [[True, True], [True, True, True]]


def test_the_results_of_device_logs_name_where_they_were_measured():
    assert len(kept("device-log")) >= 4
    assert all(document["platform"] and document["machine"] for document in kept("device-log"))


def test_the_results_of_files_are_of_every_framework():
    assert len(kept("files")) >= 4
    assert all(document["machine"] and len(document["results"]) == 3 for document in kept("files"))
