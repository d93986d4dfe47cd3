"""What both sides of each row of the benchmark of the peers give."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import ast, importlib, json, os, sys, tempfile
from pathlib import Path

name = sys.argv[2]
os.environ["KERAS_BACKEND"] = name
os.environ["D2LDEV_VIRTUAL_GPUS"] = "2"
sys.path.insert(0, sys.argv[1])
from d2ldev._backend import framework_of
import d2ldev
from against import common
from against.work import PEERS

common.SIZES, common.LAYERS = (3,), (5,)
backend = d2ldev.set_backend(name)

def valued(statement, names):
    tree = ast.parse(statement)
    last = tree
    while not isinstance(last.body[-1], ast.Expr):  # in a ``with``
        last = last.body[-1]
    last.body[-1] = ast.Assign([ast.Name("value", ast.Store())], last.body[-1].value)
    exec(compile(ast.fix_missing_locations(tree), statement, "exec"), names)
    return names["value"]

def seen(value):
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if isinstance(value, framework_of(backend).tensors.types):
        return [str(backend.device_of(value)), backend.to_numpy(value).tolist()]
    return round(value) if isinstance(value, float) else None

def total(x):
    return abs(backend.to_numpy(x)).sum()

def result(work, statement, names):
    loads = work.name.startswith("load into")
    if loads:
        empty = {key: 0 * x for key, x in backend.named_tensors(names["net"]).items()}
        backend.load_into(names["net"], empty)
    value = valued(statement, names)
    if loads:
        return round(sum(total(x) for x in backend.named_tensors(names["net"]).values()))
    if work.name == "device_of":
        return str(backend.device(value))
    if work.name == "the framework of a tensor":
        return name in repr(value).lower()
    if work.name.startswith("place"):
        model = names["twin" if "twin" in statement else "model"]
        return sorted({str(device) for device in backend.placement(model).values()})
    return seen(value)

rows = []
with tempfile.TemporaryDirectory() as folder:
    for work in importlib.import_module(f"against.{name}_works").works(backend, Path(folder)):
        there = [x for x in work.theirs if x not in PEERS or PEERS[x].is_installed]
        names = dict(work.names)
        for peer in there:
            names |= work.peers.get(peer, dict)()
        if not work.is_program:
            ours = result(work, work.ours, names)
            rows += [[work.name, x, ours, result(work, work.theirs[x], names)] for x in there]
print(json.dumps(rows))
"""


def peer_rows(framework):
    """Return each row of a framework: the work, the peer, what ours gives and what theirs gives."""
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), framework]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
