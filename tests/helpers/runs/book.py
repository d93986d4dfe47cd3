"""The book's code on d2ldev: docs/d2l.md has the programs, and tests look at what they make.

Each framework's file adds the cells of the book that are its own: the epochs of section 3.4.
"""

from pages import ROOT, find_blocks
from processes import run_python

EXCEPTIONS = {
    "all": "Cells that define `cpu`, `gpu`, `num_gpus`, `try_gpu` and `try_all_gpus`: take these "
    "functions from `d2l`. The framework itself counts no virtual GPUs",
    "tensorflow": "`net(X)` in TensorFlow: write `with try_gpu():` around it. A virtual GPU is "
    "not TensorFlow's default device",
}
"""Cells of the chapter that need a change; docs/d2l.md lists the same ones."""

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


def run_book(name, epochs, placed, virtual_gpus, of_gpus=""):
    """Run docs/d2l.md for a framework, and then the book's epochs; return what they have expect.

    Args:
        name: of the framework.
        epochs: the cell of section 3.4, which adds ``fit_epoch`` to ``d2l.Trainer``.
        placed: the source of what ``trainer`` has trained, for ``backend.placement``.
        virtual_gpus: how many; 0 is the CPU alone. The machine's own GPUs are hidden.
        of_gpus: a line of the page that is an error on the CPU alone, in the book as well.
    """
    look = f"show_as(next(names), *sorted({{*map(str, backend.placement({placed}).values())}}))\n"
    page = "".join(code for _, _, code in find_blocks(ROOT / "docs" / "d2l.md", name))
    assert of_gpus in page
    page = page if virtual_gpus else page.replace(of_gpus, "")
    names = "names = iter(['trained', 'trained again'])\n"
    program = f"{_BEGIN}{page}{_LOOK}{names}{look}{epochs}{_AGAIN}{look}show(results)"
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "D2LDEV_BACKEND": name,
        "D2LDEV_VIRTUAL_GPUS": str(virtual_gpus),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    (results,) = run_python(program, hide=(), environment=environment)
    return results


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
