"""The programs of a page: ``python pages.py PAGE NAME`` runs those that are for a backend.

A block that begins with ```` ```python ```` runs on the reference backend. One that begins with
```` ```python torch ```` runs where PyTorch is installed; the other frameworks likewise. ``all`` is
where all are. A block may have several names. Of a block of ``pycon`` the output is compared. The
blocks of a page for one backend are one program. A block whose first line names a file, such as
``# train.py``, is that file.
A block of ``diff`` is a training loop and the same one with d2ldev: see ``run_diff``.
A block with the word ``fragment`` is part of a program: a test of its own runs it, or nothing can.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(
    r"^( *)```(python|pycon|diff)(?: ([\w ]+))?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL
)
FILE = re.compile(r"# ([\w/.-]+\.\w+)\n")
IMPORTED = {
    "torch": ("torch", "torch._dynamo"),  # the compiler, which each optimizer imports
    "jax": ("flax.nnx", "optax"),
    "tensorflow": ("keras", "tensorflow"),
    "reference": ("array_api_strict", "safetensors.numpy"),
}
"""What is imported before the programs of a backend. Not MXNet, which starts threads."""


def find_blocks(page: Path, backend: str) -> Iterator[tuple[int, str, str]]:
    """Find the blocks of a page for a backend; yield the line, the language and the code."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        indent, language, named, code = block.groups()
        if backend in (named or "reference").split():
            lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
            yield text.count("\n", 0, block.start()) + 1, language, "".join(lines)


def find_pages(backend: str) -> list[Path]:
    """Find the pages with a program for a backend."""
    pages = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [page for page in pages if any(find_blocks(page, backend))]


def parametrize_pages(backend: str) -> pytest.MarkDecorator:
    """Make a test of each page with a program for a backend; the argument is ``page``."""
    pages = find_pages(backend)
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def make_environment(backend: str | None) -> dict[str, str]:
    """Return the variables of a program of a page: a backend on two virtual GPUs."""
    environment = {key: each for key, each in os.environ.items() if not key.startswith("D2LDEV_")}
    if backend is not None:
        environment["D2LDEV_BACKEND"] = backend
    return environment | {"D2LDEV_VIRTUAL_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}


def run_page(page: Path, backend: str, folder: Path, active: str | None = None) -> None:
    """Run a page's program for a backend in a process of its own, on two virtual GPUs.

    Args:
        page: the page.
        backend: the name in the blocks.
        folder: an empty folder to run it in.
        active: the backend that runs the program; None is ``backend``.
    """
    import forking  # which a program of a page does not find

    modules = IMPORTED.get(active or backend, ())
    environment = make_environment(None if backend == "all" else active or backend)
    with tempfile.TemporaryDirectory() as temporary:  # the frameworks' compilers leave files there
        environment["TMPDIR"] = temporary
        arguments = [__file__, page, backend]
        done = forking.run(modules, arguments, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def write_files(page: Path, folder: Path, backend: str = "reference") -> None:
    """Write the files of the blocks that name one, and are for a backend."""
    for _, _, code in find_blocks(page, backend):
        write_file(code, folder)


def write_file(code: str, folder: Path) -> bool:
    """Write the file that a block names; return whether it names one."""
    if file := FILE.match(code):
        path = folder / file[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return file is not None


def run_diff(block: str) -> None:
    """Run the second loop of a diff on two GPUs, then the first on the CPU; compare their losses.

    The block is all that ``difflib`` makes of the two programs, so that both can be read from it.
    Both print a loss for each epoch. The second one also has the variables ``d2l``, ``net``,
    ``optimizer`` and ``loss``, and runs in strict mode. d2ldev makes virtual GPUs only before the
    framework's first tensor, so the first loop runs last.
    """
    lines = block.splitlines()[3:]  # after the two names, and the line numbers
    before, after = ([line[1:] for line in lines if line[:1] != sign] for sign in ("+", "-"))
    made = difflib.unified_diff(before, after, "before.py", "after.py", n=len(lines), lineterm="")
    assert [line.rstrip() for line in made] == block.splitlines()
    program = "\n".join(after)
    assert program.count("d2l.try_gpu()") == 1
    os.environ["D2LDEV_STRICT"] = "1"
    losses = []
    for index in (0, 1):
        numbers, names = run_loop(program.replace("d2l.try_gpu()", f"d2l.gpu({index})"))
        losses.append(numbers)
        device = names["d2l"].gpu(index)
        assert names["d2l"].device_of(names["loss"]) is device
        placement = names["d2l"].placement((names["net"], names["optimizer"]))
        assert {*placement.values()} == {device}, placement
    expected, _ = run_loop("\n".join(before))
    assert expected[-1] < expected[0]
    for numbers in losses:
        pairs = zip(numbers, expected, strict=True)
        assert all(math.isclose(*pair, rel_tol=1e-5) for pair in pairs), (numbers, expected)


def run_loop(program: str) -> tuple[list[float], dict[str, Any]]:
    """Run a loop; return the numbers at the end of its printed lines, and its variables."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, namespace)
    return [float(line.split()[-1]) for line in printed.getvalue().splitlines()], namespace


def main(page: str, backend: str) -> int:
    """Run the blocks in order, in one namespace; return 1 if an output is another one."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    sys.path.insert(0, "")
    for line, language, code in find_blocks(Path(page), backend):
        if write_file(code, Path()):
            continue
        if language == "diff":
            run_diff(code)
        elif language == "python":
            exec(compile("\n" * line + code, page, "exec"), namespace)
        else:
            test = doctest.DocTestParser().get_doctest(code, {}, page, page, line)
            test.globs = namespace
            runner.run(test, clear_globs=False)
    return int(runner.failures > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
