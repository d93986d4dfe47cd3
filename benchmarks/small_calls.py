"""Small calls on a device, in microseconds: the framework's own, ours, and accelerate's.

    python benchmarks/small_calls.py [--framework NAME] [--device gpu:0] [--small] [--json FILE]

Such a call costs its Python and a call of the driver. The ways of a row are measured in turn, and
each waits for the device at the end of a sample. The aims are ratios to the first way of a row:
1.10 for a copy from the host, for a copy on the device, and for a ``DeviceLog`` against a list with
one transfer. It takes less than twenty seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

from measure import LOG_AIM, in_turn, sampler
from natives import CREATIONS, jax_names, tensorflow_names
from overhead import document

import d2ldev
from d2ldev._backend import framework_of
from d2ldev.bench.exercises import logs_of_norms

AIM_OF_A_COPY = 1.1
_FLOATS = 4
_WIDTH = 100

# Of each framework: what copies ``here`` or ``there`` to the device, what copies on the device, and
# what says where a tensor is.
_NATIVE = {
    "torch": ("{}.to(native)", "there.clone()", "there.device"),
    "jax": ("jax.device_put({}, native)", "jnp.copy(there)", "there.device"),
    "tensorflow": ("identity({}, native)", "deep_copy(x=there)", "there.device"),
    "mxnet": ("{}.as_in_ctx(native)", "there.copy()", "there.ctx"),
}


class Work(NamedTuple):
    """What is measured in several ways.

    Args:
        name: what each way does.
        ways: name -> statement; the others are compared with the first.
        names: that the statements use.
        aim: of the way ``aimed`` against the first; None for information.
        aimed: the way that has the aim.
        times: how often a statement does it.
    """

    name: str
    ways: Mapping[str, str]
    names: Mapping[str, Any]
    aim: float | None = None
    aimed: str = "d2ldev"
    times: int = 1


def works(backend: Any, device: Any, products: int) -> Iterator[Work]:
    """Yield what is measured on a device, with so many products for each log."""
    native = backend.native(device)
    here, there = (backend.full((_FLOATS,), 1.0, device=each) for each in ("cpu", device))
    names = {"backend": backend, "device": device, "native": native, "here": here, "there": there}
    names |= {"ones": CREATIONS[backend.name](native), **_own_names(backend.name)}
    move, copy, ask = _NATIVE[backend.name]
    moves = {"native": move.format("here"), "d2ldev": "backend.to(here, device)"}
    stays = {"native": move.format("there"), "d2ldev": "backend.to(there, device)"}
    if "send_to_device" in names:
        moves["accelerate"] = "send_to_device(here, native)"
        stays["accelerate"] = "send_to_device(there, native)"
    yield Work("to, there already", stays, names)
    yield Work("to, from the host", moves, names, AIM_OF_A_COPY)
    yield Work("copy", {"native": copy, "d2ldev": "backend.copy(there)"}, names, AIM_OF_A_COPY)
    ours = f"backend.ones({_FLOATS}, device=device)"
    yield Work("ones", {"native": "ones()", "d2ldev": ours}, names)
    yield Work("device of", {"native": ask, "d2ldev": "backend.device_of(there)"}, names)
    a, b = (backend.randn((_WIDTH, _WIDTH), seed=seed, device=device) for seed in (0, 1))
    logs = logs_of_norms(backend, device, (a, b), products)
    ways = {name: f"logs[{name!r}]()" for name in logs}
    repeated = f"for _ in range({products}): "
    ways |= {"its product": f"{repeated}a @ b", "and its norm": f"{repeated}norm(a @ b)"}
    names = {"logs": logs, "a": a, "b": b, "norm": framework_of(backend).tensors.norm}
    log = "a DeviceLog with one transfer"
    yield Work("log a norm", ways, names, LOG_AIM, log, products)


def _own_names(framework: str) -> dict[str, Any]:
    """Return what the framework's own statements use, and accelerate's function if it is there."""
    if framework == "jax":
        return jax_names()
    if framework == "tensorflow":
        import tensorflow as tf

        return {"identity": tensorflow_names()["identity"], "deep_copy": tf.raw_ops.DeepCopy}
    if framework == "torch" and importlib.util.find_spec("accelerate") is not None:
        from accelerate.utils import send_to_device

        return {"send_to_device": send_to_device}
    return {}


def measure(backend: Any, device: Any, work: Work, rounds: int) -> dict[str, float]:
    """Return the seconds that each way takes for doing it once, as the median of the rounds."""
    # TensorFlow computes on its default device, whatever the operands are on.
    within = partial(backend.on, device) if backend.name == "tensorflow" else nullcontext
    finish = partial(backend.synchronize, device)
    sides = [sampler(way, work.names, within, finish) for way in work.ways.values()]
    samples = in_turn(sides, rounds)
    return {name: median(each) / work.times for name, each in zip(work.ways, samples, strict=True)}


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=_NATIVE, default="torch")
    parser.add_argument("--device", default="gpu:0", help="the device to call on")
    parser.add_argument("--small", action="store_true", help="do little work, to try it out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    backend = d2ldev.get_backend(arguments.framework)
    device = backend.device(arguments.device)
    rows = []
    for work in works(backend, device, 5 if arguments.small else 200):
        found = measure(backend, device, work, 3 if arguments.small else 31)
        first = next(iter(found.values()))
        for name, seconds in found.items():
            ratio = seconds / first
            aim = work.aim if name == work.aimed else None
            rows.append(
                {"name": work.name, "way": name, "seconds": seconds, "ratio": ratio, "aim": aim}
            )
            shown = f"{work.name:22} {name:30} {seconds * 1e6:9.2f} us {ratio:6.2f}"
            print(shown if aim is None else f"{shown}  aim {aim}", flush=True)
    if arguments.json is not None:
        made = document([], arguments.framework, ("accelerate",)) | {"results": rows}
        made |= {"device": str(device), "platform": backend.platform(device)}
        arguments.json.write_text(format_lines(made), encoding="utf-8")


if __name__ == "__main__":
    main()
