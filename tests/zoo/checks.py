"""What a model of the zoo has to pass: each check gives d2ldev's numbers and the framework's own.

A check raises ``AssertionError`` if d2ldev is wrong in silence. Any other error is d2ldev's
refusal, or breaks what the framework alone can do.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from zoo import Model, make_batches

from d2ldev import Backend, Trainer

PLACE = "gpu:1"
BATCHES = 3


class Subject:
    """A model of the zoo, the framework alone (``plain``), and d2ldev's backend."""

    def __init__(
        self,
        model: Model,
        plain: ModuleType,
        backend: Backend[Any, Any],
        folder: Path,
        processes: Path | None = None,
    ) -> None:
        self.model, self.plain, self.backend = model, plain, backend
        self.processes = processes
        folder.mkdir(exist_ok=True)
        self.file, self.checkpoint = folder / "net.safetensors", folder / "run.safetensors"

    def build(self, seed: int = 0) -> Any:
        return self.plain.build(self.model, seed)

    def batches(self) -> list[Any]:
        return make_batches(self.model, BATCHES)

    def predict(self, net: Any, device: str | None = None) -> dict[str, np.ndarray]:
        batch = self.batches()[0]
        if device is not None:
            batch = self.backend.to(batch, device)
        return self.plain.predict(self.model, net, batch)

    def fit(self, epochs: int = 1, num_gpus: int = 1, **arguments: Any) -> Any:
        """Train a new model, and return it."""
        net = self.build()
        trainer = Trainer(epochs, num_gpus=num_gpus, backend=self.backend)
        optimizer = self.plain.make_optimizer(self.model, net)
        if self.model.loss is not None:
            arguments["loss"] = self.model.loss
        trainer.fit(net, self.batches(), optimizer=optimizer, **arguments)
        return trainer.model

    @cached_property
    def trained(self) -> Any:
        """The model after an epoch on one GPU, which wrote a checkpoint."""
        return self.fit(checkpoint=self.checkpoint)

    def plain_run(self, epochs: int) -> dict[str, np.ndarray]:
        """Return the parameters after some epochs of the framework's own loop."""
        net, batches = self.build(), self.batches() * epochs
        optimizer = self.plain.start(self.model, net)
        return self.plain.state_of(self.plain.train(self.model, net, batches, optimizer))

    def fit_on_two_gpus(self) -> dict[str, np.ndarray]:
        """Return the parameters after an epoch on two GPUs."""
        if self.processes is not None:  # two processes have trained it before
            return read_result(self.processes, self.model)
        return self.plain.state_of(self.fit(num_gpus=2))


class ProcessesError(Exception):
    """An error in the processes that trained on two GPUs, with its outcome and its message."""


def write_result(folder: Path, model: Model, result: Any) -> None:
    """Keep the parameters after an epoch in two processes, or the error."""
    (folder / model.id).write_bytes(pickle.dumps(result))


def read_result(folder: Path, model: Model) -> dict[str, np.ndarray]:
    """Return the parameters that ``write_result`` kept, or raise the error."""
    result = pickle.loads((folder / model.id).read_bytes())
    if isinstance(result, ProcessesError):
        raise result
    return result


def check_place(it: Subject) -> None:
    """``place`` moves what the framework moves, and the model computes the same there."""
    expected, before = it.predict(it.build()), it.plain.state_of(it.build())
    net = it.backend.place(it.build(), PLACE)
    left = it.plain.find_elsewhere(it.model, net, it.backend, PLACE)
    assert not left, f"place leaves {left[:3]}, which the framework moves"
    assert_equal(it.plain.state_of(net), before, exact=True)
    assert_equal(it.predict(net, PLACE), expected)


def check_call(it: Subject) -> None:
    """``Trainer.predict`` calls the model as its documentation does."""
    expected = it.predict(it.build())
    trainer = Trainer(1, num_gpus=1, backend=it.backend)
    outputs = trainer.predict(it.build(), it.batches()[:1])
    assert_equal(it.plain.flatten(outputs[0]), expected)


def check_files(it: Subject) -> None:
    """What ``save`` writes on a GPU, ``load_into`` reads into another instance on the CPU."""
    net, other = it.backend.place(it.build(), PLACE), it.build(seed=1)
    expected, ties = it.predict(it.build()), it.plain.ties_of(other)
    it.backend.save(net, it.file)
    other = it.backend.load_into(other, it.file) or other
    assert_equal(it.plain.state_of(other), it.plain.state_of(net), exact=True)
    assert it.plain.ties_of(other) == ties, "load_into changes what shares memory"
    assert_equal(it.predict(other), expected)


def check_replicate(it: Subject) -> None:
    """Each copy of ``replicate`` computes the same on its GPU."""
    net = it.build()
    expected, devices = it.predict(it.build()), ["gpu:0", "gpu:1"]
    for copy, device in zip(it.backend.replicate(net, devices), devices, strict=True):
        assert set(it.backend.placement(copy).values()) <= {
            it.backend.device(device),
            it.backend.cpu(),
        }
        assert_equal(it.predict(copy, device), expected)


def check_fit(it: Subject) -> None:
    """``fit`` on one GPU gives the parameters of the framework's own loop."""
    trained = it.trained
    if not it.model.random:
        assert_equal(it.plain.state_of(trained), it.plain_run(epochs=1))


def check_place_optimizer(it: Subject) -> None:
    """A model and its optimizer, placed together amid a run, go on with the same numbers."""
    net, batches = it.build(), it.batches()
    optimizer = it.plain.start(it.model, net)
    net = it.plain.train(it.model, net, batches, optimizer)
    net, optimizer = it.backend.place((net, optimizer), PLACE)
    net = it.plain.train(it.model, net, it.backend.to(batches, PLACE), optimizer)
    if not it.model.random:
        assert_equal(it.plain.state_of(net), it.plain_run(epochs=2))


def check_resume(it: Subject) -> None:
    """A run that goes on from its checkpoint gives the parameters of one that never stopped."""
    it.trained  # noqa: B018  # and has written the checkpoint
    resumed = it.fit(epochs=2, checkpoint=it.checkpoint, resume=True)
    if not it.model.random:
        assert_equal(it.plain.state_of(resumed), it.plain_run(epochs=2))


def check_two_gpus(it: Subject) -> None:
    """``fit`` on two GPUs gives the parameters of one GPU, where they are to be the same."""
    trained, two = it.trained, it.fit_on_two_gpus()
    if it.model.random or it.model.shares or it.plain.has_batch_statistics(trained):
        assert all(np.isfinite(x).all() for x in two.values())
    else:
        assert_equal(two, it.plain.state_of(trained))


CHECKS: dict[str, Callable[[Subject], None]] = {
    "place": check_place,
    "call": check_call,
    "files": check_files,
    "replicate": check_replicate,
    "place optimizer": check_place_optimizer,
    "fit": check_fit,
    "resume": check_resume,
    "two GPUs": check_two_gpus,
}


def assert_equal(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], exact: bool = False
) -> None:
    """Compare tensors by name, to rounding or exactly."""
    assert expected, "there is nothing to compare"
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())[:4]
    for name, x in expected.items():
        near = np.array_equal if exact else _is_near
        assert near(actual[name], x), (
            f"{name or 'the output'} differs by {_distance(actual[name], x)}"
        )


def _is_near(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


def _distance(a: np.ndarray, b: np.ndarray) -> str:
    return (
        f"{np.abs(a - b).max():.2g}" if a.shape == b.shape else f"its shape: {a.shape}, {b.shape}"
    )


def describe(error: Exception) -> tuple[str, str]:
    """Return whether d2ldev refuses or anything fails, and the message."""
    ours = type(error).__module__.startswith("d2ldev")
    return "refused" if ours else "failed", f"{type(error).__name__}: {error}"


def judge(check: Callable[[Subject], None], subject: Subject) -> dict[str, Any]:
    """Run a check, and return its outcome with the message and the warnings of d2ldev."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome, message = "right", ""
        try:
            check(subject)
        except AssertionError as error:
            outcome, message = "wrong", str(error)
        except ProcessesError as error:
            outcome, message = error.args
        except Exception as error:  # any error at all is an outcome
            outcome, message = describe(error)
    told = [
        str(each.message) for each in caught if type(each.message).__module__.startswith("d2ldev")
    ]
    return {
        "outcome": outcome,
        "message": message[:2000],
        "warnings": [each[:500] for each in told],
    }
