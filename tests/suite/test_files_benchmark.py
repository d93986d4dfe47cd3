"""The benchmark of files: both sides of a row read and write the same values."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROGRAM = """
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


def test_both_sides_write_the_same_tensors(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[True, True], [True, True, True]]


def test_the_results_that_are_kept_are_of_every_framework():
    kept = [json.loads(path.read_text()) for path in BENCHMARKS.glob("results/files-*.json")]
    assert len(kept) >= 4
    assert all(document["machine"] and len(document["results"]) == 3 for document in kept)
