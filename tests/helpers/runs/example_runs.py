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


def check_example(name):
    """Check that a program learns on the CPU and on a virtual GPU, and goes on when it was stopped.

    It runs for four epochs, and then for two and from there to the end.
    """
    environment = {"D2LDEV_VIRTUAL_GPUS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = _RUN.format(path=str(_EXAMPLES / f"{name}.py"))
    (found,) = run_python(code, hide=(), environment=environment)
    for gpus, device in (("0", "cpu"), ("1", "gpu:0")):
        whole, begun, resumed = found[gpus]
        epochs = [f"epoch {epoch} on {device}" for epoch in range(4)]
        assert [line.partition(": ")[0] for line in whole] == epochs
        assert float(whole[-1].rpartition("val_accuracy ")[2].partition(",")[0]) > 0.95
        assert [*begun, *resumed] == whole
