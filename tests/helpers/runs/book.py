"""The book's code on d2ldev: docs/d2l.md has the programs, and tests look at what they make.

Each framework's file adds the cells of the book that are its own: the epochs of section 3.4.
``section_6_7.md`` has the cells of section 6.7 as the book prints them.
"""

import re
from pathlib import Path

from pages import ROOT, find_blocks
from processes import run_python

# ``show_as`` is in place of a notebook, which shows the last line of a cell.
_BEGIN = """
results = {}

def show_as(name, *values):
    results[name] = [each if isinstance(each, (int, float)) else str(each) for each in values]
"""
# After the programs of the page.
_LOOK = """
from d2ldev import backend

show_as('the number', d2l.num_gpus())
show_as('tried', *map(backend.device, [d2l.try_gpu(), d2l.try_gpu(10), *d2l.try_all_gpus()]))
show_as('X, Y', backend.device_of(X), backend.device_of(Y))
show_as('fit', history['loss'][-1] < 0.2 * history['loss'][0], len(model.board.points['val_loss']))
show_as('moved', *map(backend.device_of, trainer.prepare_batch([X, Y])))
"""
# After the epochs of the book have been added to the class.
_AGAIN = """
trainer = d2l.Trainer(max_epochs=2, num_gpus=1)
again = LinearRegression(lr=0.03)
show_as('fit_epoch', trainer.fit(again, Line([2, -3.4], b=4.2)), trainer.train_batch_idx)
losses = [y for _, y in again.board.points['train_loss']]
show_as('learned', losses[-1] < 0.5 * losses[0], len(again.board.points['val_loss']))
"""


def run_book(name, epochs, placed, virtual_gpus):
    """Run docs/d2l.md for a framework, and then the book's epochs; return what they have expect.

    Args:
        name: of the framework.
        epochs: the cell of section 3.4, which adds ``fit_epoch`` to ``d2l.Trainer``.
        placed: the source of what ``trainer`` has trained, for ``backend.placement``.
        virtual_gpus: how many; 0 is the CPU alone. The machine's own GPUs are hidden.
    """
    look = f"show_as(next(names), *sorted({{*map(str, backend.placement({placed}).values())}}))\n"
    page = "".join(code for _, _, code in find_blocks(ROOT / "docs" / "d2l.md", name))
    names = "names = iter(['trained', 'trained again'])\n"
    program = f"{_BEGIN}{page}{_LOOK}{names}{look}{epochs}{_AGAIN}{look}show(results)"
    return _run(program, name, virtual_gpus)


def _run(program, name, virtual_gpus):
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "D2LDEV_BACKEND": name,
        "D2LDEV_VIRTUAL_GPUS": str(virtual_gpus),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    (results,) = run_python(program, hide=(), environment=environment)
    return results


TABS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "mxnet": "MXNet"}
FAILS = {"fails": (0, 2), "fails with fewer than two GPUs": (0,)}
"""With how many GPUs a line of the table fails as it is printed."""
STAYS = "on the CPU with virtual GPUs"
"""What the table says of a line that makes a model elsewhere than its new line."""

# Each statement runs as in a notebook. A cell that fails is run again with the lines of the table.
_CELLS = """
import ast, contextlib, io, sys

sys.displayhook = lambda value: print(repr(value))

def run(code, names, left_out=()):
    with contextlib.redirect_stdout(io.StringIO()):
        for node in ast.parse(code).body:
            if getattr(node, 'name', None) not in left_out:
                exec(compile(ast.Interactive([node]), '<cell>', 'single'), names)

failed, printed, changed = [], {}, {}
for cell, instead in cells:
    try:
        run(cell, printed, left_out)
    except Exception:
        failed.append(cell)
        run(instead, printed, left_out)
    if not changed:  # after the imports
        printed |= {name: getattr(printed['d2l'], name) for name in left_out}
        run(instead + lines, changed)
    else:
        run(instead, changed, defined)

from d2ldev import backend

find_devices = lambda names: sorted({*map(str, backend.placement(names[placed]).values())})
devices = [str(backend.device_of(changed[name])) for name in ('X', 'Y', 'Z')]
show([failed, devices + find_devices(changed), find_devices(printed)])
"""


def run_cells(name, placed, virtual_gpus):
    """Run the cells of section 6.7 as printed, and with the lines that docs/d2l.md has for them.

    On virtual GPUs the definitions of ``cpu`` and the others are left out in both.

    Args:
        name: of the framework.
        placed: the variable of the model, or of its parameters.
        virtual_gpus: how many; 0 is the CPU alone. The machine's own GPUs are hidden.

    Returns:
        The devices of X, Y, Z and the model, with the lines of the page.
    """
    page = (ROOT / "docs" / "d2l.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {TABS[name]} \| `(.+)` \| (.+) \| `(.+)` \|$", page, re.MULTILINE)
    instead = {line: write for line, _, write in rows}
    cells = []
    for _, _, code in find_blocks(Path(__file__).with_name("section_6_7.md"), name):
        cell = code.replace("from d2l import", "from d2ldev.native import")
        lines = [line.partition("  #")[0] for line in cell.splitlines()]
        cells.append((cell, "\n".join(instead.get(line, line) for line in lines)))
    lines, names = zip(
        *re.findall(r"^((\w+(?:, \w+)+) = d2l\..+)$", page, re.MULTILINE), strict=True
    )
    defined = ", ".join(names).split(", ")
    setup = {
        "cells": cells,
        "lines": "\n" + "\n".join(lines),
        "defined": defined,
        "left_out": defined if virtual_gpus else [],
        "placed": placed,
    }
    program = "".join(f"{key} = {value!r}\n" for key, value in setup.items()) + _CELLS
    failed, devices, as_printed = _run(program, name, virtual_gpus)
    found = [line for line in instead if any(line in each.splitlines() for each in failed)]
    assert len(found) == len(failed)
    stays = any(said == STAYS for _, said, _ in rows)
    assert as_printed == (["cpu"] if stays else devices[-1:])
    assert found == [line for line, said, _ in rows if virtual_gpus in FAILS.get(said, ())]
    return devices


def expect(virtual_gpus):
    """Return what the programs show with a number of GPUs: the same on each framework."""
    devices = [f"gpu:{i}" for i in range(virtual_gpus)] or ["cpu"]
    first = devices[0]
    return {
        "the number": [virtual_gpus],
        "tried": [first, "cpu", *devices],
        "X, Y": [first, devices[-1]],
        "fit": [True, 3],
        "moved": [first, first],
        "trained": [first],
        "fit_epoch": [str({}), 16],
        "learned": [True, 2],
        "trained again": [first],
    }


def run_tour(name):
    """Return the exit status of ``d2ldev tour`` on two virtual GPUs, and the cells that failed."""
    code = """
        import contextlib, io
        from d2ldev.cli import tour
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            status = tour.run(virtual_gpus=2)
        show([status, [line for line in text.getvalue().splitlines() if "FAILED" in line]])
    """
    environment = {"D2LDEV_BACKEND": name, "COLUMNS": "200", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return run_python(code, hide=(), environment=environment)[0]
