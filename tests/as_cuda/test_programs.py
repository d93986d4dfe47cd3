"""Programs for one CUDA device train unchanged on a virtual GPU: ``nightly.ini`` has the libraries.

CI runs them each night.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The line that precedes the program.
_RUN = """
import runpy, sys
import d2ldev
d2ldev.virtual_gpus(1, as_cuda=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("library", "precision"),
    [
        ("accelerate", "no"),
        ("accelerate", "fp16"),
        ("accelerate", "bf16"),
        ("lightning", "32-true"),
        ("lightning", "16-mixed"),
        ("lightning", "bf16-mixed"),
    ],
)
def test_it_trains_unchanged(tmp_path, library, precision):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: tox -c nightly.ini -e as-cuda")
    program = Path(__file__).with_name(f"train_{library}.py")
    command = [sys.executable, "-c", _RUN, str(program), precision, str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # for the folder of torch's compiler
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
