"""Values that no call expects, by name; and arguments that are right, by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import d2ldev
from d2ldev import Backend, Trainer
from d2ldev_conformance.provision import hostile_tensors


class OwnError(Exception):
    """What a value itself raises, which a call may pass on."""


def _raise(*_: Any, **__: Any) -> Any:
    raise OwnError("so says the value")


class Hostile:
    """An object each of whose methods raises."""

    __init__ = _raise
    __hash__ = object.__hash__
    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __bool__ = __call__ = _raise
    __index__ = __int__ = __float__ = __complex__ = __array__ = __dlpack__ = __fspath__ = _raise
    __getitem__ = __contains__ = __lt__ = __add__ = __enter__ = __exit__ = _raise


def _deep(make: Callable[[Any], Any]) -> Any:
    nested = make(1.0)
    for _ in range(100_000):
        nested = make(nested)
    return nested


def _cycle() -> list[Any]:
    cycle: list[Any] = [1.0]
    cycle.append({"again": cycle})
    return cycle


def _wide() -> list[Any]:
    """Return a small nesting that has 2**60 leaves, if it is gone through without care."""
    nested: list[Any] = [1.0]
    for _ in range(60):
        nested = [nested, nested]
    return nested


def _just(value: Any) -> Callable[[], Any]:
    return lambda: value


def _generator() -> Iterator[int]:
    yield 1


def _hashable(x: Any) -> Any:
    try:
        hash(x)
    except Exception:
        return "a"
    return x


def values(backend: Backend) -> dict[str, Callable[[], Any]]:
    """Return builders of hostile values, by name; those of the backend's own tensors included."""
    made: dict[str, Callable[[], Any]] = {
        "None": lambda: None,
        "True": lambda: True,
        **{f"number {number}": _just(number) for number in (-1, 0, 0.5, 2**62)},
        **{f"number {number}": _just(number) for number in (2**63, 2**64, -(2**70))},
        "number of 5000 digits": lambda: 10**5000,
        **{f"float {text}": _just(float(text)) for text in ("nan", "inf", "-inf")},
        "complex": lambda: 1j,
        **{f"text {text!r}": _just(text) for text in ("", "a", "\ud800", "\0", "gpu:x")},
        "long text": lambda: "a" * 100_000,
        **{f"bytes {data!r}": _just(data) for data in (b"", b"a", b"\xff")},
        "object": object,
        "class": lambda: int,
        "function": lambda: len,
        "module": lambda: np,
        "generator": _generator,
        "hostile": lambda: object.__new__(Hostile),
        "hostile class": lambda: Hostile,
        "cycle": _cycle,
        "deep list": lambda: _deep(lambda inner: [inner]),
        "deep tuple": lambda: _deep(lambda inner: (inner,)),
        "deep dict": lambda: _deep(lambda inner: {"a": inner}),
        "wide": _wide,
        "ragged": lambda: [[1.0], [1.0, 2.0]],
        "empty list": list,
        "empty dict": dict,
        "set": lambda: {1, "a"},
        "array of objects": lambda: np.array([None, object()]),
        "array of text": lambda: np.array(["a"]),
        "array of times": lambda: np.array(["2020-01-01"], "datetime64[s]"),
        "array of records": lambda: np.zeros(2, [("a", "i4")]),
        "array without axes": lambda: np.zeros(()),
        "empty array": lambda: np.zeros((0, 3)),
        "array of 2**60 elements": lambda: np.broadcast_to(np.float32(1), (2**60,)),
        "tensor": lambda: backend.ones((2, 2)),
        "scalar tensor": lambda: backend.zeros(()),
        "empty tensor": lambda: backend.zeros((0, 3)),
        "tensor of another framework": lambda: d2ldev.get_backend("reference").ones(2),
        "device": lambda: d2ldev.gpu(99),
        "backend": lambda: backend,
        "model": lambda: backend.mlp([2, 1]),
    }
    if "mlp" in backend.framework.cannot:
        del made["model"]
    return {**made, **hostile_tensors(backend)}


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, x),
    "dict": lambda x: {"a": x},
    "key": lambda x: {_hashable(x): 1.0},
    "iterator": lambda x: iter([x]),
    "loader": lambda x: [(x, x)],
}


def right(backend: Backend, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return builders of arguments that are right, by the names of parameters."""
    path = folder / "right.safetensors"
    backend.save([backend.ones((2, 1))], path)

    def x() -> Any:
        return backend.ones((2, 2))

    def y() -> Any:
        return backend.zeros(2, dtype="int32")

    def batches() -> Any:
        return [(backend.ones((2, 2)), backend.ones((2, 1)))]

    def model() -> Any:
        return backend.mlp([2, 1])

    numbers = dict.fromkeys(("step", "seed", "epoch", "fill_value", "max_epochs"), lambda: 0)
    return {
        **numbers,
        **dict.fromkeys(("batch_size", "start"), lambda: 2),
        **dict.fromkeys(("x", "prediction"), x),
        **dict.fromkeys(("batch", "batches", "data", "train_data"), batches),
        **dict.fromkeys(("device", "spec"), lambda: "cpu"),
        "shape": lambda: (2, 2),
        "sizes": lambda: [2, 1],
        "obj": lambda: [backend.ones((2, 1))],
        "path": lambda: path,
        "model": model,
        "y": y,
        "framework": lambda: backend.framework,
        "backend": lambda: backend,
        "loss": lambda: backend.ones(()),
        "history": dict,
        "state": dict,
        "arrays": lambda: np.zeros((2, 2)),
        "scalars": lambda: backend.ones(()),
    }


def owners(backend: Backend) -> dict[type, Callable[[], Any]]:
    """Return the classes whose public functions are called, and what makes one of each."""
    return {
        Backend: lambda: backend,
        Trainer: lambda: Trainer(1, backend=backend),
        d2ldev.ArrayLoader: lambda: d2ldev.ArrayLoader(np.zeros((2, 2)), batch_size=2),
        d2ldev.DeviceLog: lambda: d2ldev.DeviceLog(backend),
    }
