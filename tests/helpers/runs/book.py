"""The chapter "GPUs" of the book as it is printed, run in a process of its own for each framework.

What stands around the chapter's cells is here: ``show_as``, data, and what a ``Trainer`` has to do.
"""

import inspect

from processes import run_python

BOOKS_TRAINER = """
@d2l.add_to_class(d2l.Trainer)
def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):
    self.save_hyperparameters()
    self.gpus = [d2l.gpu(i) for i in range(min(num_gpus, d2l.num_gpus()))]
"""
"""Section 6.7.3, the same in all tabs."""

BOOKS_BATCHES = """
@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    if self.gpus:
        batch = [d2l.to(a, self.gpus[0]) for a in batch]
    return batch
"""
"""The same in all tabs but TensorFlow's."""

BOOKS_RUN = """
class Data(d2l.DataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()
        self.X = as_tensor([[i % 5 - 2.0, i % 3 - 1.0] for i in range(32)])
        self.y = as_tensor([[2.0 * (i % 5 - 2) - 3.4 * (i % 3 - 1) + 4.2] for i in range(32)])

    def get_dataloader(self, train):
        n = self.batch_size
        return [(self.X[i : i + n], self.y[i : i + n]) for i in range(0, 32, n)]

model = LinearRegression(lr=0.1)
trainer = d2l.Trainer(num_gpus=1, max_epochs=10)
history = trainer.fit(model, Data())
show_as('fit', history['loss'][-1] < 0.05 * history['loss'][0], len(model.board.points['val_loss']))
"""
"""A ``LinearRegression`` of section 3.5 is trained with the Trainer of section 6.7.3."""

EXCEPTIONS = {
    "all": "Cells that define `cpu`, `gpu`, `num_gpus`, `try_gpu` and `try_all_gpus`: take these "
    "functions from `d2l`. The framework itself counts no virtual GPUs",
    "tensorflow": "`net(X)` in TensorFlow: write `with try_gpu():` around it. A virtual GPU is "
    "not TensorFlow's default device",
}
"""Cells of the chapter that need a change; docs/d2l.md lists the same ones."""

# ``show_as`` is in place of a notebook, which shows the last line of a cell.
_NOTEBOOK = """
from types import SimpleNamespace

results = {}

def called(device):
    return device if isinstance(device, int) else str(device)

def show_as(name, *values):
    results[name] = [
        [called(each) for each in value] if isinstance(value, list) else called(value)
        for value in values
    ]
"""


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


def run_chapter(program, virtual_gpus):
    """Run the chapter's cells; what they gave to ``show_as(name, *values)``, as a dict.

    Args:
        program: the cells; a value that is not a number is shown as its ``str``.
        virtual_gpus: how many; 0 is the CPU alone. The machine's own GPUs are hidden.
    """
    environment = {"D2LDEV_VIRTUAL_GPUS": str(virtual_gpus), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    code = f"{_NOTEBOOK}{program}\nshow(results)"
    (results,) = run_python(code, hide=(), environment=environment)
    return results


class HyperParameters:
    """The class of section 3.2.1."""

    def save_hyperparameters(self, ignore=[]):  # noqa: B006
        """Make the arguments of the method that calls this attributes."""
        frame = inspect.currentframe().f_back
        _, _, _, local_vars = inspect.getargvalues(frame)
        self.hparams = {
            k: v
            for k, v in local_vars.items()
            if k not in set(ignore + ["self"]) and not k.startswith("_")  # noqa: RUF005
        }
        for k, v in self.hparams.items():
            setattr(self, k, v)


class ProgressBoard:
    """The board of section 3.2.1, which keeps what it is to draw."""

    def __init__(self):
        self.drawn = []

    def draw(self, x, y, label, every_n=1):
        """Keep a point."""
        self.drawn.append((x, float(y), label))

    def losses(self, epochs):
        """Return the training losses, a row for each epoch of four batches and two more.

        What was drawn has to be all points of such epochs, in order.
        """
        labels = ["train_loss"] * 4 + ["val_loss"] * 2
        assert [label for _, _, label in self.drawn] == labels * epochs
        positions = [[i, i + 0.25, i + 0.5, i + 0.75, i + 1, i + 1] for i in range(epochs)]
        assert [x for x, _, _ in self.drawn] == [x for epoch in positions for x in epoch]
        trained = [y for _, y, label in self.drawn if label == "train_loss"]
        return [trained[4 * i : 4 * i + 4] for i in range(epochs)]


def add_with(monkeypatch):
    """Return the book's ``add_to_class``, undone after the test."""

    def add_to_class(Class):  # noqa: N803
        def wrapper(obj):
            monkeypatch.setattr(Class, obj.__name__, obj, raising=False)

        return wrapper

    return add_to_class
