"""What ``save`` and ``load`` cost over the safetensors library's own calls: 100 MB.

    python benchmarks/files.py [--framework NAME] [--folder DIR] [--json FILE]

The library writes NumPy arrays, does not synchronise them to the disk, and has no checksums. It
reads them into NumPy arrays, of which tensors are made then. Both sides run in turn in one process;
reported are the medians, and the median of the ratios of a round. A row shows that loading needs no
second core, with all cores busy but one. Another compares saving, with an ``os.fsync`` that does
nothing, with the library's call and the checksums of all arrays. The last row is the checksums'
own time, as a part of the library's loading. Files are read from the operating system's cache: from
a disk they take longer, and the checksums do not. The library's own loader of torch is not
compared: it maps the file into memory and reads nothing until a tensor is used, so that the tensors
change with the file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measure import Result
from overhead import document, table
from rich.console import Console
from safetensors.numpy import load_file, save_file
from xxhash import xxh3_64_digest

import d2ldev

_ROUNDS = 15

_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that computes for as long as the one lives that started it."""


def results(backend: d2ldev.Backend, folder: Path, count: int = 100) -> list[Result]:
    """Return every comparison, with ``count`` tensors of 1 MB."""
    generator = np.random.default_rng(0)
    arrays = {f"w{i}": generator.random((250, 1000), np.float32) for i in range(count)}
    tensors = {name: backend.asarray(array) for name, array in arrays.items()}
    mine, plain = folder / "mine.safetensors", folder / "plain.safetensors"
    names = {
        "backend": backend,
        "tensors": tensors,
        "arrays": arrays,
        "mine": mine,
        "plain": plain,
        "load_file": load_file,
        "save_file": save_file,
        "xxh3_64_digest": xxh3_64_digest,
    }
    load = (
        "backend.load(mine)",
        "{name: backend.asarray(x) for name, x in load_file(plain).items()}",
    )
    save = "backend.save(tensors, mine)", "save_file(arrays, plain)"
    sums = "[xxh3_64_digest(x) for x in arrays.values()]"
    found = [_compare("save", *save, names)]
    with _without_the_disk():
        name = "save, without waiting for the disk"
        found.append(_compare(name, save[0], f"({save[1]}, {sums})", names, aim=1.1))
    found.append(_compare("load", *load, names, aim=1.1))
    with _other_cores_busy():
        found.append(_compare("load, the other cores busy", *load, names, aim=1.1))
    into = "backend.load_into(tensors, mine)", load[1]
    found.append(_compare("load into", *into, names, aim=1.1))
    found.append(_compare("checksums alone", sums, load[1], names))
    return [replace(result, name=f"{result.name}, {count} MB") for result in found]


@contextmanager
def _without_the_disk() -> Iterator[None]:
    """Let nothing wait until the disk has what was written, for the length of a block."""
    with patch("os.fsync"):
        yield


@contextmanager
def _other_cores_busy() -> Iterator[None]:
    """Let all cores but one compute for the length of a block."""
    command = [sys.executable, "-c", _BUSY]
    others = len(os.sched_getaffinity(0)) - 1
    processes = [subprocess.Popen(command) for _ in range(others)]  # noqa: S603
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _compare(
    name: str, ours: str, theirs: str, names: dict[str, Any], aim: float | None = None
) -> Result:
    def seconds(statement: Callable[[], object]) -> float:
        start = time.perf_counter()
        statement()
        names["backend"].synchronize()
        return time.perf_counter() - start

    first, second = (eval(f"lambda: {statement}", names) for statement in (ours, theirs))  # noqa: S307  # our own text
    first(), second()  # the first time of each is not like the others
    pairs = [(seconds(first), seconds(second)) for _ in range(_ROUNDS)]
    times = (median(pair[0] for pair in pairs), median(pair[1] for pair in pairs))
    ratio = median(a / b for a, b in pairs)
    return Result(name, ours, theirs, *times, ratio, "ratio", aim, "")


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    frameworks = ("torch", "jax", "tensorflow", "mxnet")
    parser.add_argument("--framework", choices=frameworks, default="torch")
    parser.add_argument("--folder", type=Path, help="the folder for the files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    backend = d2ldev.get_backend(arguments.framework)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = results(backend, Path(folder))
    Console().print(table(f"files of 100 MB, {arguments.framework}", found))
    if arguments.json is not None:
        written = document(found, arguments.framework)
        arguments.json.write_text(format_lines(written), encoding="utf-8")


if __name__ == "__main__":
    main()
