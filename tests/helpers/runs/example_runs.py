"""The programs in ``examples/``, run as a user runs them."""

from pathlib import Path

from processes import run_python

_EXAMPLES = Path(__file__).parents[3] / "examples"

_RUN = """
import contextlib, io, os, runpy, sys, tempfile

def lines(*arguments):
    sys.argv = [{path!r}, *arguments]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path({path!r}, run_name="__main__")
    return text.getvalue().splitlines()

found = {{}}
for gpus in ("0", "1"):
    with tempfile.TemporaryDirectory() as folder:
        def run(epochs, name, *more):
            file = os.path.join(folder, name)
            return lines("--gpus", gpus, "--epochs", epochs, "--checkpoint", file, *more)

        whole = run("4", "whole.safetensors")
        found[gpus] = [whole, run("2", "run.safetensors")]
        found[gpus].append(run("4", "run.safetensors", "--resume"))
show(found)
"""


def run_example(name):
    """Run a program on the CPU and on a virtual GPU; what it printed, by the number of GPUs.

    Returns:
        The lines of a run of four epochs, of one of two, and of one that goes on from there.
    """
    environment = {"D2LDEV_VIRTUAL_GPUS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = _RUN.format(path=str(_EXAMPLES / f"{name}.py"))
    (found,) = run_python(code, hide=(), environment=environment)
    return found


def accuracy(line):
    """Return the last number of a line, which is the accuracy on data that was not trained on."""
    return float(line.rpartition("val_accuracy ")[2])
