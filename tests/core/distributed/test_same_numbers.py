"""Several processes and one: runs that change their number, files, and the progress of rank 0."""

import io
import os
from contextlib import redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import rich
from launched import together

import d2ldev
from d2ldev import Trainer
from d2ldev.training import progress

# Processes add up the gradients of the parts of a batch in another order; float32, a dozen steps.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def data(examples=15, shuffle=False):
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, 4)).astype("float32")
    return Batches((x, random.integers(0, 3, examples).astype("int32")), shuffle)


class Batches:
    """Batches of 5 examples, whose order is drawn from NumPy's random numbers."""

    def __init__(self, arrays, shuffle):
        self.arrays, self.shuffle = arrays, shuffle

    def __iter__(self):
        n = len(self.arrays[0])
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        for start in range(0, n, 5):
            yield tuple(array[order[start : start + 5]] for array in self.arrays)


class StopError(Exception):
    """Ends a run."""


class Stopping:
    """Ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, loss):
        if step == self.step:
            raise StopError


def run(path, size, *, stop=None, **options):
    """Train in so many processes, or in this one; the parameters and the history of rank 0."""

    def body(rank):
        backend = d2ldev.get_backend("reference")
        np.random.seed(rank)
        callback = None if stop is None else Stopping(stop)
        trainer = Trainer(4, backend=backend, callbacks=callback)
        try:
            trainer.fit(
                backend.mlp([4, 8, 3], seed=0 if size == 1 else rank),
                data(examples=13, shuffle=True),
                data(examples=7),
                loss="cross_entropy",
                optimizer="adam",
                metrics=["accuracy"],
                checkpoint=path,
                resume=True,
                **options,
            )
        except StopError:
            return None
        named = backend.named_tensors(trainer.model)
        return {name: backend.to_numpy(x) for name, x in named.items()}, read_history(path)

    if size == 1:
        return body(0)
    ended = together(body, size)
    assert stop is not None or all(not each.error for each in ended), ended
    return ended[0].value


def read_history(path):
    return d2ldev.get_backend("reference").load(path)["run"]["history"]


@pytest.mark.parametrize(
    "every", [None, 2], ids=["at the end of an epoch", "in the middle of an epoch"]
)
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, every):
    options = {} if every is None else {"checkpoint_every": every}
    np.random.seed(0)
    expected = run(tmp_path / "alone", 1, **options)
    # Steps 4 and 8 are in the second and the third epoch, of 3 batches each, the last one smaller.
    path = tmp_path / "changing"
    run(path, 2, stop=4, **options)
    run(path, 1, stop=8, **options)
    found = run(path, 3, **options)
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, **TOLERANCE)
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, **TOLERANCE)
    assert sorted(os.listdir(tmp_path)) == ["alone", "changing"]


def test_the_best_epoch_is_kept_by_rank_0_alone(tmp_path):
    def body(rank):
        backend = d2ldev.get_backend("reference")
        options = {"best": tmp_path / str(rank), "lr": 3}
        net = backend.mlp([4, 8, 3], seed=rank)
        return Trainer(6, backend=backend).fit(
            net, data(), data(examples=7), loss="cross_entropy", **options
        )

    ended = together(body)
    assert os.listdir(tmp_path) == ["0"]
    kept = read_history(tmp_path / "0")["val_loss"]
    assert kept == ended[1].value["val_loss"][: len(kept)]
    # The best one is not the last one.
    assert kept[-1] == min(ended[1].value["val_loss"]) < ended[1].value["val_loss"][-1]


def test_rank_0_alone_shows_the_progress_and_counts_the_examples_of_all():
    def body(rank):
        # A clock that stands counts a billion examples for each.
        progress.time = SimpleNamespace(monotonic=lambda: 0.0)
        rich.reconfigure(width=200)
        backend = d2ldev.get_backend("reference")
        trainer = Trainer(2, backend=backend, enable_progress_bar=True)
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        with redirect_stdout(terminal):
            trainer.fit(backend.mlp([4, 3]), data(examples=15), loss="cross_entropy")
        return terminal.getvalue()

    first, second = together(body)
    assert "2/2" in first.value
    assert "15,000,000,000 examples/s" in first.value
    assert second.value == ""
